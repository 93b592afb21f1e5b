"""Tables and plots of `bench_serving.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_report import Column, Row, Table

from infer.evaluate.bench import machine_line

GOALS = Table(
    "What is reached",
    (Column("shape", "shape", 14), Column("", "what", 92), Column("figure", "shown", 14)),
)
LOADED = (  # columns of any table of loads
    Column("shape", "shape", 14),
    Column("req/s", "rate", 8, ".2f"),
    Column("of most", "share", 9, ".0%"),
    Column("requests", "requests", 10, "d"),
    Column("tok/s", "tokens_per_s", 10, ",.0f"),
)
LOAD = Table(
    "Poisson arrivals",
    (
        *LOADED,
        Column("first ms", "first_token_s", 11, ",.1f", 1e3),
        Column("p99", "first_token_p99_s", 10, ",.1f", 1e3),
        Column("between ms", "between_s", 12, ",.2f", 1e3),
        Column("p99", "between_p99_s", 10, ",.2f", 1e3),
        Column("rows", "rows", 7, ".1f"),
    ),
    "of most: relative to the requests per second when all arrive at once. first: from a request's arrival "
    "to its\nfirst token; between: two tokens of a request; medians. rows: in a pass, on average.",
)


def goal_row(shape: str, what: str, figure: float, form: str, unit: str = "", goal: str = "", **more: Any) -> Row:
    """A row of the table of goals. more: other values for the JSON report."""
    return {"shape": shape, "what": what, "figure": figure, "shown": f"{figure:{form}}{unit}", "goal": goal, **more}


def table_of(section: str, load: Table = LOAD) -> Table:
    return load if section == "load" else GOALS


def formatted(values: dict[str, Any], load: Table = LOAD) -> str:
    """Both tables of a report as text."""
    parts = []
    for table in (GOALS, load):
        rows = [row for name, some in values["sections"].items() if table_of(name, load) is table for row in some]
        if rows:
            parts.append("\n".join([table.header(), *map(table.line, rows), *filter(None, [table.note])]))
    return "\n\n".join(parts)


def plot(values: dict[str, Any], path: Path) -> None:
    """Throughput and latencies against requests per second, a column for each shape."""
    from matplotlib.figure import Figure

    rows = values["sections"]["load"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure = Figure(figsize=(4.8 * len(shapes), 7.6), dpi=150, layout="constrained")
    grid = figure.subplots(3, len(shapes), squeeze=False, sharex="col")
    for shape, (speed, first, between) in zip(shapes, grid.T, strict=True):
        own = [row for row in rows if row["shape"] == shape]
        rates = [row["rate"] for row in own]
        speed.plot(rates, [row["tokens_per_s"] for row in own], "o-", color="#0072b2")
        speed.set_title(shape, fontsize=10)
        speed.set_ylabel("output tok/s")
        speed.set_ylim(bottom=0)
        for axes, key, label in (
            (first, "first_token", "ms to the first token"),
            (between, "between", "ms between tokens"),
        ):
            axes.plot(rates, [row[f"{key}_p99_s"] * 1e3 for row in own], "s--", color="#d55e00", label="p99")
            axes.plot(rates, [row[f"{key}_s"] * 1e3 for row in own], "o-", color="#0072b2", label="median")
            axes.set_yscale("log")
            axes.set_ylabel(label)
            axes.legend(frameon=False)
        between.set_xlabel("requests per second")
        for axes in (speed, first, between):
            axes.grid(True, alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Poisson arrivals: {machine_line(values['machine'])}", fontsize=10)
    figure.savefig(path, format="png")
