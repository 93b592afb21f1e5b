"""`infer explain`: what the KV cache saves, shown on a run of the user's own."""

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.common import DEFAULT_MODEL, JsonOption, Loading, ModelOption, loading_options
from infer.cli.generate import read_prompt
from infer.cli.streams import on_stdout, say

if TYPE_CHECKING:
    from rich.text import Text

    from infer.config import ModelConfig
    from infer.evaluate.explain import Explanation, LayerKind

WIDTH = 100  # columns, at most
LABEL, GAP = 14, 3  # of which for a token, and between the grids
PROMPT_ROWS = 7
PROMPT_SHOWN = 400  # characters
CHART_ROWS = 8
NEW_STYLE, REPEATED_STYLE, REUSED_STYLE = "bold green", "red", "cyan"


@loading_options
def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")] = "The cat sat on the",
    *,
    model: ModelOption = DEFAULT_MODEL,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", help="Tokens to generate, greedily and past any end of the text: 2 or more."
        ),
    ] = 24,
    as_json: JsonOption = False,
    loading: Loading,
) -> None:
    """See what the KV cache saves: generate with it and without it, and count, time and weigh."""
    from infer import ModelConfig, Tokenizer
    from infer.evaluate import explain as explaining
    from infer.trace.text import token_texts

    text = read_prompt(prompt)
    tokenizer, config = Tokenizer(model), ModelConfig.from_pretrained(model)
    prompt_ids = tokenizer.encode(text)
    explaining.check(config, prompt_ids, max_new_tokens)  # before the weights are read
    network = loading.load(model)
    say(f"generating {max_new_tokens} tokens with the cache, and then again without it")
    run = explaining.explain(network, tokenizer, prompt_ids, max_new_tokens)
    tokens = token_texts(tokenizer, [*run.prompt_token_ids, *run.token_ids], bytes_named=False)
    if as_json:
        print(json.dumps({"model": model, "tokens": tokens, **as_dict(run, config)}))
    else:
        show(run, tokens, config, model)


def as_dict(run: "Explanation", config: "ModelConfig") -> dict[str, Any]:
    from infer.evaluate.explain import cache_layout

    cost = run.cost
    return asdict(run) | {
        "theoretical_speed_up": run.theoretical_speed_up,
        "speed_up": run.speed_up,
        "cost": asdict(cost) | {"fixed_ms": cost.fixed_ms, "per_token_ms": cost.per_token_ms},
        "cache": [
            {"positions": positions, "kinds": [asdict(kind) for kind in layout]}
            for positions in (run.positions, config.max_position_embeddings)
            for layout in [cache_layout(config, positions, run.element_size)]
        ],
    }


