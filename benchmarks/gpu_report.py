"""Measurements of `compare_gpu.py`: written to a file row by row, printed as tables, and plotted."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from infer.evaluate.bench import check_plot, machine_line

Row = dict[str, Any]


class Column(NamedTuple):
    heading: str
    key: str
    width: int
    form: str = ""  # number format; texts are left-aligned
    scale: float = 1

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None:
            text = ""
        elif self.form:
            text = f"{value * self.scale:{self.form}}"
        else:
            text = str(value)[: self.width - 1]
        return self._placed(text)

    def title(self) -> str:
        return self._placed(self.heading)

    def _placed(self, text: str) -> str:
        return f"{text:>{self.width}}" if self.form else f"{text:<{self.width}}"


class Table(NamedTuple):
    title: str
    columns: Sequence[Column]
    note: str = ""

    def header(self) -> str:
        return f"{self.title}\n{''.join(column.title() for column in self.columns).rstrip()}"

    def line(self, row: Row) -> str:
        if "error" in row:
            return f"FAILED: {row['error']}"
        goal = f"   {row['goal']}" if row.get("goal") else ""
        return "".join(column.cell(row) for column in self.columns).rstrip() + goal


SHAPE = Column("shape", "shape", 13)
SPEED = (
    Column("tok/s", "tokens_per_s", 10, ",.1f"),
    Column("ms/step", "step_s", 9, ".3f", 1e3),
    Column("mean", "mean_step_s", 9, ".3f", 1e3),
)
LIMIT = (
    Column("limit", "limit_tokens_per_s", 10, ",.0f"),
    Column("of limit", "share_of_limit", 10, ".1%"),
    Column("by mv", "share_by_torch_mv", 8, ".1%"),
)

TABLES = {
    "ceilings": Table(
        "Ceilings: the limits of the device",
        (Column("", "ceiling", 16), Column("way", "way", 36), Column("G/s", "rate", 12, ",.1f", 1e-9)),
        "GB/s read (copy: read and written); GFLOP/s for GEMMs. The best of each is the limit below.",
    ),
    "decode": Table(
        "Decode, batch 1",
        (
            SHAPE,
            Column("engine", "engine", 32),
            *SPEED,
            *LIMIT,
            Column("to dynamic", "ratio_to_dynamic", 12, ".2f"),
            Column("to static", "ratio_to_static", 11, ".2f"),
            Column("to gpt-fast*", "ratio_to_gpt_fast", 13, ".2f"),
            Column("warm-up s", "warm_up_s", 11, ".1f"),
            Column("other from", "first_difference", 12, "d"),
        ),
        "tok/s is of the median step, the prompt apart. Limit: weights and mean cache once per step at the best "
        "matrix-vector\nrate; by mv: at torch's own. * a figure on record for this shape on an H200 (809 tok/s): not "
        "run here. other from: the\nfirst new token that differs from infer's; in 16 bits two engines may round to "
        "different tokens.",
    ),
    "batch": Table(
        "Batches of different lengths: all rows together",
        (
            SHAPE,
            Column("rows", "rows", 6, "d"),
            *SPEED,
            Column("to one row", "ratio_to_one_row", 12, ".2f"),
            *LIMIT,
        ),
        "mean: of the call minus the rows' prefills. Limit: one read of the weights and of every row's cache.",
    ),
    "context": Table(
        "Decode with a long context, batch 1", (SHAPE, Column("filled", "context", 9, ",d"), *SPEED, *LIMIT)
    ),
    "prefill": Table(
        "Prefill",
        (
            SHAPE,
            Column("tokens", "tokens", 8, ",d"),
            Column("pass ms", "pass_s", 10, ".2f", 1e3),
            Column("TFLOP/s", "flops_per_s", 10, ",.1f", 1e-12),
            Column("of rate", "share_of_rate", 9, ".1%"),
            Column("first token ms", "first_token_s", 16, ".2f", 1e3),
            Column("of rate", "first_token_share_of_rate", 9, ".1%"),
        ),
        "pass: all tokens through the model, into a cache. first token: from the request to the token, the cache's "
        "memory and\nsampling included. rate: of the best matrix product above.",
    ),
    "sampling": Table(
        "Sampling on the device against greedy, batch 1",
        (SHAPE, Column("settings", "settings", 12), *SPEED, Column("to greedy", "ratio_to_greedy", 11, ".3f")),
    ),
    "start": Table(
        "From the start of the process, and what another request costs",
        (
            SHAPE,
            Column("case", "case", 28),
            Column("ready s", "ready_s", 9, ".2f"),
            Column("1st token", "first_s", 11, ".2f"),
            Column("2nd", "second_s", 9, ".3f"),
            Column("8th", "eighth_s", 9, ".3f"),
            Column("weights s", "weights_s", 11, ".2f"),
            Column("compiled", "compiled", 10, "d"),
        ),
        "cold, warm: seconds from the start, less those of the weights; ready: torch and the device are. Below them, "
        "from the\nrequest. compiled: entries that came into Triton's cache folder.",
    ),
    "parts": Table(
        "Where a decode step's time goes",
        (
            SHAPE,
            Column("part", "part", 14),
            Column("kernel", "kernel", 44),
            Column("calls", "calls", 8, ".1f"),
            Column("us/call", "us", 9, ".2f"),
            Column("MB/call", "bytes", 9, ",.2f", 1e-6),
            Column("GB/s", "bytes_per_s", 9, ",.0f", 1e-9),
            Column("of step", "share_of_step", 9, ".1%"),
        ),
        "Kernels that start before the previous one has ended overlap: shares may add up to more than 100 %.",
    ),
}


def goal_status(
    value: float, reach: float | None, try_for: float | None = None, *, form: str = ".0%", lower_is_better: bool = False
) -> str:
    """Whether a measurement meets its goal, as text."""
    if reach is None:
        return ""
    parts = []
    for word, goal in (("reach", reach), ("try for", try_for)):
        if goal is not None:
            met = value <= goal if lower_is_better else value >= goal
            parts.append(f"{word} {goal:{form}}: {'yes' if met else 'NO'}")
    return ", ".join(parts)


def command_line(script: str, argv: Sequence[str] | None, *files: str) -> list[str]:
    """The command to run this again, without the options that name output files."""
    outputs = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in files:
        outputs.add_argument(option)
    return ["python", f"benchmarks/{script}", *outputs.parse_known_args(argv)[1]]


class Report:
    """Rows by section. Each row is written to the file when it is added, so that an interrupt loses nothing."""

    def __init__(
        self, machine: dict[str, Any], command: Sequence[str], path: Path | None = None, benchmark: str = "gpu"
    ) -> None:
        self.values: dict[str, Any] = {"benchmark": benchmark, "machine": machine, "commands": [], "sections": {}}
        self.path = path
        self._fresh: set[tuple[str, Any]] = set()
        if path is not None and path.exists():
            before = read(path, benchmark)
            if before["machine"]["name"] != machine["name"]:
                raise ValueError(f"{path} holds figures of {before['machine']['name']}, not of {machine['name']}")
            self.values |= {"commands": before["commands"], "sections": before["sections"]}
        self.values["commands"].append(shlex.join(command))

    def add(self, section: str, row: Row) -> None:
        """The first row of a shape in a section replaces the rows of earlier runs."""
        rows = self.values["sections"].setdefault(section, [])
        group = (section, row.get("shape"))
        if group not in self._fresh:
            self._fresh.add(group)
            rows[:] = [other for other in rows if other.get("shape") != row.get("shape") and "error" not in other]
        rows.append(row)
        self.values["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        if self.path is not None:
            unfinished = self.path.with_name(self.path.name + ".part")
            unfinished.write_text(json.dumps(self.values, indent=1) + "\n")
            unfinished.replace(self.path)


def read(path: Path, benchmark: str = "gpu") -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        if values["benchmark"] == benchmark:
            return values
    except (json.JSONDecodeError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a report of this benchmark")


def heading(machine: dict[str, Any], commands: Iterable[str]) -> str:
    versions = "".join(f", {name} {machine[name]}" for name in ("cuda", "triton", "transformers") if machine.get(name))
    lines = [f"{machine_line(machine)}{versions}, {machine['dtype']}, random weights", *(f"$ {c}" for c in commands)]
    return "\n".join(lines)


def formatted(values: dict[str, Any]) -> str:
    """The report as text."""
    parts = [heading(values["machine"], values["commands"])]
    for name, table in TABLES.items():
        if rows := values["sections"].get(name):
            parts.append("\n".join([table.header(), *map(table.line, rows), *([table.note] if table.note else [])]))
    return "\n\n".join(parts)


def plot(values: dict[str, Any], path: Path) -> None:
    """tok/s and the share of the limit, against context and against the number of rows."""
    axes_of = {"context": ("context", "positions filled"), "batch": ("rows", "rows")}
    drawn = {name: _good(values["sections"].get(name, ())) for name in axes_of}
    drawn = {name: rows for name, rows in drawn.items() if rows}
    if not drawn:
        raise ValueError("there is nothing to draw: the report has neither the section context nor batch")
    check_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(drawn), 6.4), dpi=150, layout="constrained")
    grid = figure.subplots(2, len(drawn), squeeze=False, sharex="col")
    for (name, rows), (speed, share) in zip(drawn.items(), grid.T, strict=True):
        key, label = axes_of[name]
        x = [row[key] for row in rows]
        speed.plot(x, [row["limit_tokens_per_s"] for row in rows], "--", color="#999999", label="limit")
        speed.plot(x, [row["tokens_per_s"] for row in rows], "o-", color="#0072b2", label="infer")
        speed.set_ylabel("tok/s, all rows" if name == "batch" else "tok/s")
        speed.set_ylim(bottom=0)
        speed.legend(frameon=False)
        share.plot(x, [100 * row["share_of_limit"] for row in rows], "o-", color="#0072b2")
        share.set_ylabel("% of the limit")
        share.set_ylim(0, max(100, *(100 * row["share_of_limit"] for row in rows)))
        share.set_xscale("log", base=2)
        share.set_xticks(x, [f"{value:,}" for value in x])
        share.set_xlabel(label)
        for axes in (speed, share):
            axes.grid(True, alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{next(iter(drawn.values()))[0]['shape']}, decode: {machine_line(values['machine'])}", fontsize=10)
    figure.savefig(path, format="png")


def _good(rows: Iterable[Row]) -> list[Row]:
    """The rows of the first shape, without errors."""
    good = [row for row in rows if "error" not in row]
    return [row for row in good if row["shape"] == good[0]["shape"]]
