"""A trace in the terminal: a line for each token, and a heat strip under the text. Readable without color."""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from infer.trace.data import Token, TraceData, TraceStep, Weights, attention, looked_at

HEAT = " ▁▂▃▄▅▆▇█"  # nothing, then eight levels
HEAT_STYLES = ("", "bright_black", "blue", "blue", "cyan", "cyan", "yellow", "yellow", "bold red")
EIGHTHS = " ▏▎▍▌▋▊▉█"
CERTAIN, UNCERTAIN = 1.0, 3.0  # nats: about 3 and 20 choices
DRAFTED = "+"  # before the number of a step
MARKS = {" ": "·", "\n": "↵", "\t": "→"}
STRIP_ROWS = 12
ENTRY = 9  # columns of a token in a list
SPACE = Text(" ")
NARROW, TINY = 99, 72  # widths below which columns shrink


def draw(
    trace: TraceData,
    width: int = 100,
    *,
    layer: int | None = None,
    head: int | None = None,
    strips: Sequence[int] | None = None,
) -> Iterator[Text]:
    """Table, legend and strips, line by line. layer, head: the one to show; None: the mean of all traced.

    strips: the steps to draw a strip for; None: the last.
    """
    if not trace.steps:
        return
    strips = [len(trace.steps) - 1] if strips is None else strips
    yield from table(trace, width, layer=layer, head=head)
    yield Text()
    for line in legend(trace, width, layer, head):
        yield from _wrapped(Text(line, "dim"), width)
    for number in strips if trace.layers else ():
        yield Text()
        yield from strip(trace, number, width, layer=layer, head=head)


def table(trace: TraceData, width: int, *, layer: int | None = None, head: int | None = None) -> Iterator[Text]:
    """A header, then a line for each step."""
    narrow = width < NARROW
    columns = _columns(trace, width)
    titles = {
        "entropy": "entropy" if width < TINY else "entropy (nats)",
        "looked": "looked at",
        "map": "first to last token",
    }
    yield _row(columns, {name: Text(titles.get(name, name), "bold") for name in columns})
    for number, step in enumerate(trace.steps):
        weights = attention(trace, number, layer=layer, head=head)
        others = [(a.text, a.token_id, a.probability) for a in step.alternatives if a.token_id != step.token_id]
        looks = [(look.text, look.token_id, look.weight) for look in looked_at(trace, weights)]
        cells = {
            "step": Text(f"{DRAFTED * step.drafted}{number + 1}"),
            "token": _shown(visible(step.text, step.token_id), uncertainty_style(step)),
            "prob": Text(percent(step.probability, digits=0 if narrow else 1)),
            "entropy": _entropy(step, columns.get("entropy", 0)),
            "instead": _entries(others, columns.get("instead", 0)),
            "looked": _entries(looks, columns.get("looked", 0)),
            "first": Text(percent(weights[0])),
            "map": _map(weights, len(trace.prompt) + len(trace.steps) - 1, columns.get("map", 0)),
            "cache": Text(f"{step.cache_positions}"),
        }
        yield _row(columns, cells)


def legend(trace: TraceData, width: int, layer: int | None = None, head: int | None = None) -> list[str]:
    """The meaning of the columns that are shown."""
    columns = _columns(trace, width)
    lines = [f"{DRAFTED}: drafted, and verified with the token before it"] * any(step.drafted for step in trace.steps)
    if "instead" in columns:
        lines.append("prob, instead: probabilities and most likely alternatives, before temperature and filters")
    if "entropy" in columns:
        choices = "" if width < TINY else "; ≈ the number of equally likely tokens with that entropy"
        lines.append(f"entropy: a block per nat{choices}")
    if "looked" in columns:
        layers = _named("layer", trace.layers if layer is None else [layer])
        heads = _named("head", trace.heads if head is None else [head])
        mean = ", averaged" if "s " in layers + heads else ""
        lines.append(f"looked at: attention of {layers}, {heads}{mean}, to all but the first token")
    if "first" in columns:
        lines.append("first: its share; attention sink: unused weight goes to the first token")
    if "cache" in columns and any(step.cache_positions == 0 for step in trace.steps[1:]):
        lines.append("cache 0: this step used no cache")
    return lines


