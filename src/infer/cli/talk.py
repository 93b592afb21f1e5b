"""`infer generate` and `infer chat`."""

import functools
import json
import secrets
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    ChatOption,
    JsonOption,
    KVCacheOption,
    Loading,
    ModelOption,
    OnFullOption,
    PrefillChunkOption,
    PromptArgument,
    SystemOption,
    ThinkingOption,
    check_cache_dtype,
    loading_options,
    sampling_options,
)
from infer.cli.streams import on_stdout, say
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.cache.base import Cache
    from infer.config import ModelConfig
    from infer.engine.result import GeneratedToken, GenerationResult
    from infer.loader import Tokenizer
    from infer.models.common import Decoder


@sampling_options
@loading_options
def generate(
    prompt: PromptArgument,
    *,
    model: ModelOption = DEFAULT_MODEL,
    chat: ChatOption = False,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    prefill_chunk: PrefillChunkOption = None,
    kv_cache: KVCacheOption = True,
    cache_dtype: CacheDtypeOption = "auto",
    on_full: OnFullOption = "error",
    compare: Annotated[bool, typer.Option("--compare", help="Generate again without the cache.")] = False,
    as_json: JsonOption = False,
    loading: Loading,
    params: SamplingParams,
) -> None:
    """Generate from a prompt, streaming."""
    from infer.engine.generate import stream
    from infer.engine.result import collect

    if compare and not kv_cache:
        raise ValueError("--compare needs the cache: leave --no-kv-cache out")
    if compare and params.seed is None:
        params = replace(params, seed=secrets.randbits(63))  # or the two runs would draw other tokens
    tokenizer, config, prompt_ids = prepare(
        prompt,
        model,
        params,
        chat=chat,
        system=system,
        thinking=thinking,
        prefill_chunk=prefill_chunk,
        kv_cache=kv_cache,
        cache_dtype=cache_dtype,
        on_full=on_full,
    )
    positions = len(prompt_ids) + params.max_new_tokens
    network = loading.load(model, config if kv_cache else None, positions, cache_dtype)
    cache = cache_for(network, prompt_ids, params, prefill_chunk, kv_cache, cache_dtype)
    stepping = stream(network, tokenizer, prompt_ids, params, cache=cache, prefill_chunk=prefill_chunk, on_full=on_full)
    steps = show(stepping, quiet=as_json)
    if not steps:
        sys.exit(130)
    result = collect(prompt_ids, steps, cache.memory_bytes)
    interrupted = result.finish_reason == "interrupted"
    output = {"model": model, **as_dict(result)}
    gain = ""
    if compare and not interrupted:
        reference = without_cache(network, tokenizer, prompt_ids, params, on_full, result)
        if reference is not None:
            same = reference.token_ids == result.token_ids
            speed_up = total_time(reference) / total_time(result)
            output["without_kv_cache"] = {**as_dict(reference), "same_tokens": same, "speed_up": speed_up}
            why = "see `infer verify`" if cache_dtype == "auto" else f"{cache_dtype} rounds, see `infer perplexity`"
            tokens = "same tokens" if same else f"OTHER tokens: {why}"
            gain = f" · {speed_up:.1f}x faster than without the cache ({total_time(reference):.1f} s, {tokens})"
    say(f"[{figures(result)}{gain}]")
    if as_json:
        print(json.dumps(output))
    if interrupted:
        sys.exit(130)


@sampling_options
@loading_options
def chat(
    *,
    model: ModelOption = DEFAULT_MODEL,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    prefill_chunk: PrefillChunkOption = None,
    context: Annotated[
        int | None, typer.Option(help="Positions to allocate the cache for.", show_default="4096, or all the model has")
    ] = None,
    cache_dtype: CacheDtypeOption = "auto",
    loading: Loading,
    params: SamplingParams,
) -> None:
    """Talk with a model. The cache is kept between turns, so only new tokens are prefilled."""
    from infer import ModelConfig, Tokenizer
    from infer.engine.caches import make_cache
    from infer.engine.conversation import Conversation
    from infer.engine.request import CacheExceeded, ContextExceeded, check_chunk, check_request

    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype)
    tokenizer = Tokenizer(model)
    encode = functools.partial(encode_chat, tokenizer, thinking)
    config = ModelConfig.from_pretrained(model)
    capacity = min(4096, config.max_position_embeddings) if context is None else context
    if not 1 <= capacity <= config.max_position_embeddings:
        raise ValueError(f"context must be from 1 to the model's {config.max_position_embeddings}, not {context}")
    # A model without a chat template, or a context without room for any turn, is refused before the weights are read.
    try:
        check_request(config, encode([{"role": "user", "content": "hello"}]), params, capacity)
    except CacheExceeded as error:
        raise ValueError(f"--context {capacity} has no room for a turn: {error}") from None
    network = loading.load(model, config, capacity, cache_dtype)
    cache = make_cache(network, capacity, network.device, prefill_chunk=prefill_chunk, cache_dtype=cache_dtype)
    conversation = Conversation(network, tokenizer, encode, cache, system, prefill_chunk)
    say(f"{model}: {capacity} positions, {cache.memory_bytes / 1e6:.0f} MB of cache. /reset forgets, /exit leaves.")
    while True:
        text = ask()
        if text is None or text == "/exit":
            break
        if text == "/reset":
            conversation.reset()
        elif text:
            try:
                steps = show(conversation.reply(text, params))
            except (CacheExceeded, ContextExceeded) as error:
                say(f"{error} (/reset forgets the conversation; --context makes room for longer ones)")
                continue
            except ValueError as error:
                say(str(error))
                continue
            if steps:
                new = sum(step.time_s for step in steps[1:])
                speed = f" at {(len(steps) - 1) / new:.1f} tok/s" if new else ""
                say(f"[{len(steps)} tokens{speed}, {steps[0].time_s:.2f} s to the first; cache holds {cache.seq_len}]")


