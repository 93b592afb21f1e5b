"""A trace as lines for the terminal: on traces made up for it."""

from __future__ import annotations

import io
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from infer.trace import Trace, TraceStep
from infer.trace.data import Alternative, AttentionRows, Token, attention, looked_at
from infer.trace.terminal import HEAT, STRIP_ROWS, draw, heat, percent, strip, table, visible

HOSTILE = [
    "[bold]",
    "[/red]",
    "[link=x]y[/link]",
    ":smile:",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x9b2J",
    "\r",
    "\b\b",
    "\x00",
    "\u202e",
    "\u200b",
    "\u2028",
]
UNUSUAL = [
    "日本",
    " 東京",
    "👨\u200d👩\u200d👧",
    "❤\ufe0f",
    "🇫",
    "e\u0301",
    "\u0301",
    "\ufe0f",
    "\u200d",
    "",
    " ",
    "\n",
    "\n\n",
    "\t",
    "\u3000",
    "\ufffd",
    "x" * 300,
    "本" * 150,
]

ROWS = {
    0: AttentionRows(0, np.array([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]], dtype=np.float16)),
    3: AttentionRows(1, np.array([[0.5, 0.5], [1.0, 0.0]], dtype=np.float16)),  # a window of 2
}


def made_step(
    token_id: int,
    text: str,
    attention: dict[int, AttentionRows],
    alternatives: Sequence[tuple[str, float]] = (),
    **changes: Any,
) -> TraceStep:
    others = [Alternative(1000 + i, *entry) for i, entry in enumerate(alternatives)]
    values: dict[str, Any] = {
        "token_id": token_id,
        "text": text,
        "probability": 0.5,
        "entropy": 1.25,
        "rank": 1,
        "alternatives": (Alternative(token_id, text, 0.5), *others),
        "attention": attention,
        "cache_positions": 7,
        "cache_bytes": 100,
        "time_s": 0.1,
    }
    return TraceStep(**values | changes)


def made_trace(
    prompt: Sequence[str],
    answer: Sequence[str],
    layers: Sequence[int] = (0, 3),
    heads: Sequence[int] = (1, 2),
    **changes: Any,
) -> Trace:
    """Every weight above 0, each row another."""
    generator = np.random.default_rng(0)
    trace = Trace(layers, heads)
    trace.layers, trace.heads = list(layers), list(heads)
    trace.prompt = [Token(i, text) for i, text in enumerate(prompt)]
    for number, text in enumerate(answer):
        rows = {}
        for layer in layers:
            weights = generator.uniform(0.1, 1.0, (len(heads), len(prompt) + number))
            rows[layer] = AttentionRows(0, (weights / weights.sum(-1, keepdims=True)).astype(np.float16))
        trace.steps.append(made_step(500 + number, text, rows, [(" a", 0.25), (" b", 0.003)], **changes))
    return trace


def plain(lines: Any) -> list[str]:
    return [line.plain for line in lines]


class TestVisible:
    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("plain", "plain"),
            (" word", "·word"),
            ("  ", "··"),
            ("\n", "↵"),
            ("\t", "→"),
            ("a\u3000b", "a·b"),
            ("日本", "日本"),
            ("", "<7>"),
            ("\x1b[31m", "\\x1b[31m"),
            ("\x9b", "\\x9b"),
            ("\r", "\\x0d"),
            ("\u202eabc", "\\u202eabc"),
            ("\U000e0041", "\\ue0041"),
            ("\u0301", "◌\u0301"),
            ("\u1160", "◌\u1160"),
            ("\U0001f3fb", "\\u1f3fb"),
            ("[bold]", "[bold]"),
        ],
    )
    def test_marks(self, text: str, shown: str) -> None:
        assert visible(text, 7) == shown

    @given(st.text())
    def test_any_text_is_one_harmless_line(self, text: str) -> None:
        shown = visible(text, 7)
        assert cell_len(shown) >= 1
        assert not any(c.isspace() or unicodedata.category(c)[0] == "C" for c in shown)