def strip(
    trace: TraceData,
    number: int,
    width: int,
    *,
    layer: int | None = None,
    head: int | None = None,
    rows: int = STRIP_ROWS,
) -> Iterator[Text]:
    """The text up to the token that a step chose, with the attention to each token under it; the last rows."""
    weights = attention(trace, number, layer=layer, head=head)
    step = trace.steps[number]
    tokens, marks = zip(*_cells(trace, number, weights, width), strict=True)
    lines = _wrapped(SPACE.join(tokens), width)
    starts = [0, *itertools.accumulate(len(line.plain.split()) for line in lines)]  # the first token of each line
    start = starts[max(0, len(lines) - rows)]
    notes = [f"█ = {percent(_scale(weights))}", f"the first token got {percent(weights[0])}"]
    if hidden := start - (start > len(trace.prompt)):  # without the bar
        notes.append(f"{hidden} earlier tokens, not shown, got {percent(weights[:hidden].sum())}")
    title = f"Attention when step {number + 1} chose {visible(step.text, step.token_id)} ({', '.join(notes)})"
    yield from _wrapped(Text(title, "bold"), width)
    for line, (begin, end) in [*zip(lines, itertools.pairwise(starts), strict=True)][-rows:]:
        under = SPACE.join(marks[begin:end])
        under.rstrip()
        yield from (line, under)


def heat(weights: Weights) -> list[int]:
    """Levels 0 to 8, in proportion to the largest weight; 0 is no attention.

    The first token does not set the scale: as an attention sink, it would hide the differences of all others.
    """
    scale = _scale(weights)
    return [math.ceil(8 * min(1.0, weight / scale)) for weight in weights.tolist()]


def _scale(weights: Weights) -> float:
    return float(weights[1:].max(initial=0)) or 1.0


def visible(text: str, token_id: int | None = None) -> str:
    """A token on one line: spaces as marks, control characters escaped."""
    if not text:
        return f"<{token_id}>" if token_id is not None else "<>"
    shown = "".join(MARKS.get(character) or _printable(character) for character in text)
    stands_alone = cell_len(shown[0]) and unicodedata.category(shown[0])[0] != "M"
    return shown if stands_alone else f"◌{shown}"


def percent(share: float, digits: int = 0) -> str:
    least = 10.0 ** -(digits + 2)
    return f"<{least:.{digits}%}" if 0 < share < least / 2 else f"{share:.{digits}%}"


def uncertainty_style(step: TraceStep) -> str:
    if step.entropy < CERTAIN:
        return "green"
    return "yellow" if step.entropy < UNCERTAIN else "red"


