"""Render chat messages to a prompt with the model's Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.loader.files import read_text
from infer.loader.limited_process import LimitedProcess, ProcessEnded
from infer.values import MESSAGES, takes

if TYPE_CHECKING:
    from infer.loader.tokenizer import Tokenizer

_ALTERNATE = "conversation roles must alternate user/assistant/user/assistant/..."
# Mistral's: `instructions` is what comes of the system message, before the first turn or within the last one.
_MISTRAL = (
    "<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}BEFORE{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    f"{{{{ raise_exception('After the optional system message, {_ALTERNATE}') }}}}{{% endif %}}"
    "{% if m.role == 'user' %}[INST]WITHIN{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# By family, and by the names that the field has for them. Without tools, they equal the models' own templates, except
# for the system turns with today's date that Llama 3.1 and later, Mistral Small and gpt-oss put first.
TEMPLATES = {
    "llama": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # Thoughts are kept only after the last question; the last answer has a thought even if empty.
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
    "qwen2": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
        "You are a helpful assistant.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "mistral": _MISTRAL.replace("BEFORE", "").replace(
        "WITHIN", "{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}"
    ),
    "ministral3": _MISTRAL.replace("WITHIN", "").replace(
        "BEFORE", "{% if system is defined %}[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{% if m.role != 'system' or m.content %}"
        "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
    ),
    "gpt_oss": (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n\nReasoning: {{ reasoning_effort or 'medium' }}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "{% if messages[0].role == 'system' %}{% if messages[0].content %}<|start|>developer<|message|>"
        "# Instructions\n\n{{ messages[0].content }}\n\n<|end|>{% endif %}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}"
        "{{ '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
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
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TEMPLATES |= {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": TEMPLATES["llama"],
    "gemma": TEMPLATES["gemma3"],
    "gemma2": _NO_SYSTEM + TEMPLATES["gemma3"],
}


def read_chat_template(name_or_file: str | Path) -> str:
    """One of `TEMPLATES`, or the contents of a Jinja file."""
    if (name := str(name_or_file)) in TEMPLATES:
        return TEMPLATES[name]
    try:
        template = read_text(Path(name))
        _render(template, None)
    except (OSError, ValueError) as error:
        raise ValueError(f"a chat template is a Jinja file or one of {', '.join(TEMPLATES)}: {error}") from None
    return template


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
    ("llama", "qwen3", "mistral", ...). Other keywords (enable_thinking=False, ...) are variables of the template.
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
                "this model has no chat template: it completes raw prompts, as `infer generate` without --chat does; "
                "--chat-template gives it one"
            )
        template = tokenizer.chat_template
        special = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
    elif (family := (model_type or "").removesuffix("_text")) in TEMPLATES:  # a config says gemma3_text
        template = TEMPLATES[family]
    else:
        raise ValueError(f"no chat template for model_type {model_type!r}: give a tokenizer, or {', '.join(TEMPLATES)}")
    variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, **special, **variables}
    return _render(template, variables)


_process = LimitedProcess(Path(__file__).with_name("template_process.py"))


def _render(template: str, variables: dict[str, Any] | None) -> str:
    """Render in the process of `template_process.py`, within its limits. None: only compile."""
    try:
        request = f"{json.dumps(template)}\n{json.dumps(variables, default=_as_json)}".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages and variables of a chat template must be JSON values: {error}") from None
    try:
        answer = json.loads(_process.answer(request))
    except ProcessEnded as error:
        raise ValueError(f"the chat template was stopped: {error}") from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return str(answer["text"])


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not")