def show(run: "Explanation", tokens: Sequence[str], config: "ModelConfig", model: str) -> None:
    """The guided tour, section by section; plain text where the output is no terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    width = min(WIDTH, console.width)
    prompt, new = "".join(tokens[: len(run.prompt_token_ids)]), "".join(tokens[len(run.prompt_token_ids) :])
    console.print(f"{model} continues a prompt of {len(run.prompt_token_ids)} tokens with {len(run.token_ids)} more:\n")
    shown = prompt if len(prompt) <= PROMPT_SHOWN else f"…{prompt[-PROMPT_SHOWN:]}"
    console.print(Text.assemble((on_stdout(shown), "bold"), (on_stdout(new), NEW_STYLE)), soft_wrap=True)
    sections: list[tuple[str, Iterator[str | Text]]] = [
        ("Which keys and values each step computes", grids(run, tokens, width)),
        ("Tokens processed", counts(run)),
        ("Time", times(run, width)),
        ("Memory", memory(run, config)),
        ("Where to look next", further()),
    ]
    for number, (title, lines) in enumerate(sections, 1):
        console.print(Text(f"\n{number}. {title}\n", "bold"))
        for line in lines:
            # Figures are indented and stay as they are; the rest is prose.
            prose = isinstance(line, str) and not line.startswith("  ")
            console.print(textwrap.fill(str(line), width) if prose else line, soft_wrap=True)


def grids(run: "Explanation", tokens: Sequence[str], width: int) -> "Iterator[str | Text]":
    """Both grids side by side: a row per token that is fed, a column per step."""
    from rich.cells import set_cell_size
    from rich.text import Text

    from infer.evaluate.explain import NEW, NOT_YET, REPEATED, REUSED, work

    prompt_tokens, steps = len(run.prompt_token_ids), len(run.token_ids)
    cell = max(3, len(str(max(run.without_cache.fed))) + 1)
    shown_steps = max(1, min(steps, (width - LABEL - GAP) // 2 // cell))
    gap = max(GAP, len("without the cache  ") - cell * shown_steps)
    new, repeated, reused = ("■", NEW_STYLE), ("x", REPEATED_STYLE), ("·", REUSED_STYLE)
    symbols = {NEW: new, REPEATED: repeated, REUSED: reused, NOT_YET: (" ", "")}

    def row(label: str, cells: Callable[[int, bool], tuple[str, str]]) -> Text:
        line = Text(set_cell_size(label, LABEL))
        for use_kv_cache in (False, True):
            for step in range(shown_steps):
                text, style = cells(step, use_kv_cache)
                line.append(f"{text:>{cell}}", style)
            line.append("" if use_kv_cache else " " * gap)
        line.rstrip()
        return line

    def token_row(label: str, token: int) -> Text:
        return row(label, lambda step, cached: symbols[work(token, step, prompt_tokens, use_kv_cache=cached)])

    yield (
        "To choose a token, attention needs the key and the value (K/V) of every token before it. A token's own never "
        "change once they are computed, because it sees only what is before it."
    )
    yield ""
    yield Text(f"{'K/V of':<{LABEL + cell - 1}}{'without the cache':<{cell * shown_steps + gap}}with it")
    yield row("  at step", lambda step, _: (str(step + 1), ""))
    fed = (run.without_cache.fed, run.with_cache.fed)
    yield row("  tokens fed", lambda step, cached: (str(fed[cached][step]), ""))
    shown_prompt = prompt_tokens if prompt_tokens <= PROMPT_ROWS else PROMPT_ROWS - 1
    for token in range(shown_prompt):
        yield token_row(quoted(tokens[token]), token)
    if shown_prompt < prompt_tokens:
        yield token_row(f"… {prompt_tokens - shown_prompt:,} more", shown_prompt)
    for token in range(prompt_tokens, prompt_tokens + shown_steps - 1):
        yield token_row(quoted(tokens[token]), token)
    if shown_steps < steps:
        more = steps - shown_steps
        yield f"… and {more:,} more step{'s' * (more > 1)}, with another token each"
    yield ""
    legend = ((new, "computed"), (repeated, "computed again, for nothing"), (reused, "taken from the cache"))
    yield Text("   ").join(Text.assemble(symbol, f" {meaning}") for symbol, meaning in legend)


def quoted(text: str) -> str:
    """A token as one short word, its spaces and line ends visible."""
    text = on_stdout(json.dumps(text, ensure_ascii=False))
    return text if len(text) < LABEL else f'{text[: LABEL - 3]}…"'


def counts(run: "Explanation") -> Iterator[str]:
    p, n = len(run.prompt_token_ids), len(run.token_ids)
    whole, cached = f"{n}·{p} + {n}·{n - 1}/2", f"{p} + {n - 1}"
    pad, digits = len(whole), len(f"{run.without_cache.tokens:,}")
    yield f"P = {p:,} prompt tokens and N = {n:,} new ones take N passes. Tokens fed to the model, over all passes:"
    yield ""
    yield f"  without   P + (P+1) + … + (P+N-1) = N·P + N(N-1)/2 = {whole} = {run.without_cache.tokens:,}"
    yield f"  with      P + 1 + … + 1           = P + N-1        = {cached:<{pad}} = {run.with_cache.tokens:>{digits},}"
    yield ""
    yield (
        f"With the cache that is {run.theoretical_speed_up:.1f} times fewer. After a prompt of one token (P = 1) it "
        f"would be N(N+1)/2 = {n * (n + 1) // 2:,} against N = {n:,}: (N+1)/2 = {(n + 1) / 2:.1f} times fewer."
    )


def times(run: "Explanation", width: int) -> "Iterator[str | Text]":
    whole, cached = run.without_cache, run.with_cache
    yield from chart(run, width)
    yield ""
    same = f"the same {len(run.token_ids)}" if run.same_tokens else "OTHER (see `infer verify`)"
    yield f"The two runs generated {same} tokens. All steps together took"
    yield ""
    for name, passes in (("without", whole), ("with", cached)):
        yield (
            f"  {name:<9} {passes.total_ms:>9,.1f} ms for {passes.tokens:>6,} tokens = "
            f"{passes.ms_per_token:.3g} ms per token"
        )
    yield ""
    yield f"  speed-up by count      {run.theoretical_speed_up:>6.1f}x"
    yield (
        f"  speed-up as measured   {run.speed_up:>6.1f}x = {run.theoretical_speed_up:.1f} x "
        f"{whole.ms_per_token:.3g} / {cached.ms_per_token:.3g}"
    )
    yield ""
    yield from reason(run)


def chart(run: "Explanation", width: int) -> "Iterator[Text]":
    """The time of some steps, evenly spread, as bars on one scale."""
    from rich.text import Text

    steps = len(run.token_ids)
    rows = min(CHART_ROWS, steps)
    longest = max(run.without_cache.times_ms + run.with_cache.times_ms)
    half = (width - 4) // 2
    bar = half - 13
    yield Text(f"{'step':<6}{'ms without the cache':<{half}}ms with it")
    for i in range(rows):
        step = i * (steps - 1) // (rows - 1)
        line = Text(f"{step + 1:>4}")
        for passes, style in ((run.without_cache, REPEATED_STYLE), (run.with_cache, REUSED_STYLE)):
            length = max(1, round(passes.times_ms[step] / longest * bar))
            line.append(f"{passes.times_ms[step]:>9,.1f}  ")
            line.append(f"{'■' * length:<{half - 11}}", style)
        line.rstrip()
        yield line


def reason(run: "Explanation") -> Iterator[str]:
    """Why counting and measuring differ, from what was measured."""
    cost, whole, cached, n = run.cost, run.without_cache, run.with_cache, len(run.token_ids)
    medians = (
        f"a pass over {cost.pass_tokens:g} tokens took {cost.pass_ms:.2f} ms, one over a single token "
        f"{cost.step_ms:.2f} ms (medians)"
    )
    if run.speed_up >= run.theoretical_speed_up:
        yield (
            f"Counting takes every token to cost alike. Here {medians}: a token cost more in the long passes than by "
            "itself, so the cache gained more than the count says."
        )
        return
    if not cost.is_plausible:
        yield (
            f"Counting takes every token to cost alike. Here {medians}: what a token adds to a pass cannot be told "
            "from what a pass costs anyway. More tokens, or a larger model, will show it."
        )
        return
    # As they are shown, so that what is shown adds up.
    each, fixed = f"{cost.per_token_ms:.2f}", f"{round(cost.step_ms, 2) - round(cost.per_token_ms, 2):.2f}"
    yield f"Counting takes every token to cost alike, but those of one pass share what it costs anyway: {medians}. So"
    yield ""
    yield f"  a token adds   ({cost.pass_ms:.2f} - {cost.step_ms:.2f}) / ({cost.pass_tokens:g} - 1) = {each} ms"
    yield f"  a pass costs   {cost.step_ms:.2f} - {each} = {fixed} ms besides"
    yield ""
    for name, passes in (("without", whole), ("with", cached)):
        yield (
            f"  {name:<9} {n} passes x {fixed} + {passes.tokens:>{len(str(whole.tokens)) + 1},} tokens x {each} = "
            f"{cost.of(passes):>{len(f'{cost.of(whole):,.0f}')},.0f} ms (measured: {passes.total_ms:,.0f})"
        )
    yield ""
    off = max(abs(cost.of(passes) / passes.total_ms - 1) for passes in (whole, cached))
    if off > 0.2:
        yield f"(The line is {off:.0%} off: some steps took much longer than those beside them.)"
        yield ""
    yield (
        "Whether it feeds one token or many, a pass reads the weights "
        f"({run.weight_bytes / 1e6:,.0f} MB; in {fixed} ms that is {run.weight_bytes / cost.fixed_ms / 1e6:,.1f} GB/s) "
        f"and starts every operation once. The cache saves tokens, not passes: there are {n} with it and without it."
        f"{growth(whole.times_ms)}"
    )


def growth(times_ms: Sequence[float]) -> str:
    """Nothing, where a busy machine hides it."""
    half = len(times_ms) // 2
    ratio = sum(times_ms[-half:]) / sum(times_ms[:half])
    if ratio <= 1:
        return ""
    return (
        f" It gains more the longer the text: without it, the later half of the steps took {ratio:.1f} times the first."
    )


def memory(run: "Explanation", config: "ModelConfig") -> Iterator[str]:
    from infer.evaluate.explain import cache_layout

    yield "What it costs is memory: 2 (K and V) x layers x KV heads x head_dim x positions x bytes of a number."
    for title, positions in (("this run", run.positions), ("the full context", config.max_position_embeddings)):
        layout = cache_layout(config, positions, run.element_size)
        yield ""
        yield f"  {title}, {positions:,} positions: {megabytes(sum(kind.bytes for kind in layout))}"
        for kind in layout:
            yield f"    {layer_kind(kind, config, run.element_size)}"
        if positions == run.positions:
            yield f"    allocated: {run.cache_bytes:,} bytes ({positions - 1:,} filled: the last token is never fed)"
    if config.has_windows:
        everything = config.max_position_embeddings * config.cache_bytes_per_token(run.element_size)
        yield ""
        yield (
            f"A window layer sees the last {config.sliding_window:,} positions, so it keeps a ring of those and of a "
            "chunk that is being written beside them, however long the text. If every layer kept everything, the full "
            f"context would take {megabytes(everything)}."
        )
    yield from shared_memory(run, config)


def shared_memory(run: "Explanation", config: "ModelConfig") -> Iterator[str]:
    """What many conversations take, in pages of one memory."""
    from infer.cache.pool import PAGE, bytes_for

    size, many = run.element_size, 64
    prefix = config.max_position_embeddings // 2 // PAGE * PAGE
    yield ""
    yield (
        f"Many conversations share one memory, in pages of {PAGE} positions that each takes as it grows: this run "
        f"would hold {megabytes(bytes_for(config, run.positions, size))}. Those that begin alike hold that part once."
    )
    if prefix:
        once, each = bytes_for(config, prefix, size), bytes_for(config, prefix + PAGE, size)
        yield (
            f"So {many} conversations with {prefix:,} tokens in common and {PAGE} of their own take "
            f"{megabytes(once + many * (each - once))} instead of {megabytes(many * each)}."
        )


def layer_kind(kind: "LayerKind", config: "ModelConfig", element_size: int) -> str:
    name = f"{'window' if kind.window else 'full'} layers: " if config.has_windows else ""
    factors = (2, kind.layers, config.num_key_value_heads, config.computed_head_dim, kind.slots, element_size)
    return f"{name}{' x '.join(f'{factor:,}' for factor in factors)} = {kind.bytes:,} bytes"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def further() -> Iterator[str]:
    yield "  infer trace         what each step looked at, and how sure it was"
    yield "  infer verify        that no kind of cache changes what is generated"
    yield "  infer bench         the speed of this machine, with more trials"
    yield "  docs/kv-cache.md    how the cache is built, from the wasteful loop to pages"
