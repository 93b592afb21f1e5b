"""The page of a trace as text: whole, without a way out, and with the numbers of the trace in it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import make_trace

from infer.trace import Trace
from infer.trace.page import LEVELS, page

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "@@title@@",
    "\u2028\ud800",
]


class Elements(HTMLParser):
    """What a browser makes of the page: every element with its attributes, and the text of scripts and the title."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data

    def all(self, tag: str, **attributes: str) -> list[str]:
        """The texts of the elements with that name and those attributes."""
        pairs = zip(self.found, self.texts, strict=True)
        return [text for (name, has), text in pairs if name == tag and attributes.items() <= has.items()]


def data_of(html: str) -> Any:
    (text,) = Elements(html).all("script", id="data")
    return json.loads(text)


def test_refuses_a_trace_without_steps() -> None:
    with pytest.raises(ValueError, match="no steps"):
        page(make_trace(steps=0))


def test_is_one_document_that_asks_for_nothing() -> None:
    html = page(make_trace())
    elements = Elements(html)
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?:|@import|url\(|@@", html)
    for _, attributes in elements.found:
        assert not attributes.keys() & {"src", "srcset", "data", "action"}
        assert attributes.get("href", "data:,") == "data:,"
    (policy,) = [a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_holds_the_trace() -> None:
    trace = make_trace(window=6)
    data = data_of(page(trace))
    assert (data["title"], data["layers"], data["heads"]) == (trace.title, trace.layers, trace.heads)
    assert data["capacity"] == trace.cache_capacity
    assert data["prompt"] == [[token.token_id, token.text] for token in trace.prompt]
    assert len(data["steps"]) == len(trace.steps)
    for shown, step in zip(data["steps"], trace.steps, strict=True):
        assert (shown["id"], shown["text"]) == (step.token_id, step.text)
        assert (shown["positions"], shown["bytes"]) == (step.cache_positions, step.cache_bytes)
        assert shown["probability"] == pytest.approx(step.probability, rel=1e-4)
        assert shown["entropy"] == pytest.approx(step.entropy, rel=1e-4)
        assert [a[:2] for a in shown["alternatives"]] == [[a.token_id, a.text] for a in step.alternatives]
        assert [a[2] for a in shown["alternatives"]] == pytest.approx(
            [a.probability for a in step.alternatives], rel=1e-4
        )


def test_weights_round_trip() -> None:
    trace = make_trace(window=6)
    html = page(trace)
    packed = Elements(html).all("script", **{"class": "rows"})
    first = data_of(html)["first"]
    assert max(first[1]) > 0, "the window layer has dropped positions"
    for number, (layer, rows) in enumerate(zip(trace.layers, packed, strict=True)):
        assert first[number] == [step.attention[layer].first for step in trace.steps]
        values = np.frombuffer(zlib.decompress(base64.b64decode(rows)), np.uint8)
        wanted = np.concatenate([step.attention[layer].weights.ravel() for step in trace.steps])
        np.testing.assert_allclose(values / LEVELS, np.sqrt(wanted.astype(np.float64)), atol=0.5001 / LEVELS)


def test_the_prompt() -> None:
    """Its predictions, and their rows in front of those of the steps."""
    trace = make_trace(window=3, prompt=6, prompt_rows=4)
    html = page(trace)
    data = data_of(html)
    assert data["predicted_from"] == 2
    predicted = [token.prediction for token in trace.prompt[2:] if token.prediction is not None]
    assert [each["rank"] for each in data["predictions"]] == [each.rank for each in predicted]
    assert [each["probability"] for each in data["predictions"]] == pytest.approx(
        [each.probability for each in predicted], rel=1e-4
    )
    for number, rows in enumerate(Elements(html).all("script", **{"class": "rows"})):
        kept = [each.attention[trace.layers[number]] for each in (*predicted, *trace.steps)]
        assert data["first"][number] == [each.first for each in kept]
        values = np.frombuffer(zlib.decompress(base64.b64decode(rows)), np.uint8)
        wanted = np.concatenate([each.weights.ravel() for each in kept]).astype(np.float64)
        np.testing.assert_allclose(values / LEVELS, np.sqrt(wanted), atol=0.5001 / LEVELS)


def test_parts_of_characters() -> None:
    trace = make_trace()
    for i, part in enumerate((b"\xc3", b"\xa9", b"\xff")):
        trace.steps[3 + i] = replace(trace.steps[3 + i], raw=part)
    data = data_of(page(trace))
    assert data["partial"] == [8, 9, 10]
    assert data["joined"] == [[8, 10, "é"]]


def test_hostile_text_stays_inside() -> None:
    clean, trace = Elements(page(make_trace())), make_trace(texts=HOSTILE)
    trace.title = '</title><script>alert("&amp;")</script>@@data@@'
    html = page(trace)
    elements = Elements(html)
    assert [name for name, _ in elements.found] == [name for name, _ in clean.found]
    assert [title.strip() for title in elements.all("title")] == [f"{trace.title} · trace"]
    data = data_of(html)
    assert data["title"] == trace.title
    assert [step["text"] for step in data["steps"]][: len(HOSTILE)] == HOSTILE
    html.encode("utf-8")  # not even half a surrogate pair stands in the way of writing it


def test_no_number() -> None:
    """JSON has no NaN."""
    trace = make_trace(steps=2)
    trace.steps[1] = replace(trace.steps[1], probability=float("nan"), entropy=float("nan"))
    rows = trace.steps[1].attention[0]
    rows.weights[:] = np.nan
    data = data_of(page(trace))
    assert (data["steps"][1]["probability"], data["steps"][1]["entropy"]) == (None, None)


@pytest.mark.parametrize("nothing", ["layers", "heads"])
def test_without_attention(nothing: str) -> None:
    trace = make_trace(**{nothing: ()})
    assert data_of(page(trace))[nothing] == []


def test_saved_by_suffix(tmp_path: Path) -> None:
    trace: Trace = make_trace()
    trace.save(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page(trace)
