"""`infer explain`: what the KV cache saves, measured on the user's prompt."""

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.common import DEFAULT_MODEL, JsonOption, LoadOptions, ModelOption
from infer.cli.run import read_prompt, spread
from infer.cli.streams import counted, on_stdout, say

if TYPE_CHECKING:
    from rich.text import Text

    from infer.config import ModelConfig
    from infer.evaluate.explain import Explanation

WIDTH = 100  # columns, at most
LABEL, GAP = 14, 3  # columns of a token's label, and between the grids
PROMPT_ROWS = 7
PROMPT_SHOWN = 400  # characters
CHART_ROWS = 8
NEW_STYLE, REPEATED_STYLE, REUSED_STYLE = "bold green", "red", "cyan"


def explain(
    *,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")] = "The cat sat on the",
    model_name: ModelOption = DEFAULT_MODEL,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", help="Tokens to generate, greedily and past end-of-sequence: 2 or more."
        ),
    ] = 24,
    as_json: JsonOption = False,
    load: LoadOptions,
) -> None:
    """See what the KV cache saves: generate with and without it, and compare tokens, time and memory."""
    from infer import ModelConfig, Tokenizer
    from infer.evaluate import explain as explaining
    from infer.trace.text import token_texts

    text = read_prompt(prompt)
    tokenizer, config = Tokenizer(model_name), ModelConfig.from_pretrained(model_name, load.context)
    prompt_ids = tokenizer.encode(text)
    explaining.check(config, prompt_ids, max_new_tokens)  # before the weights are read
    model = load.load(model_name)
    say(f"generating {max_new_tokens} tokens with the cache, then again without it")
    run = explaining.explain(model, tokenizer, prompt_ids, max_new_tokens)
    tokens = token_texts(tokenizer, [*run.prompt_token_ids, *run.token_ids], bytes_named=False)
    if as_json:
        print(json.dumps({"model": model_name, "tokens": tokens, **as_dict(run, config)}))
    else:
        show(run, tokens, config, model_name)


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