def ask() -> str | None:
    """The user's next line; None at the end."""
    try:
        if sys.stdin.isatty():
            say()
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    if not line:
        say()
        return None
    return line.strip()


def prepare(
    prompt: str,
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
    """The prompt's tokens. What cannot be generated is refused, before the weights are read."""
    from infer import ModelConfig, Tokenizer
    from infer.engine.request import ContextExceeded, check_chunk, check_request

    text = sys.stdin.read() if prompt == "-" else prompt
    if prefill_chunk is not None and not kv_cache:
        raise ValueError("--prefill-chunk needs the cache: leave --no-kv-cache out")
    if not chat and (system is not None or thinking is not None):
        raise ValueError("--system and --thinking go with --chat: a raw prompt has neither")
    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype, kv_cache)
    tokenizer = Tokenizer(model)
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        prompt_ids = encode_chat(tokenizer, thinking, [*messages, {"role": "user", "content": text}])
    else:
        prompt_ids = tokenizer.encode(text)
    config = ModelConfig.from_pretrained(model)
    try:
        check_request(config, prompt_ids, params, on_full=on_full)
    except ContextExceeded as error:
        raise ValueError(f"{error}, or go on beyond it with --on-full recompute") from None
    return tokenizer, config, prompt_ids


def cache_for(
    network: "Decoder",
    prompt_ids: list[int],
    params: SamplingParams,
    prefill_chunk: int | None,
    kv_cache: bool,
    cache_dtype: str,
) -> "Cache":
    """As large as the request."""
    from infer.engine.caches import make_cache

    return make_cache(
        network,
        len(prompt_ids) + params.max_new_tokens,
        network.device,
        use_kv_cache=kv_cache,
        prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype,
    )


def encode_chat(tokenizer: "Tokenizer", thinking: bool | None, messages: list[dict[str, str]]) -> list[int]:
    from infer.loader import render_chat_template

    if thinking is not None and "enable_thinking" not in (tokenizer.chat_template or "enable_thinking"):
        raise ValueError("this model's chat template has no switch for thinking: leave --thinking/--no-thinking out")
    variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    prompt = render_chat_template(messages, tokenizer=tokenizer, **variables)
    return tokenizer.encode(prompt, add_special_tokens=False)


def show(tokens: Any, *, quiet: bool = False) -> list["GeneratedToken"]:
    """Print a stream as it comes. Ctrl-C ends it and keeps what is there."""
    steps = []
    try:
        for token in tokens:
            steps.append(token)
            if not quiet:
                print(on_stdout(token.text), end="", flush=True)
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
    progress = sys.stderr.isatty()
    try:
        for step in stream(network, tokenizer, prompt_ids, params, use_kv_cache=False, on_full=on_full):
            steps.append(step)
            if progress:
                note = f"the same without the cache: {len(steps)}/{cached.generated_tokens} tokens (Ctrl-C skips)"
                print(f"\r{note}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return None
    finally:
        if progress:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    return collect(prompt_ids, steps, 0)


def total_time(result: "GenerationResult") -> float:
    return result.timing.prefill_time_s + result.timing.decode_time_s


def figures(result: "GenerationResult") -> str:
    timing = result.timing
    speed = f" at {timing.decode_tokens_per_s:.1f} tok/s" if timing.decode_times_s else ""
    cache = result.cache_memory_bytes
    size = f"{cache / 1e6:.1f} MB" if cache >= 1e5 or not cache else f"{cache / 1e3:.1f} kB"
    return (
        f"{result.prompt_tokens} prompt tokens, prefill {timing.prefill_time_s:.2f} s · "
        f"{result.generated_tokens} new tokens{speed} · cache {size}"
        f"{' · interrupted' if result.finish_reason == 'interrupted' else ''}"
    )


def as_dict(result: "GenerationResult") -> dict[str, Any]:
    values = asdict(result)
    values["timing"] |= {
        "decode_time_s": result.timing.decode_time_s,
        "decode_tokens_per_s": result.timing.decode_tokens_per_s,
    }
    return values
