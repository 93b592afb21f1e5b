"""Chat messages to a prompt, by the model's own Jinja template."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.values import MESSAGES, takes

if TYPE_CHECKING:
    from infer.loader.tokenizer import Tokenizer

WAIT = 10.0  # seconds for a rendering: more than its share of a busy machine needs, and a bound for everything else

# What a family's turns look like, for when no tokenizer is at hand. Tools apart, they are those of the models' own
# templates, but for the system turn with today's date that Llama 3.1 and later put first.
TEMPLATES = {
    "llama": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # Thoughts are kept only after the last question, where the last answer has them even if empty.
    "qwen3": (
        "{% set ns = namespace(question=messages | length - 1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% set thought, answer = '', m.content %}"
        "{% if m.role == 'assistant' and '</think>' in answer %}"
        "{% set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set answer = answer.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if m.role == 'assistant' and loop.index0 > ns.question and (loop.last or thought) %}"
        "<think>\n{{ thought }}\n</think>\n\n{{ answer.lstrip('\n') }}{% else %}{{ answer }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "gemma3": (
        "<bos>{% if messages[0].role == 'system' %}{% set system = messages[0].content ~ '\n\n' %}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ system if loop.first and system }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}


@takes(messages=MESSAGES)
def render_chat_template(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer | None = None,
    model_type: str | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt for a conversation; encode it with add_special_tokens=False.

    messages: each {"role": ..., "content": ...}. The template is the tokenizer's own, or a family's by model_type
    ("llama", "qwen3", "gemma3"). Further keywords (enable_thinking=False, ...) are handed to the template.
    """
    for message in messages:
        if not {"role", "content"} <= message.keys():
            raise ValueError(f"a message needs a role and a content; this one has {sorted(message)}")
    if not messages:
        raise ValueError("a chat needs at least one message")
    special = {}
    if tokenizer is not None:
        if tokenizer.chat_template is None:
            raise ValueError(
                "this model has no chat template: it completes raw prompts, as `infer generate` without --chat does"
            )
        template = tokenizer.chat_template
        special = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
    elif (family := (model_type or "").removesuffix("_text")) in TEMPLATES:  # a config says gemma3_text
        template = TEMPLATES[family]
    else:
        raise ValueError(f"no chat template for model_type {model_type!r}: give a tokenizer, or {', '.join(TEMPLATES)}")
    variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, **special, **variables}
    return _render(template, variables)


_process: subprocess.Popen[bytes] | None = None  # renders templates; started by the first, and after one that ended it
_exchange = threading.Lock()


def _render(template: str, variables: dict[str, Any]) -> str:
    """Have it rendered, within limits: see `template_process.py`."""
    global _process
    try:
        request = f"{json.dumps(template)}\n{json.dumps(variables, default=_as_json)}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a chat template is given what JSON can hold: {error}") from None
    with _exchange:
        if _process is None or _process.poll() is not None:
            _end()
            _process = _start()
        assert _process.stdin is not None
        assert _process.stdout is not None
        deadline = threading.Timer(WAIT, _process.kill)
        deadline.start()
        try:
            _process.stdin.write(request)
            _process.stdin.flush()
            reply = _process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        except BaseException:  # its reply would be taken for the next one's
            _end()
            raise
        finally:
            deadline.cancel()
        if not reply:
            raise ValueError(f"the chat template was stopped: {_why_it_ended(_end())}")
    answer = json.loads(reply)
    if "error" in answer:
        raise ValueError(answer["error"])
    return str(answer["text"])


def _start() -> subprocess.Popen[bytes]:
    # -P: modules are not looked for beside the script. A session of its own: Ctrl-C is not for it.
    command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("template_process.py"))]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


@atexit.register
def _end() -> int | None:
    """End the process, if there is one; returns its status."""
    global _process
    process, _process = _process, None
    if process is None:
        return None
    process.kill()
    with suppress(BrokenPipeError), process:  # closes its pipes
        pass
    return process.wait()


def _why_it_ended(status: int | None) -> str:
    if status == -signal.SIGPROF:
        return "it takes too long"
    return f"the process that renders it ended with status {status}"


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not")
