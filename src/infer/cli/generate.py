"""`infer generate`, and what it shares with other commands."""

import functools
import json
import secrets
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer import progress
from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    CacheMemoryOption,
    ChatOption,
    JsonOption,
    KVCacheOption,
    Loading,
    ModelOption,
    OnFullOption,
    PrefillChunkOption,
    PrefixStoreOption,
    PromptArgument,
    SystemOption,
    ThinkingOption,
    check_cache_dtype,
    loading_options,
    parse_size,
    sampling_options,
)
from infer.cli.sampling import Asked, resolve, tell
from infer.cli.status import shown
from infer.cli.streams import counted, on_stdout, say
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.cache.base import Cache
    from infer.config import ModelConfig
    from infer.engine.memory import CacheMemory
    from infer.engine.result import GeneratedToken, GenerationResult
    from infer.loader import Tokenizer
    from infer.models.common import Decoder


@functools.partial(sampling_options, and_more=True, usual={})
@functools.partial(loading_options, split=True)
def generate(
    prompt: PromptArgument = None,
    *,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Generate from all prompts of a file (- for standard input), and print a JSON object for each as it "
            'finishes. A line is a JSON string, or an object with a "prompt" or "messages"; in a .txt file, a text.',
        ),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    chat: ChatOption = False,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    prefill_chunk: PrefillChunkOption = None,
    kv_cache: KVCacheOption = True,
    cache_dtype: CacheDtypeOption = "auto",
    on_full: OnFullOption = "error",
    cache_memory: CacheMemoryOption = None,
    prefix_store: PrefixStoreOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Generate again without the cache.")] = False,
    as_json: JsonOption = False,
    loading: Loading,
    params: Asked,
) -> None:
    """Generate from a prompt, streaming; or from many at once, with --prompts."""
    from infer.engine.generate import stream
    from infer.engine.result import collect

    pages, asked = Pages(parse_size(cache_memory), prefix_store), params.params
    if prompts is not None:
        if prompt is not None:
            raise ValueError("a prompt and --prompts were both given: leave one out")
        if compare or not kv_cache or on_full != "error":
            raise ValueError("--compare, --no-kv-cache and --on-full go with one prompt: leave them out with --prompts")
        generate_many(
            prompts,
            model,
            params,
            chat=chat,
            system=system,
            thinking=thinking,
            prefill_chunk=prefill_chunk,
            cache_dtype=cache_dtype,
            pages=pages,
            loading=loading,
        )
        return
    if asked.n != 1 or asked.prompt_logprobs is not None:
        raise ValueError("--n (samples; -n is the length) and --prompt-logprobs go with --prompts: this is one text")
    if asked.logprobs is not None and not as_json:
        raise ValueError("--logprobs needs --json, which prints them")
    prompt = read_prompt(prompt, ", or a file of them with --prompts")
    if compare and not kv_cache:
        raise ValueError("--compare needs the cache: leave --no-kv-cache out")
    settings = resolve(model, params)
    chosen = settings.params
    if compare and chosen.seed is None:
        chosen = replace(chosen, seed=secrets.randbits(63))  # or the two runs would draw other tokens
    tokenizer, config, prompt_ids = prepare(
        prompt,
        model,
        chosen,
        chat=chat,
        system=system,
        thinking=thinking,
        prefill_chunk=prefill_chunk,
        kv_cache=kv_cache,
        cache_dtype=cache_dtype,
        on_full=on_full,
    )
    pages.check(kv_cache)
    tell(settings)
    positions = len(prompt_ids) + chosen.max_new_tokens
    network = loading.load(model, config if kv_cache else None, positions, cache_dtype)
    cache = cache_for(network, prompt_ids, chosen, prefill_chunk, kv_cache, cache_dtype, pages)
    prefill_chunk = pages.chunk(config, prefill_chunk)
    known = cache.seq_len
    stepping = stream(network, tokenizer, prompt_ids, chosen, cache=cache, prefill_chunk=prefill_chunk, on_full=on_full)
    steps = show(stepping, quiet=as_json, most=chosen.max_new_tokens)
    if not steps:
        sys.exit(130)
    result = collect(prompt_ids, steps, cache.memory_bytes)
    pages.keep(cache)
    interrupted = result.finish_reason == "interrupted"
    output = {"model": model, **as_dict(result)}
    gain = ""
    if pages.asked:
        output["prompt_tokens_known"] = known
        gain = f" · {known:,} prompt tokens reused"
    if chosen.constraint is not None and result.finish_reason == "length":
        gain += f" · cut at {counted(chosen.max_new_tokens, 'new token')}, before it matched"
    if compare and not interrupted:
        reference = without_cache(network, tokenizer, prompt_ids, chosen, on_full, result)
        if reference is not None:
            same = reference.token_ids == result.token_ids
            speed_up = total_time(reference) / total_time(result)
            output["without_kv_cache"] = {**as_dict(reference), "same_tokens": same, "speed_up": speed_up}
            why = "see `infer verify`" if cache_dtype == "auto" else f"{cache_dtype} rounds, see `infer perplexity`"
            tokens = "same tokens" if same else f"OTHER tokens: {why}"
            gain += f" · {speed_up:.1f}x faster than without the cache ({total_time(reference):.1f} s, {tokens})"
    say(f"[{figures(result)}{gain}]", dim=True)
    if as_json:
        print(json.dumps(output))
    if interrupted:
        sys.exit(130)