class TestHeat:
    def test_in_proportion(self) -> None:
        assert heat(np.array([0, 0.8, 0.4, 0.1, 0.05, 0.001, 0], dtype=np.float32)) == [0, 8, 4, 1, 1, 1, 0]

    def test_the_first_does_not_set_the_scale(self) -> None:
        assert heat(np.array([0.9, 0.04, 0.02], dtype=np.float32)) == [8, 8, 4]

    @pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [0.0], []])
    def test_nothing_to_compare_with(self, weights: list[float]) -> None:
        assert heat(np.array(weights, dtype=np.float32)) == [8 * math.ceil(weight) for weight in weights]


class TestAttention:
    @pytest.fixture
    def trace(self) -> Trace:
        trace = made_trace(["a", "b", "c"], [])
        trace.steps = [made_step(9, "d", ROWS)]
        return trace

    @pytest.mark.parametrize(
        ("layer", "head", "expected"),
        [
            (None, None, [0.1875, 0.5, 0.3125]),
            (0, None, [0.375, 0.25, 0.375]),
            (3, None, [0, 0.75, 0.25]),
            (None, 1, [0.25, 0.375, 0.375]),
            (3, 2, [0, 1, 0]),
        ],
    )
    def test_of_layers_and_heads(
        self, trace: Trace, layer: int | None, head: int | None, expected: list[float]
    ) -> None:
        assert attention(trace, 0, layer=layer, head=head).tolist() == expected

    def test_the_mean_has_more_digits_than_the_rows(self) -> None:
        trace = made_trace(["a", "b"], [])
        rows = AttentionRows(0, np.array([[1.0, 0.0], [2.0**-11, 1.0]], dtype=np.float16))
        trace.steps = [made_step(9, "c", {0: rows, 3: rows})]
        assert attention(trace, 0).tolist() == [0.5 + 2.0**-12, 0.5]

    def test_looked_at(self, trace: Trace) -> None:
        weights = np.array([0.5, 0.2, 0.3], dtype=np.float32)
        assert [(look.position, look.token_id, look.text) for look in looked_at(trace, weights)] == [
            (2, 2, "c"),
            (1, 1, "b"),
        ]
        assert [look.weight for look in looked_at(trace, weights, 1)] == [pytest.approx(0.3)]

    def test_looked_nowhere_else(self, trace: Trace) -> None:
        assert looked_at(trace, np.array([1, 0, 0], dtype=np.float32)) == []


class TestTable:
    def test_a_line_for_each_step(self) -> None:
        trace = made_trace(["The", " cat"], [" sat", "\n", "[/red]"])
        title, *lines = plain(table(trace, 100))
        assert title.split() == [
            "step",
            "token",
            "prob",
            "entropy",
            "(nats)",
            "instead",
            "looked",
            "at",
            "first",
            "cache",
        ]
        assert [line.split()[:5] for line in lines] == [
            ["1", "·sat", "50.0%", "█▎", "1.2"],
            ["2", "↵", "50.0%", "█▎", "1.2"],
            ["3", "[/red]", "50.0%", "█▎", "1.2"],
        ]
        for number, line in enumerate(lines):
            weights = attention(trace, number)
            look = looked_at(trace, weights, 1)[0]
            words = line.split()
            assert words[5:12] == ["≈3", "·a", "25%", "·b", "<1%", visible(look.text), percent(look.weight)]
            assert words[-2:] == [percent(weights[0]), "7"]

    def test_the_token_itself_is_no_alternative(self) -> None:
        trace = made_trace(["The"], [" sat"])
        assert plain(table(trace, 100))[1].count("·sat") == 1

    @pytest.mark.parametrize(
        ("entropy", "shown"),
        [
            (0.0, "0.0 ≈1 "),
            (0.5, "▌       0.5 ≈2 "),
            (5.0, "█████   5.0 ≈148 "),
            (11.9, "██████ 11.9 ≈147k "),
            (math.nan, "  nan ≈1 "),
        ],
    )
    def test_entropy(self, entropy: float, shown: str) -> None:
        assert shown in plain(table(made_trace(["a"], ["b"], entropy=entropy), 100))[1]

    @pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 100, 122, 160, 250])
    @pytest.mark.parametrize("steps", [1, 40])
    def test_fits(self, width: int, steps: int) -> None:
        trace = made_trace(["a", "b"], [f" {'word' * (i % 5)}" for i in range(steps)], entropy=11.9)
        lines = plain(draw(trace, width))
        assert max(map(cell_len, lines)) <= width
        assert lines[steps].split()[0] == str(steps)
        if width >= 60:
            assert lines[steps].split()[-1] == "7"
            assert "·a 25%" in lines[steps]

    @pytest.mark.parametrize("width", [60, 100, 160])
    def test_columns_line_up(self, width: int) -> None:
        """The last one ends in the same place, whatever stands in front of it."""
        texts = [*UNUSUAL, *HOSTILE]
        lines = plain(table(made_trace(texts, texts), width))
        assert {cell_len(line) for line in lines} == {cell_len(lines[0])}

    @pytest.mark.parametrize("answer", [3, 500])
    def test_map(self, answer: int) -> None:
        """A mark for each position that was there, as long as there is room; else for some together."""
        trace = made_trace(["a", "b"], ["c"] * answer)
        title, *lines = plain(table(trace, 160))
        start = title.index("first to last")
        maps = [line[start:].split()[0] for line in lines]
        assert all(set(marks) <= set(HEAT[1:]) for marks in maps)
        if answer == 3:
            assert maps == ["".join(HEAT[level] for level in heat(attention(trace, i))) for i in range(3)]
        else:
            assert [len(maps[0]), len(maps[-1])] == [1, title.index("cache") - 2 - start]

    def test_without_layers(self) -> None:
        title, line, *rest = plain(draw(made_trace(["a", "b"], ["c"], layers=()), 100))
        assert "looked" not in title
        assert "·a 25%" in line
        assert not any("ttention" in line for line in rest)

    def test_nothing(self) -> None:
        assert list(draw(made_trace(["a"], []))) == []