def show(run: "Explanation", tokens: Sequence[str], config: "ModelConfig", model_name: str) -> None:
    """The guided tour, section by section; plain text if the output is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(WIDTH, console.width)
    prompt, new = "".join(tokens[: len(run.prompt_token_ids)]), "".join(tokens[len(run.prompt_token_ids) :])
    console.print(
        f"{model_name} continues a prompt of {len(run.prompt_token_ids)} tokens with {len(run.token_ids)} more:\n"
    )
    shown = prompt if len(prompt) <= PROMPT_SHOWN else f"…{prompt[-PROMPT_SHOWN:]}"
    console.print(Text.assemble((on_stdout(shown), "bold"), (on_stdout(new), NEW_STYLE)), soft_wrap=True)
    sections: dict[str, Iterable[str | Text]] = {
        "Which keys and values each step computes": grids(run, tokens, console.width),
        "Tokens processed": counts(run),
        "Time": [chart(run, console.width), *times(run), *reason(run)],
        "Memory": [*memory(run, config), *shared_memory(run, config)],
        "Where to look next": [FURTHER],
    }
    for number, (title, blocks) in enumerate(sections.items(), 1):
        console.print(Text(f"\n{number}. {title}", "bold"))
        for block in blocks:
            console.print()
            # Figures are indented and keep their lines; prose is wrapped.
            is_figure = isinstance(block, Text) or block.startswith("  ")
            console.print(block if is_figure else textwrap.fill(str(block), console.width), soft_wrap=True)


def grids(run: "Explanation", tokens: Sequence[str], width: int) -> "Iterator[str | Text]":
    """Both grids side by side: a row per token, a column per step."""
    from rich.cells import set_cell_size
    from rich.text import Text

    from infer.evaluate.explain import DROPPED, NEW, NOT_YET, REPEATED, REUSED, work

    prompt_tokens, steps = len(run.prompt_token_ids), len(run.token_ids)
    cell = max(3, len(str(max(run.without_cache.fed))) + 1)
    shown_steps = max(1, min(steps, (width - LABEL - GAP) // 2 // cell))
    gap = max(GAP, len("without the cache  ") - cell * shown_steps)
    new, repeated, reused = ("■", NEW_STYLE), ("x", REPEATED_STYLE), ("·", REUSED_STYLE)
    symbols = {NEW: new, REPEATED: repeated, REUSED: reused, NOT_YET: (" ", ""), DROPPED: (" ", "")}

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
        def kind(step: int, cached: bool) -> str:
            return work(token, step, prompt_tokens, use_kv_cache=cached, context=run.context)

        return row(label, lambda step, cached: symbols[kind(step, cached)])

    yield (
        "To choose a token, attention needs the key and the value (K/V) of every token before it. The K/V of a token "
        "never change once they are computed, because a token sees only the tokens before it."
    )
    fed = (run.without_cache.fed, run.with_cache.fed)
    lines = [
        Text(f"{'K/V of':<{LABEL + cell - 1}}{'without the cache':<{cell * shown_steps + gap}}with it"),
        row("  at step", lambda step, _: (str(step + 1), "")),
        row("  tokens fed", lambda step, cached: (str(fed[cached][step]), "")),
    ]
    shown_prompt = prompt_tokens if prompt_tokens <= PROMPT_ROWS else PROMPT_ROWS - 1
    lines += [token_row(quoted(tokens[token]), token) for token in range(shown_prompt)]
    if shown_prompt < prompt_tokens:
        lines.append(token_row(f"… {prompt_tokens - shown_prompt:,} more", shown_prompt))
    lines += [
        token_row(quoted(tokens[token]), token) for token in range(prompt_tokens, prompt_tokens + shown_steps - 1)
    ]
    if more := steps - shown_steps:
        lines.append(Text(f"… and {counted(more, 'more step')}, with another token each"))
    yield Text("\n").join(lines)
    legend = ((new, "computed"), (repeated, "recomputed"), (reused, "read from the cache"))
    yield Text("   ").join(Text.assemble(symbol, f" {meaning}") for symbol, meaning in legend)


def quoted(text: str) -> str:
    """A token as one short word, with visible spaces and newlines."""
    text = on_stdout(json.dumps(text, ensure_ascii=False))
    return text if len(text) < LABEL else f'{text[: LABEL - 3]}…"'


def counts(run: "Explanation") -> Iterator[str]:
    p, n = len(run.prompt_token_ids), len(run.token_ids)
    if run.num_recomputed_steps:
        yield from recomputed_counts(run)
        return
    whole, cached = f"{n}·{p} + {n}·{n - 1}/2", f"{p} + {n - 1}"
    pad, digits = len(whole), len(f"{run.without_cache.tokens:,}")
    yield f"P = {p:,} prompt tokens and N = {n:,} new ones take N passes. Tokens processed in all passes:"
    yield (
        f"  without   P + (P+1) + … + (P+N-1) = N·P + N(N-1)/2 = {whole} = {run.without_cache.tokens:,}\n"
        f"  with      P + 1 + … + 1           = P + N-1        = {cached:<{pad}} = {run.with_cache.tokens:>{digits},}"
    )
    yield (
        f"With the cache that is {run.theoretical_speed_up:.1f} times fewer. After a prompt of one token (P = 1) it "
        f"would be N(N+1)/2 = {n * (n + 1) // 2:,} against N = {n:,}: (N+1)/2 = {(n + 1) / 2:.1f} times fewer."
    )


def recomputed_counts(run: "Explanation") -> Iterator[str]:
    """Of a text that is longer than the context."""
    p, r, c = len(run.prompt_token_ids), run.num_recomputed_steps, run.context
    f = len(run.token_ids) - r  # passes that fit
    yield (
        f"P = {p:,} prompt tokens and {len(run.token_ids):,} new ones take F + R passes. In the first F = {f:,} the "
        f"text fits the model's context of C = {c:,} tokens. In the last R = {r:,} it does not: every token moves to "
        "another position, cached keys are no longer valid, and the last C tokens are computed, with the cache too. "
        "Tokens processed in all passes:"
    )
    whole, cached = f"{f}·{p} + {f}·{f - 1}/2 + {r}·{c}", f"{p} + {f - 1} + {r}·{c}"
    yield (
        f"  without   F·P + F(F-1)/2 + R·C = {whole} = {run.without_cache.tokens:,}\n"
        f"  with      P + F-1 + R·C        = {cached:<{len(whole)}} = {run.with_cache.tokens:,}"
    )
    yield f"With the cache that is {run.theoretical_speed_up:.1f} times fewer."


def times(run: "Explanation") -> Iterator[str]:
    whole, cached = run.without_cache, run.with_cache
    same = f"the same {len(run.token_ids)}" if run.same_tokens else "DIFFERENT (see `infer verify`)"
    yield f"The two runs generated {same} tokens. All steps together took"
    yield "\n".join(
        f"  {name:<9} {run.total_ms:>9,.1f} ms for {run.tokens:>6,} tokens = {run.ms_per_token:.3g} ms per token"
        for name, run in (("without", whole), ("with", cached))
    )
    yield (
        f"  speed-up by count      {run.theoretical_speed_up:>6.1f}x\n"
        f"  speed-up as measured   {run.speed_up:>6.1f}x = {run.theoretical_speed_up:.1f} x "
        f"{whole.ms_per_token:.3g} / {cached.ms_per_token:.3g}"
    )


def chart(run: "Explanation", width: int) -> "Text":
    """The time of some steps, evenly spread, as bars on one scale."""
    from rich.text import Text

    steps = len(run.token_ids)
    longest = max(run.without_cache.times_ms + run.with_cache.times_ms)
    half = (width - 4) // 2
    bar = half - 13
    lines = [Text(f"{'step':<6}{'ms without the cache':<{half}}ms with it")]
    for step in spread(steps, CHART_ROWS):
        line = Text(f"{step + 1:>4}")
        for passes, style in ((run.without_cache, REPEATED_STYLE), (run.with_cache, REUSED_STYLE)):
            length = max(1, round(passes.times_ms[step] / longest * bar))
            line.append(f"{passes.times_ms[step]:>9,.1f}  ")
            line.append(f"{'■' * length:<{half - 11}}", style)
        line.rstrip()
        lines.append(line)
    return Text("\n").join(lines)


def reason(run: "Explanation") -> Iterator[str]:
    """Why the counted and the measured speed-up differ."""
    cost, whole, cached, n = run.cost, run.without_cache, run.with_cache, len(run.token_ids)
    medians = (
        f"a pass over {cost.pass_tokens:g} tokens took {cost.pass_ms:.2f} ms, one over a single token "
        f"{cost.step_ms:.2f} ms (medians)"
    )
    if run.speed_up >= run.theoretical_speed_up:
        yield (
            f"The count assumes equal cost per token. Here {medians}: a token cost more in a long pass than in a pass "
            "over one token, so the cache gained more than the count predicts."
        )
        return
    if not cost.is_plausible:
        yield (
            f"The count assumes equal cost per token. Here {medians}: the cost per token cannot be separated from the "
            "fixed cost per pass. More tokens, or a larger model, will show it."
        )
        return
    # Rounded as shown, so that the figures shown add up.
    each, fixed = f"{cost.per_token_ms:.2f}", f"{round(cost.step_ms, 2) - round(cost.per_token_ms, 2):.2f}"
    yield f"The count assumes equal cost per token, but a pass also has a fixed cost: {medians}. So"
    yield (
        f"  per token   ({cost.pass_ms:.2f} - {cost.step_ms:.2f}) / ({cost.pass_tokens:g} - 1) = {each} ms\n"
        f"  per pass    {cost.step_ms:.2f} - {each} = {fixed} ms"
    )
    yield "\n".join(
        f"  {name:<9} {n} passes x {fixed} + {passes.tokens:>{len(str(whole.tokens)) + 1},} tokens x {each} = "
        f"{cost.of(passes):>{len(f'{cost.of(whole):,.0f}')},.0f} ms (measured: {passes.total_ms:,.0f})"
        for name, passes in (("without", whole), ("with", cached))
    )
    off = max(abs(cost.of(passes) / passes.total_ms - 1) for passes in (whole, cached))
    if off > 0.2:
        yield f"(The estimate is {off:.0%} off: some steps took much longer than their neighbors.)"
    growth = sum(whole.times_ms[-(n // 2) :]) / sum(whole.times_ms[: n // 2])
    grows = (  # unless noise hides it
        " The longer the text, the more it gains: without the cache, the second half of the steps took "
        f"{growth:.1f} times as long as the first."
    )
    yield (
        "Whether it processes one token or many, a pass reads the weights "
        f"({run.weight_bytes / 1e6:,.0f} MB; in {fixed} ms that is {run.weight_bytes / cost.fixed_ms / 1e6:,.1f} GB/s) "
        f"and launches every operation once. The cache saves tokens, not passes: there are {n} either way."
        f"{grows if growth > 1 else ''}"
    )


def memory(run: "Explanation", config: "ModelConfig") -> Iterator[str]:
    from infer.evaluate.explain import cache_layout

    heads, size = (config.num_key_value_heads, config.computed_head_dim), run.element_size
    yield "The cost is memory: 2 (K and V) x layers x KV heads x head_dim x positions x bytes per number."
    for title, positions in (("this run", run.positions), ("the full context", config.max_position_embeddings)):
        layout = cache_layout(config, positions, size)
        lines = [f"  {title}, {positions:,} positions: {megabytes(sum(kind.bytes for kind in layout))}"]
        for kind in layout:
            name = f"{'window' if kind.window else 'full'} layers: " if config.has_windows else ""
            factors = " x ".join(f"{factor:,}" for factor in (2, kind.layers, *heads, kind.slots, size))
            lines.append(f"    {name}{factors} = {kind.bytes:,} bytes")
        if positions == run.positions:
            filled = (
                "all filled" if run.num_recomputed_steps else f"{positions - 1:,} filled: the last token needs no K/V"
            )
            lines.append(f"    allocated: {run.cache_bytes:,} bytes ({filled})")
        yield "\n".join(lines)
    if config.has_windows:
        everything = config.max_position_embeddings * config.cache_bytes_per_token(size)
        yield (
            f"A window layer sees the last {config.sliding_window:,} positions, so it keeps a ring buffer of the "
            "window and one prefill chunk, however long the text. If every layer kept all positions, the full "
            f"context would take {megabytes(everything)}."
        )


def shared_memory(run: "Explanation", config: "ModelConfig", conversations: int = 64) -> Iterator[str]:
    """The memory of many conversations that share pages."""
    from infer.cache.pool import PAGE_SIZE, bytes_for

    size = run.element_size
    yield (
        f"Many conversations share one memory, in pages of {PAGE_SIZE} positions that are allocated as each grows: "
        f"this run would take {megabytes(bytes_for(config, run.positions, size))}. A common prefix is stored once."
    )
    if prefix := config.max_position_embeddings // 2 // PAGE_SIZE * PAGE_SIZE:
        once, each = bytes_for(config, prefix, size), bytes_for(config, prefix + PAGE_SIZE, size)
        yield (
            f"So {conversations} conversations with a common prefix of {prefix:,} tokens and {PAGE_SIZE} different "
            f"tokens each take {megabytes(once + conversations * (each - once))} instead of "
            f"{megabytes(conversations * each)}."
        )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


FURTHER = """\
  infer trace         where attention looked, and how certain the model was
  infer verify        proof that no kind of cache changes the output
  infer bench         the speed of this machine, with more trials
  docs/kv-cache.md    how the cache works, from the naive loop to pages"""