def generate_many(
    source: str,
    model: str,
    params: Asked,
    *,
    chat: bool,
    system: str | None,
    thinking: bool | None,
    prefill_chunk: int | None,
    cache_dtype: str,
    pages: "Pages",
    loading: Loading,
) -> None:
    from infer import LLM, ModelConfig, Tokenizer
    from infer.cli.prompts import read_lines, run_lines
    from infer.engine.guide import guide_for
    from infer.engine.request import check_chunk

    lines = read_lines(source, params.params)
    if not chat and (system is not None or thinking is not None):
        raise ValueError("--system and --thinking go with --chat: a raw prompt has neither")
    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype)
    pages.check(kv_cache=True)
    settings = resolve(model, params)
    lines = [line._replace(params=replace(settings.params, **line.settings)) for line in lines]
    tokenizer = Tokenizer(model)
    first = [{"role": "system", "content": system}] if system is not None else []

    def encode(prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            return encode_chat(tokenizer, thinking, prompt)
        if chat:
            return encode_chat(tokenizer, thinking, [*first, {"role": "user", "content": prompt}])
        return tokenizer.encode(prompt)

    for constrained in {line.params.constraint: line.params for line in lines if line.params.constraint}.values():
        guide_for(constrained, tokenizer, ModelConfig.from_pretrained(model))  # refused before the weights are read
    tell(settings)
    network = loading.load(model)
    with LLM(
        network,
        tokenizer,
        cache_memory=pages.size,
        cache_dtype=cache_dtype,
        prefix_store=pages.store,
        prefill_chunk=prefill_chunk,
    ) as llm:
        if run_lines(llm, lines, encode, as_dict):
            sys.exit(1)


def prepare(
    prompt: str | list[int],
    model: str,
    params: SamplingParams,
    *,
    chat: bool,
    system: str | None,
    thinking: bool | None,
    prefill_chunk: int | None,
    kv_cache: bool,
    cache_dtype: str,
    on_full: str,
) -> tuple["Tokenizer", "ModelConfig", list[int]]:
    """The prompt's tokens, unless it is these. What cannot be generated is refused, before the weights are read."""
    from infer import ModelConfig, Tokenizer
    from infer.engine.request import ContextExceeded, Request, check_chunk

    if prefill_chunk is not None and not kv_cache:
        raise ValueError("--prefill-chunk needs the cache: leave --no-kv-cache out")
    if not chat and (system is not None or thinking is not None):
        raise ValueError("--system and --thinking go with --chat: a raw prompt has neither")
    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype, kv_cache)
    tokenizer = Tokenizer(model)
    if isinstance(prompt, list):
        prompt_ids = prompt
    elif chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        prompt_ids = encode_chat(tokenizer, thinking, [*messages, {"role": "user", "content": prompt}])
    else:
        prompt_ids = tokenizer.encode(prompt)
    config = ModelConfig.from_pretrained(model)
    try:
        Request(config, tokenizer, prompt_ids, params, on_full=on_full)
    except ContextExceeded as error:
        raise ValueError(f"{error}, or go on beyond it with --on-full recompute") from None
    return tokenizer, config, prompt_ids


def read_prompt(typed: str | None, instead: str = "", what: str = "prompt") -> str:
    """What was typed; of nothing or -, standard input without its last newline, which is no part of what was meant.

    instead: what else could be given, for the error where there is nothing.
    """
    if typed is not None and typed != "-":
        return typed
    piped = "" if typed is None and sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    if typed is None and not piped:
        raise ValueError(f"there is no {what}: give one, or pipe one to standard input{instead}")
    return piped


def cache_for(
    network: "Decoder",
    prompt_ids: list[int],
    params: SamplingParams,
    prefill_chunk: int | None,
    kv_cache: bool,
    cache_dtype: str,
    pages: "Pages | None" = None,
) -> "Cache":
    """As large as the request; or in pages, where these are asked for, with what is known of the prompt."""
    from infer.engine.caches import make_cache

    if pages is not None and pages.asked:
        return pages.cache(network, prompt_ids, params, cache_dtype)
    return make_cache(
        network,
        len(prompt_ids) + params.max_new_tokens,
        network.device,
        use_kv_cache=kv_cache,
        prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype,
    )