class TestStrip:
    def test_marks_under_tokens(self) -> None:
        trace = made_trace(["The", " cat"], [" sat", "\n"])
        title, tokens, marks = plain(strip(trace, 1, 100))
        first, second, third = (HEAT[level] for level in heat(attention(trace, 1)))
        assert title.startswith("Attention when step 2 chose ↵ (█ = ")
        assert tokens == "The ·cat │ ·sat ↵"
        assert marks == f"{first * 3} {second * 4} │ {third * 4} ^"

    def test_of_an_earlier_step(self) -> None:
        """What came later is not there yet."""
        trace = made_trace(["The", " cat"], [" sat", "\n", "x"])
        assert plain(strip(trace, 0, 100))[1] == "The ·cat │ ·sat"

    def test_outside_a_window(self) -> None:
        trace = made_trace(["ab", "cd", "ef"], [])
        trace.steps = [made_step(9, "g", ROWS)]
        assert plain(strip(trace, 0, 100, layer=3, head=2))[2] == "   ██    │ ^"

    def test_title_tells_the_scale(self) -> None:
        trace = made_trace(["ab", "cd", "ef"], [])
        trace.steps = [made_step(9, "g", ROWS)]
        assert plain(strip(trace, 0, 100))[0] == "Attention when step 1 chose g (█ = 50%, the first token got 19%)"

    @pytest.mark.parametrize("width", [20, 33, 100])
    def test_lines_up(self, width: int) -> None:
        texts = [*UNUSUAL, *HOSTILE]
        self.check_lines_up(made_trace(texts, texts), width)

    @given(st.lists(st.text(max_size=12), min_size=1, max_size=12), st.integers(12, 60))
    @settings(max_examples=60, deadline=None)
    def test_any_texts_line_up(self, texts: list[str], width: int) -> None:
        self.check_lines_up(made_trace(texts, texts[::-1]), width)

    def check_lines_up(self, trace: Trace, width: int) -> None:
        last = len(trace.steps) - 1
        lines = plain(strip(trace, last, width, rows=10_000))
        start = 1 + next(i for i, line in enumerate(lines) if re.search(r"\d%\)$", line))  # behind the title
        shown = 0
        for tokens, marks in zip(lines[start::2], lines[start + 1 :: 2], strict=True):
            assert cell_len(tokens) <= width
            assert [cell_len(token) for token in tokens.split(" ")] == [len(mark) for mark in marks.split(" ")]
            assert all(len(set(mark)) == 1 for mark in marks.split(" "))
            shown += len(marks.split(" "))
        assert shown == len(trace.prompt) + len(trace.steps) + 1  # the bar
        assert lines[-1].endswith("^")

    def test_long_runs(self) -> None:
        """The end of the text, and what the rest of it got."""
        trace = made_trace(["p"] * 20, [f" {i:03}" for i in range(1000)])
        title, *lines = plain(strip(trace, 999, 110))
        assert len(lines) == 2 * STRIP_ROWS
        assert lines[-2].endswith(" ·998 ·999")
        hidden = 1020 - sum(len(line.split()) for line in lines[::2])
        share = percent(attention(trace, 999)[:hidden].sum())
        assert title.endswith(f"{hidden} earlier tokens, not shown, got {share})")
        assert len(plain(draw(trace, 100))) < 1000 + 2 * STRIP_ROWS + 10

    @pytest.mark.parametrize(("strips", "chosen"), [(None, [3]), ([0], [1]), ([0, 1, 2], [1, 2, 3])])
    def test_which(self, strips: list[int] | None, chosen: list[int]) -> None:
        lines = plain(draw(made_trace(["a", "b"], ["c", "d", "e"]), strips=strips))
        assert [int(line.split()[3]) for line in lines if line.startswith("Attention")] == chosen

    def test_of_one_token(self) -> None:
        trace = made_trace(["a"], ["b"])
        assert plain(strip(trace, 0, 100))[1:] == ["a │ b", "█ │ ^"]

    def test_numbers_that_are_none(self) -> None:
        trace = made_trace(["a", "b"], [])
        rows = AttentionRows(0, np.full((2, 2), np.nan, dtype=np.float16))
        trace.steps = [made_step(9, "d", {0: rows, 3: rows}, entropy=math.nan, probability=math.nan)]
        assert plain(strip(trace, 0, 100))[1:] == ["a b │ d", "    │ ^"]


