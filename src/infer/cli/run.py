"""Running one sequence, for `generate`, `trace`, `chat`, `score` and `explain`."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer import progress
from infer.cli.common import (
    AllowSpecialTokensOption,
    ChatTemplateOption,
    LoadOptions,
    OnFullOption,
    OptionGroup,
    PrefixCacheOptions,
    SystemOption,
    ThinkingOption,
)
from infer.cli.status import shown
from infer.cli.streams import can_erase, counted, on_stdout
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.cache.base import Cache
    from infer.engine.result import GeneratedToken, GenerationResult
    from infer.loader.tokenizer import Tokenizer
    from infer.models.common import Decoder
    from infer.trace import Trace

RECOMPUTE_HINT = ", or continue beyond it with --on-full recompute"


@dataclass(frozen=True)
class SequenceOptions(OptionGroup):
    """A prompt, and how to generate from it."""

    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - or no prompt reads standard input.", show_default=False),
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False
    system: SystemOption = None
    thinking: ThinkingOption = None
    chat_template: ChatTemplateOption = None
    allow_special_tokens: AllowSpecialTokensOption = False
    kv_cache: Annotated[bool, typer.Option(help="Without the cache, every step recomputes the sequence.")] = True
    on_full: OnFullOption = "error"

    def check(self) -> None:
        if not self.chat and (self.system is not None or self.thinking is not None):
            raise ValueError("--system and --thinking need --chat: a raw prompt has neither")

    def tokenizer(self, model_name: str) -> "Tokenizer":
        from infer import Tokenizer

        return Tokenizer(model_name, chat_template=self.chat_template, allow_special_tokens=self.allow_special_tokens)

    def encode(self, tokenizer: "Tokenizer", prompt: str | list[dict[str, Any]]) -> list[int]:
        """prompt: text or chat messages."""
        if isinstance(prompt, list):
            return encode_chat(tokenizer, self.thinking, prompt)
        if not self.chat:
            return tokenizer.encode(prompt)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return encode_chat(tokenizer, self.thinking, [*system, {"role": "user", "content": prompt}])


def read_prompt(prompt: str | None, alternative: str = "", what: str = "prompt") -> str:
    """The prompt; standard input, without its last newline, if there is none or it is -.

    alternative: another way to give one, for the error message.
    """
    if prompt is not None and prompt != "-":
        return prompt
    piped = "" if prompt is None and sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    if prompt is None and not piped:
        raise ValueError(f"there is no {what}: give one, or pipe one to standard input{alternative}")
    return piped


def encode_chat(tokenizer: "Tokenizer", thinking: bool | None, messages: list[dict[str, Any]]) -> list[int]:
    if thinking is not None and "enable_thinking" not in (tokenizer.chat_template or "enable_thinking"):
        raise ValueError("this model's chat template has no switch for thinking: leave --thinking/--no-thinking out")
    variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.encode_chat(messages, **variables)


class Run:
    """One sequence of a command. Creating it refuses impossible requests; then its model is loaded."""

    model: "Decoder"

    def __init__(
        self,
        model_name: str,
        prompt: str | list[int],
        params: SamplingParams,
        sequence: SequenceOptions,
        caches: PrefixCacheOptions,
        load: LoadOptions,
    ) -> None:
        """prompt: text, or tokens that are encoded already."""
        from infer import ModelConfig
        from infer.engine.guide import guide_for
        from infer.engine.sequence import ContextExceeded, check_sequence

        sequence.check()
        if sequence.chat_template is not None and not sequence.chat:
            raise ValueError("--chat-template needs --chat: a raw prompt has no template")
        caches.check(sequence.kv_cache)
        self.model_name, self.params, self.sequence, self.caches = model_name, params, sequence, caches
        self.options = load
        self.tokenizer = sequence.tokenizer(model_name)
        self.prompt_ids = prompt if isinstance(prompt, list) else sequence.encode(self.tokenizer, prompt)
        self.config = ModelConfig.from_pretrained(model_name, load.context)
        try:
            check_sequence(self.config, self.prompt_ids, params, on_full=sequence.on_full)
        except ContextExceeded as error:
            raise ValueError(f"{error}{RECOMPUTE_HINT}") from None
        guide_for(params, self.tokenizer, self.config)
        self.positions = len(self.prompt_ids) + params.max_new_tokens

    def load(self) -> None:
        """The draft model first: it is refused if its vocabulary is another."""
        from infer.engine.drafters import drafter_of

        self.drafter: Any = drafter_of(self.caches.speculate, self.tokenizer, self.options.device)
        config = self.config if self.sequence.kv_cache else None
        self.model = self.options.load(self.model_name, config, self.positions, self.caches.cache_dtype)

    def generate(self, *, quiet: bool, trace: "Trace | None" = None) -> "GenerationResult":
        """Generate and print the text as it comes. Ctrl-C stops it; before the first token, it ends the command."""
        from infer.engine.memory import CacheMemory, pass_tokens
        from infer.engine.model import make_cache
        from infer.engine.result import collect

        caches, chunk = self.caches, self.caches.prefill_chunk
        memory = None
        if caches.is_paged:
            memory = CacheMemory(
                self.model, caches.memory_bytes, cache_dtype=caches.cache_dtype, store=caches.prefix_store
            )
            paged = memory.cache(self.positions)
            if len(self.prompt_ids) <= paged.capacity:
                memory.attach_prefix(paged, self.prompt_ids)
            chunk = pass_tokens(self.config, chunk)
            cache: Cache = paged
        else:
            cache = make_cache(
                self.model,
                self.positions,
                self.model.device,
                use_kv_cache=self.sequence.kv_cache,
                prefill_chunk=chunk,
                cache_dtype=caches.cache_dtype,
            )
        cached_tokens = cache.seq_len
        drafter = self.drafter
        tokens = self._stream(cache=cache, prefill_chunk=chunk, trace=trace, speculate=drafter)
        steps = show(tokens, quiet=quiet, total=self.params.max_new_tokens)
        if not steps:
            sys.exit(130)
        if memory is not None:
            memory.keep(paged)
        drafts = {} if drafter is None else {"drafted": drafter.num_drafted, "accepted": drafter.num_accepted}
        return collect(self.prompt_ids, steps, cache.memory_bytes, num_cached_tokens=cached_tokens, **drafts)

    def without_cache(self, total: int) -> "GenerationResult | None":
        """The same generation without the cache, not printed; None if Ctrl-C skips it. total: its number of tokens."""
        from infer.engine.result import collect

        tokens = self._stream(use_kv_cache=False)
        steps = show(tokens, quiet=True, total=total, name="without the cache", note="Ctrl-C skips")
        return collect(self.prompt_ids, steps, 0) if steps and steps[-1].finish_reason is not None else None

    def _stream(self, **options: Any) -> "Iterator[GeneratedToken]":
        from infer.engine.generate import stream

        on_full = self.sequence.on_full
        return stream(self.model, self.tokenizer, self.prompt_ids, self.params, on_full=on_full, **options)


def show(
    tokens: Any, *, quiet: bool = False, wrap: bool = False, total: int = 0, name: str = "", note: str = ""
) -> list["GeneratedToken"]:
    """Print a stream as it comes, and return its tokens. Ctrl-C stops it.

    wrap: on a terminal, wrap words and color Markdown.
    total: maximum number of tokens, for the status line, which is shown if the text is not printed to a terminal.
    name, note: of the status line; its note is the speed, if there is none.
    """
    from infer.cli.answer import Answer

    steps = []
    answer = Answer() if wrap and can_erase(sys.stdout) else None
    is_counted = total > 0 and (quiet or not sys.stdout.isatty())
    try:
        with shown(progress.PREFILL, *[progress.GENERATING] * is_counted):
            for token in tokens:
                steps.append(token)
                if not quiet:
                    text = on_stdout(token.text)
                    print(answer.write(text) if answer else text, end="", flush=True)
                if is_counted:
                    speed = f"{1 / max(token.time_s, 1e-9):.1f} tok/s"
                    progress.report(progress.GENERATING, len(steps), total, name, note=note or speed)
    except KeyboardInterrupt:
        tokens.close()
    finally:
        if answer:
            print(answer.end(), end="", flush=True)
    if not quiet and not answer:
        print(flush=True)
    return steps


def stats_line(result: "GenerationResult") -> str:
    timing = result.timing
    drafts = f" · {result.accepted} of {counted(result.drafted, 'draft')} right" if result.drafted else ""
    speed = f" at {timing.decode_tokens_per_s:.1f} tok/s" if timing.decode_times_s else ""
    cache = result.cache_memory_bytes
    size = f"{cache / 1e6:.1f} MB" if cache >= 1e5 or not cache else f"{cache / 1e3:.1f} kB"
    return (
        f"{counted(result.prompt_tokens, 'prompt token')}, prefill {timing.prefill_time_s:.2f} s · "
        f"{counted(result.generated_tokens, 'new token')}{speed} · cache {size}"
        f"{drafts}{' · interrupted' if result.finish_reason == 'interrupted' else ''}"
    )


def as_dict(result: "GenerationResult") -> dict[str, Any]:
    values = asdict(result)
    del values["schema"], values["model"], values["embedding"]
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] is not None:
            values[name] = [each and each._asdict() for each in values[name]]
    if not result.drafted:
        del values["drafted"], values["accepted"]
    for name in ("seed", "logprobs", "prompt_logprobs"):
        if values[name] is None:
            del values[name]
    values["timing"] |= {
        "decode_time_s": result.timing.decode_time_s,
        "decode_tokens_per_s": result.timing.decode_tokens_per_s,
    }
    return values


def spread(count: int, maximum: int) -> list[int]:
    """At most `maximum` of the numbers 0 to count - 1, evenly spaced, the first and the last included."""
    chosen = min(count, maximum)
    return [i * (count - 1) // max(1, chosen - 1) for i in range(chosen)]