@dataclass
class Pages:
    """What a command was told of pages, and their memory once there is a model."""

    size: int | None
    store: Path | None
    memory: "CacheMemory | None" = None

    @property
    def asked(self) -> bool:
        return self.size is not None or self.store is not None

    def check(self, kv_cache: bool) -> None:
        if self.asked and not kv_cache:
            raise ValueError("--cache-memory and --prefix-store need the cache: leave --no-kv-cache out")
        if self.store is not None:
            from infer.engine.store import PrefixStore

            PrefixStore(self.store)  # refused now, not after the weights have been read

    def cache(self, network: "Decoder", prompt_ids: list[int], params: SamplingParams, cache_dtype: str) -> "Cache":
        from infer.engine.memory import CacheMemory

        self.memory = CacheMemory(network, self.size, cache_dtype=cache_dtype, store=self.store)
        cache = self.memory.cache(len(prompt_ids) + params.max_new_tokens)
        if len(prompt_ids) <= cache.capacity:
            self.memory.recall(cache, prompt_ids)
        return cache

    def chunk(self, config: "ModelConfig", prefill_chunk: int | None) -> int | None:
        from infer.engine.memory import pass_tokens

        return pass_tokens(config, prefill_chunk) if self.asked else prefill_chunk

    def keep(self, cache: "Cache") -> None:
        from infer.cache import PagedCache

        if self.memory is not None and isinstance(cache, PagedCache):
            self.memory.keep(cache)


def encode_chat(tokenizer: "Tokenizer", thinking: bool | None, messages: list[dict[str, str]]) -> list[int]:
    if thinking is not None and "enable_thinking" not in (tokenizer.chat_template or "enable_thinking"):
        raise ValueError("this model's chat template has no switch for thinking: leave --thinking/--no-thinking out")
    variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.encode_chat(messages, **variables)


def show(tokens: Any, *, quiet: bool = False, most: int = 0) -> list["GeneratedToken"]:
    """Print a stream as it comes. Ctrl-C ends it and keeps what is there.

    most: tokens that may come. Where they are not seen coming, a terminal shows how many there are.
    """
    steps = []
    told = [progress.GENERATING] if most and (quiet or not sys.stdout.isatty()) else []
    try:
        with shown(progress.PREFILL, *told):
            for token in tokens:
                steps.append(token)
                if not quiet:
                    print(on_stdout(token.text), end="", flush=True)
                if told:
                    speed = f"{1 / max(token.time_s, 1e-9):.1f} tok/s"
                    progress.tell(progress.GENERATING, len(steps), most, note=speed)
    except KeyboardInterrupt:
        tokens.close()
    if not quiet:
        print(flush=True)
    return steps


def without_cache(
    network: "Decoder",
    tokenizer: "Tokenizer",
    prompt_ids: list[int],
    params: SamplingParams,
    on_full: str,
    cached: "GenerationResult",
) -> "GenerationResult | None":
    """The same generation, recomputing everything; None if the user does not want to wait for it."""
    from infer.engine.generate import stream
    from infer.engine.result import collect

    steps: list[GeneratedToken] = []
    try:
        with shown(progress.GENERATING):
            for step in stream(network, tokenizer, prompt_ids, params, use_kv_cache=False, on_full=on_full):
                steps.append(step)
                done, total = len(steps), cached.generated_tokens
                progress.tell(progress.GENERATING, done, total, "without the cache", note="Ctrl-C skips")
    except KeyboardInterrupt:
        return None
    return collect(prompt_ids, steps, 0)


def total_time(result: "GenerationResult") -> float:
    return result.timing.prefill_time_s + result.timing.decode_time_s


def figures(result: "GenerationResult") -> str:
    timing = result.timing
    speed = f" at {timing.decode_tokens_per_s:.1f} tok/s" if timing.decode_times_s else ""
    cache = result.cache_memory_bytes
    size = f"{cache / 1e6:.1f} MB" if cache >= 1e5 or not cache else f"{cache / 1e3:.1f} kB"
    return (
        f"{counted(result.prompt_tokens, 'prompt token')}, prefill {timing.prefill_time_s:.2f} s · "
        f"{counted(result.generated_tokens, 'new token')}{speed} · cache {size}"
        f"{' · interrupted' if result.finish_reason == 'interrupted' else ''}"
    )


def as_dict(result: "GenerationResult") -> dict[str, Any]:
    values = asdict(result)
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] is not None:
            values[name] = [each and each._asdict() for each in values[name]]
    for name in ("seed", "logprobs", "prompt_logprobs"):
        if values[name] is None:
            del values[name]
    values["timing"] |= {
        "decode_time_s": result.timing.decode_time_s,
        "decode_tokens_per_s": result.timing.decode_tokens_per_s,
    }
    return values