class TestPrinted:
    """What reaches the terminal."""

    def printed(self, lines: Sequence[Text], **options: Any) -> str:
        console = Console(file=io.StringIO(), width=100, **options)
        for line in lines:
            console.print(line, soft_wrap=True)
        return console.file.getvalue()  # type: ignore[attr-defined]

    def test_markup_is_literal_and_nothing_is_obeyed(self) -> None:
        trace = made_trace(HOSTILE, HOSTILE)
        trace.steps = [made_step(9, "\x1b[2J", {0: step.attention[0], 3: step.attention[3]}, [(text, 0.3)])
                       for step, text in zip(trace.steps, HOSTILE, strict=True)]  # fmt: skip
        printed = self.printed(list(draw(trace, 100)))
        assert not set(printed) & set("\x1b\x9b\r\b\x00\u202e\u200b\u2028")
        for text in ("[bold]", "[/red]", "[link=x]y[/link]", ":smile:", "\\x1b[31mred"):
            assert text in printed

    def test_colour_only_where_there_is_some(self) -> None:
        """And it tells nothing that the characters do not."""
        lines = list(draw(made_trace(["The", " cat"], [" sat", "."]), 100))
        plain = self.printed(lines)
        coloured = self.printed(lines, force_terminal=True, color_system="256", legacy_windows=False)
        assert "\x1b" not in plain
        assert "\x1b" in coloured
        assert Text.from_ansi(coloured).plain.split() == plain.split()

    @pytest.mark.parametrize(
        ("layer", "head", "words"),
        [
            (None, None, "layers 0 and 3, heads 0 to 2, averaged,"),
            (3, None, "layer 3, heads 0 to 2, averaged,"),
            (None, 1, "layers 0 and 3, head 1, averaged,"),
            (3, 1, "layer 3, head 1, to all"),
        ],
    )
    def test_legend_names_what_is_shown(self, layer: int | None, head: int | None, words: str) -> None:
        trace = made_trace(["a", "b"], ["c"], heads=(0, 1, 2))
        assert words in " ".join(plain(draw(trace, 100, layer=layer, head=head)))


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "0%"), (0.001, "<1%"), (0.0049, "<1%"), (0.006, "1%"), (0.12, "12%"), (1, "100%")]
)
def test_percent(share: float, shown: str) -> None:
    assert percent(share) == shown
