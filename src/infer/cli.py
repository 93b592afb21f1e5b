"""The `infer` command. Torch and the rest are imported by the commands that need them: `--help` answers at once."""

import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.engine.generate import GeneratedToken, GenerationResult
    from infer.loader import Tokenizer
    from infer.models.common import Decoder

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cached generation with language models: exact, readable, visible, fast.",
)

MODEL_HELP = "A folder, a .gguf file, a built-in name (see `infer models`), or a hub id."
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
SystemOption = Annotated[str | None, typer.Option(help="A system message to begin with.")]


def main(args: list[str] | None = None) -> None:
    """Run the command line; what the user can mend is one line, and exit status 2."""
    try:
        app(args)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}")
        sys.exit(2)


def say(message: str = "") -> None:
    """Everything but the answer itself goes to stderr."""
    print(message, file=sys.stderr, flush=True)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of SamplingParams, and hand it the whole as `params`."""
    signature = inspect.signature(command)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "params"]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        chosen = {field.name: values.pop(field.name) for field in fields(SamplingParams)}
        chosen["logit_bias"] = dict(map(parse_bias, chosen["logit_bias"]))
        command(**values, params=SamplingParams(**chosen))

    types = {"top_k": int | None, "seed": int | None, "stop": list[str], "logit_bias": list[str]}
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=[] if types.get(field.name) == list[str] else field.default,
            annotation=Annotated[types.get(field.name, type(field.default)), typer.Option(help=field.metadata["help"])],
        )
        for field in fields(SamplingParams)
    ]
    wrapped.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return wrapped


def parse_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias is given as ID:BIAS, like 42:-1.5, not {entry!r}") from None


@app.command()
@sampling_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    *,
    model: ModelOption = DEFAULT_MODEL,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: SystemOption = None,
    kv_cache: Annotated[bool, typer.Option(help="Without it every step recomputes the whole sequence.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Generate again without the cache.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    params: SamplingParams,
) -> None:
    """Generate from a prompt, streaming."""
    from infer.engine.generate import check_request, collect, make_cache, stream

    text = sys.stdin.read() if prompt == "-" else prompt
    if system is not None and not chat:
        raise ValueError("--system goes with --chat: a raw prompt has no system message")
    network, tokenizer = load(model, dtype, device)
    if chat:
        messages = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": text}]
        prompt_ids = encode_chat(tokenizer, messages)
    else:
        prompt_ids = tokenizer.encode(text)
    check_request(network.config, prompt_ids, params)
    cache = make_cache(network, len(prompt_ids) + params.max_new_tokens, network.device, use_kv_cache=kv_cache)
    steps = show(stream(network, tokenizer, prompt_ids, params, cache=cache), quiet=as_json)
    if not steps:
        sys.exit(130)
    result = collect(prompt_ids, steps, cache.memory_bytes)
    interrupted = result.finish_reason == "interrupted"
    output = {"model": model, **as_dict(result)}
    line = figures(result)
    if compare and kv_cache and not interrupted:
        reference = without_cache(network, tokenizer, prompt_ids, params, result)
        if reference is not None:
            same = reference.token_ids == result.token_ids
            speed_up = total_time(reference) / total_time(result)
            output["without_kv_cache"] = {**as_dict(reference), "same_tokens": same, "speed_up": speed_up}
            line += f" · {speed_up:.1f}x faster than without the cache ({total_time(reference):.1f} s, "
            line += "same tokens)" if same else "OTHER tokens: see `infer verify`)"
    say(line)
    if as_json:
        print(json.dumps(output))
    if interrupted:
        sys.exit(130)


@app.command()
@sampling_options
def chat(
    *,
    model: ModelOption = DEFAULT_MODEL,
    system: SystemOption = None,
    context: Annotated[int, typer.Option(help="Positions to allocate the cache for.")] = 4096,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    params: SamplingParams,
) -> None:
    """Talk with a model. The cache is kept between turns, so only new tokens are prefilled."""
    from infer.cache import KVCache
    from infer.engine.conversation import Conversation

    network, tokenizer = load(model, dtype, device)
    capacity = min(context, network.config.max_position_embeddings)
    cache = KVCache.from_model_config(network.config, capacity, dtype=network.dtype, device=network.device)
    encode = functools.partial(encode_chat, tokenizer)
    encode([{"role": "user", "content": "hello"}])  # a model without a chat template says so before the first turn
    conversation = Conversation(network, tokenizer, encode, cache, system)
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
            except ValueError as error:
                say(f"{error} (/reset forgets the conversation)")
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


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A built-in name or a hub id.", metavar="NAME")]) -> None:
    """Fetch a model, so that it can be used offline."""
    from infer.loader.find import locate

    print(locate(name, weights=True))


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List built-in models and what is cached."""
    from infer.loader.builtin import BUILTIN
    from infer.loader.hub import cached_models

    rows = [(m.name, m.size, m.is_cached, f"built in: {m.title}, {m.license}") for m in BUILTIN.values()]
    rows += [(name, size, True, "from the hub") for name, size in cached_models()]
    if as_json:
        keys = ("name", "bytes", "cached", "source")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
        return
    for name, size, cached, source in rows:
        print(f"{name:<24} {size / 1e6:>8.0f} MB   {'cached' if cached else 'not yet fetched':<16} {source}")


