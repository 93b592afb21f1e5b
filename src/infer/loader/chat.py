"""Chat messages to a prompt, by the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

    from infer.loader.tokenizer import Tokenizer

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
    elif model_type in TEMPLATES:
        template = TEMPLATES[model_type]
    else:
        raise ValueError(f"no chat template for model_type {model_type!r}: give a tokenizer, or {', '.join(TEMPLATES)}")
    import jinja2

    try:
        return _compile(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **special, **variables
        )
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Compile a template as Hugging Face does: sandboxed, as it comes with the checkpoint."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what to train on; here it is only its contents."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from None