def _printable(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Zs":
        return MARKS[" "]
    is_modifier = category == "Sk" and not cell_len(character)  # a skin tone, which modifies the character before it
    if category[0] == "C" or category in ("Zl", "Zp") or is_modifier:
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return character


def _columns(trace: TraceData, width: int) -> dict[str, int]:
    """Name and width of each, in order: columns that do not fit are dropped, the others share the rest."""
    narrow = width < NARROW
    positions = len(trace.prompt) + len(trace.steps) - 1
    columns = {
        "step": max(4, len(str(len(trace.steps))) + any(step.drafted for step in trace.steps)),
        "token": 10 if narrow else 12,
        "prob": 4 if narrow else 6,
        "entropy": 8 if width < TINY else 14 if narrow else 17,
        "instead": 10 if narrow else 18,
        "looked": 10 if narrow else 18,
        "first": 5,
        "map": 20,
        "cache": max(5, len(str(positions))),
    }
    if not trace.layers:
        columns = {name: size for name, size in columns.items() if name not in ("looked", "first", "map")}
    for name in ("map", "first", "cache", "looked", "instead", "entropy"):
        if _total(columns) > width or (narrow and name == "map"):
            columns.pop(name, None)
    lists = [name for name in ("instead", "looked") if name in columns]
    _widen(columns, lists, 30, width)
    _widen(columns, ["map"] if "map" in columns else [], positions, width)
    _widen(columns, lists, width, width)
    return columns


def _widen(columns: dict[str, int], names: Sequence[str], most: int, width: int) -> None:
    """Share the unused columns between these, up to `most` each."""
    for i, name in enumerate(names):
        spare = (width - _total(columns)) // (len(names) - i)
        columns[name] += max(0, min(spare, most - columns[name]))


def _total(columns: dict[str, int]) -> int:
    return sum(columns.values()) + _gap(columns) * (len(columns) - 1)


def _gap(columns: dict[str, int]) -> int:
    return 1 if columns["token"] == 10 else 2


def _row(columns: dict[str, int], cells: dict[str, Text]) -> Text:
    for name, size in columns.items():
        cells[name].truncate(size, overflow="ellipsis")
        cells[name].align("right" if name in ("step", "prob", "first", "cache") else "left", size)
    line = Text(" " * _gap(columns)).join(cells[name] for name in columns)
    line.rstrip()
    return line


def _entropy(step: TraceStep, size: int) -> Text:
    """A block per nat, the number, and the equivalent number of choices if it fits."""
    bar = 3 if size < 17 else 6
    nats = step.entropy if math.isfinite(step.entropy) else 0.0
    whole, part = divmod(round(8 * min(nats, bar)), 8)
    blocks = "█" * whole + EIGHTHS[part] * bool(part)
    cell = Text(f"{blocks:<{bar}}", uncertainty_style(step)) + Text(f" {step.entropy:4.1f}")
    if size >= 14:
        choices = math.exp(nats)
        cell.append(f" ≈{choices:.0f}" if choices < 1000 else f" ≈{choices / 1000:.0f}k")
    return cell


def _entries(entries: Sequence[tuple[str, int, float]], size: int) -> Text:
    """As many entries as fit, none of them cut."""
    line = Text()
    for text, token_id, share in entries:
        entry = f"{_cut(visible(text, token_id), ENTRY)} {percent(share)}"
        if line and line.cell_len + 2 + cell_len(entry) > size:
            break
        line.append("  " if line else "")
        line.append_text(_shown(entry))
    return line


def _map(weights: Weights, positions: int, size: int) -> Text:
    """The strip of a step in `size` columns, each the maximum over its positions."""
    line = Text()
    levels = heat(weights) if size else []
    size = min(size, positions)
    for i in range(size):
        part = levels[i * positions // size : (i + 1) * positions // size]
        level = max(part, default=0)
        line.append(HEAT[level], HEAT_STYLES[level])
    return line


def _cells(trace: TraceData, number: int, weights: Weights, width: int) -> Iterator[tuple[Text, Text]]:
    """The tokens of a strip, each with the mark under it, of equal width."""
    tokens: list[Token | TraceStep] = [*trace.prompt, *trace.steps[: number + 1]]
    for position, (token, level) in enumerate(zip(tokens, [*heat(weights), None], strict=True)):
        if position == len(trace.prompt):
            yield Text("│", "dim"), Text("│", "dim")
        style = uncertainty_style(token) if isinstance(token, TraceStep) else ""
        text = _cut(visible(token.text, token.token_id), width)
        if level is None:
            yield _shown(text, f"bold {style}"), Text("^" * cell_len(text), "bold")
        else:
            yield _shown(text, style), Text(HEAT[level] * cell_len(text), HEAT_STYLES[level])


def _shown(text: str, style: str = "") -> Text:
    """With dimmed marks."""
    line = Text(text, style)
    line.highlight_regex(f"[{''.join(MARKS.values())}]", "dim")
    return line


def _cut(text: str, size: int) -> str:
    return text if cell_len(text) <= size else f"{set_cell_size(text, size - 1).rstrip()}…"


def _wrapped(text: Text, width: int) -> list[Text]:
    lines = list(text.wrap(Console(), width))
    for line in lines:
        line.rstrip()
    return lines


def _named(what: str, numbers: Sequence[int]) -> str:
    """layers 0, 10, 19 and 29; heads 0 to 8"""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    *most, last = map(str, numbers)
    return f"{what}s {', '.join(most)} and {last}"