@app.command()
def info(
    model: ModelArgument = DEFAULT_MODEL,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """What a model is and what it will need, before anything is allocated."""
    from infer.loader.describe import describe

    facts = describe(model, dtype, device)
    if as_json:
        print(json.dumps(asdict(facts)))
        return
    for name, value in facts.lines():
        print(f"{name:<22} {value}")


@app.command()
def verify(
    model: ModelArgument = DEFAULT_MODEL,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 32,
    seed: Annotated[int, typer.Option(help="For the sampled runs.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Prove that the cache changes nothing: generate with and without it, greedy and seeded, and compare."""
    from infer.engine.verify import PROMPTS
    from infer.engine.verify import verify as compare_runs

    texts: tuple[str, ...] = PROMPTS
    if prompts is not None:
        texts = tuple(line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip())
        if not texts:
            raise ValueError(f"{prompts} holds no prompts")
    network, tokenizer = load(model, dtype, device)
    rows = []
    for row in compare_runs(network, tokenizer, [tokenizer.encode(text) for text in texts], max_new_tokens, seed):
        rows.append(row)
        if not as_json:
            outcome = f"equal, {row.tokens} tokens"
            if not row.equal:
                outcome = f"DIFFERS at step {row.first_difference}; margin between the two best logits {row.margin:.2e}"
            print(
                f"{row.mode:<7} {row.cache:<13} {json.dumps(texts[row.prompt], ensure_ascii=False)[:40]:<42} {outcome}"
            )
    different = sum(not row.equal for row in rows)
    if as_json:
        comparisons = [asdict(row) | {"prompt": texts[row.prompt], "equal": row.equal} for row in rows]
        print(json.dumps({"model": model, "equal": not different, "comparisons": comparisons}))
    say(f"{len(rows) - different} of {len(rows)} runs with a cache generate exactly what the run without one does")
    if different:
        sys.exit(1)


def load(model: str, dtype: str, device: str) -> tuple["Decoder", "Tokenizer"]:
    from infer.loader import Tokenizer, load_model

    tokenizer = Tokenizer(model)  # the quicker of the two, so what is wrong shows sooner
    return load_model(model, dtype=dtype, device=device)[0], tokenizer


def encode_chat(tokenizer: "Tokenizer", messages: list[dict[str, str]]) -> list[int]:
    from infer.loader import render_chat_template

    return tokenizer.encode(render_chat_template(messages, tokenizer=tokenizer), add_special_tokens=False)


def show(tokens: Any, *, quiet: bool = False) -> list["GeneratedToken"]:
    """Print a stream as it comes. Ctrl-C ends it and keeps what is there."""
    steps = []
    try:
        for token in tokens:
            steps.append(token)
            if not quiet:
                print(token.text, end="", flush=True)
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
    cached: "GenerationResult",
) -> "GenerationResult | None":
    """The same generation, recomputing everything; None if the user does not want to wait for it."""
    from infer.engine.generate import collect, stream

    steps: list[GeneratedToken] = []
    progress = sys.stderr.isatty()
    try:
        for step in stream(network, tokenizer, prompt_ids, params, use_kv_cache=False):
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
    return (
        f"[{result.prompt_tokens} prompt tokens, prefill {timing.prefill_time_s:.2f} s · "
        f"{result.generated_tokens} new tokens{speed} · cache {result.cache_memory_bytes / 1e6:.1f} MB"
        f"{' · interrupted' if result.finish_reason == 'interrupted' else ''}]"
    )


def as_dict(result: "GenerationResult") -> dict[str, Any]:
    values = asdict(result)
    values["timing"] |= {
        "decode_time_s": result.timing.decode_time_s,
        "decode_tokens_per_s": result.timing.decode_tokens_per_s,
    }
    return values
