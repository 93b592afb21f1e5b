"""The trace of a run with drafts is the one without, but for its times and for which tokens were drafted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mocks import Letters
from traces import make_trace

from infer import LLM, KVCache, SamplingParams, Trace, generate
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.models.common import Decoder
from infer.trace.data import Prediction
from infer.trace.page import page, read_page
from infer.trace.terminal import draw, table

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
PARAMS = [
    SamplingParams(max_new_tokens=30, seed=1),
    SamplingParams(max_new_tokens=30, temperature=1.2, seed=3, repetition_penalty=1.1),
]
DRAFTS: dict[str, Callable[[list[int]], list[int]]] = {
    "right": lambda right: right,
    "wrong": lambda right: [(token + 1) % 64 for token in right],
    "some": lambda right: right[: sum(right) % 4] + [7] * (len(right) - sum(right) % 4),
}


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as possible, whatever they cost."""
    monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))


class Drafter:
    """Knows the text, and spoils its drafts."""

    def __init__(self, text: list[int], spoil: Callable[[list[int]], list[int]]) -> None:
        self.text, self.spoil, self.right = text, spoil, list[range]()  # of each step: which drafts are

    def __call__(self, sequence: Any, count: int) -> list[int]:
        done = sequence.num_tokens - sequence.prompt_len
        drafts = self.spoil(self.text[done : done + count])
        right = 0
        while right < len(drafts) and drafts[right] == self.text[done + right]:
            right += 1
        self.right.append(range(done, done + right))
        return drafts

    def drafted(self) -> list[bool]:
        """Which tokens of the text are accepted drafts."""
        right = {at for step in self.right for at in step}
        return [at in right for at in range(len(self.text))]


def assert_same_predictions(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(one, Prediction):
            assert one is other is None
            continue
        assert one.attention.keys() == other.attention.keys()
        for layer, rows in one.attention.items():
            assert rows.first == other.attention[layer].first
            np.testing.assert_array_equal(rows.weights, other.attention[layer].weights)
        for name in ("probability", "entropy", "rank", "alternatives"):
            assert getattr(one, name) == getattr(other, name)


def assert_same(ours: Trace, theirs: Trace) -> None:
    """The same steps, but for times, `drafted`, and the memory of the cache."""
    assert_same_predictions(ours.steps, theirs.steps)
    for name in ("token_id", "text", "raw", "cache_positions"):
        assert [getattr(step, name) for step in ours.steps] == [getattr(step, name) for step in theirs.steps]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("prompt_rows", [0, 256])
@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 3}, {"cache_dtype": "int8"}, {"cache": KVCache}])
def test_the_same(
    tiny_model: Callable[..., Decoder], family: str, kind: str, prompt_rows: int, settings: dict[str, Any]
) -> None:
    model = tiny_model(model_type=family)

    def traced(params: SamplingParams, **more: Any) -> tuple[Any, Trace]:
        if "cache" in settings:  # keeps positions before the windows
            more["cache"] = KVCache.from_model_config(model.config, 50, dtype="float32", device="cpu")
        trace = Trace(heads=[0, 3], top_k=3, prompt_rows=prompt_rows)
        return generate(model, Letters(), PROMPT, params, trace=trace, **settings | more), trace

    for params in PARAMS:
        expected, without = traced(params)
        drafter = Drafter(expected.token_ids, DRAFTS[kind])
        result, trace = traced(params, speculate=drafter)
        assert result.token_ids == expected.token_ids
        assert result.drafted > 0
        assert_same(trace, without)
        assert [token[:3] for token in trace.prompt] == [token[:3] for token in without.prompt]
        assert_same_predictions(*([token.prediction for token in each.prompt] for each in (trace, without)))
        assert trace.settings == without.settings
        assert {step.cache_bytes for step in trace.steps} == {expected.cache_memory_bytes}
        assert not any(step.drafted for step in without.steps)
        assert [step.drafted for step in trace.steps] == drafter.drafted()
        assert sum(drafter.drafted()) == result.accepted
        assert (kind == "wrong") == (result.accepted == 0)


def test_a_time_is_a_share_of_its_step(tiny_model: Callable[..., Decoder]) -> None:
    model, params = tiny_model(), PARAMS[0]
    drafter = Drafter(generate(model, Letters(), PROMPT, params).token_ids, DRAFTS["some"])
    trace = Trace()
    timing = generate(model, Letters(), PROMPT, params, trace=trace, speculate=drafter).timing
    times = [step.time_s for step in trace.steps]
    assert times == [timing.prefill_time_s, *timing.decode_times_s]
    assert max(map(len, drafter.right)) > 1
    for right in drafter.right:
        assert len({*times[right.start : right.stop + 1]}) == 1  # and the token after them


def test_a_draft_that_ends_the_text(tiny_model: Callable[..., Decoder]) -> None:
    model, params = tiny_model(), PARAMS[1]
    text = generate(model, Letters(), PROMPT, params).text
    params, without, trace = replace(params, stop=text[3:6]), Trace(), Trace()
    expected = generate(model, Letters(), PROMPT, params, trace=without)
    drafter = Drafter(expected.token_ids, DRAFTS["right"])
    result = generate(model, Letters(), PROMPT, params, trace=trace, speculate=drafter)
    assert (result.text, result.finish_reason) == (text[:3], "stop")
    assert [step.drafted for step in trace.steps] == drafter.drafted()
    assert trace.steps[-1].drafted
    assert_same(trace, without)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_among_others(tiny_model: Callable[..., Decoder], family: str) -> None:
    """In pages that sequences share; those beside it have drafts, too."""
    model, params, without = tiny_model(model_type=family), PARAMS[0], Trace()
    expected = generate(model, Letters(), PROMPT, params, trace=without)
    drafter = Drafter(expected.token_ids, DRAFTS["some"])
    with LLM(model, Letters(), prefill_chunk=4, speculate=lambda *args: drafter(*args)) as llm:
        for _ in range(2):  # the second finds pages
            trace = Trace()
            handles = [llm.submit(PROMPT[i:], params) for i in range(3)]
            result = llm.submit(PROMPT, params, trace=trace).result()
            for handle in handles:
                handle.result()
            assert result.token_ids == expected.token_ids
            assert_same(trace, without)
            assert sum(step.drafted for step in trace.steps) == result.accepted > 0


def test_the_row_of_another_query_is_noticed(tiny_model: Callable[..., Decoder]) -> None:
    model, params, traces = tiny_model(model_type="gemma3"), PARAMS[0], [Trace(), Trace()]
    for trace in traces:
        generate(model, Letters(), PROMPT, params, trace=trace)
    traces[0].steps[5] = replace(traces[0].steps[5], attention=traces[0].steps[4].attention)
    with pytest.raises(AssertionError):
        assert_same(*traces)


class TestFiles:
    DRAFTED = (False, True, True, False)

    @pytest.fixture
    def trace(self) -> Trace:
        trace = make_trace(steps=4)
        trace.settings = {"params": {"seed": 1}}
        trace.steps = [replace(step, drafted=drafted) for step, drafted in zip(trace.steps, self.DRAFTED, strict=True)]
        return trace

    def test_json_lines(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "run.jsonl")
        lines = [*map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())]
        assert [line["drafted"] for line in lines[1:]] == [*self.DRAFTED]

    def test_arrays(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "run.npz")
        with np.load(tmp_path / "run.npz", allow_pickle=False) as arrays:
            assert arrays["drafted"].dtype == bool
            assert arrays["drafted"].tolist() == [*self.DRAFTED]

    def test_page(self, trace: Trace, tmp_path: Path) -> None:
        """Pages without it can still be repeated."""
        html = page(trace)
        assert [part.startswith("true") for part in html.split('"drafted":')[1:]] == [*self.DRAFTED]
        found = []
        for name, text in [
            ("run", html),
            ("before", html.replace(',"drafted":true', "").replace(',"drafted":false', "")),
        ]:
            (tmp_path / name).write_text(text)
            found.append(read_page(tmp_path / name))
        assert found[0] == found[1]
        assert found[0].tokens == [step.token_id for step in trace.steps]

    def test_terminal(self, trace: Trace) -> None:
        lines = [line.plain for line in draw(trace)]
        assert [line.split()[0] for line in lines[1:5]] == ["1", "+2", "+3", "4"]
        assert "+: drafted, and verified with the token before it" in lines
        without = [line.plain for line in draw(make_trace(steps=4))]
        assert [line.split()[0] for line in without[1:5]] == ["1", "2", "3", "4"]
        assert not any("drafted" in line for line in without)

    def test_a_thousand_steps_in_the_terminal(self) -> None:
        trace = make_trace(steps=1000, layers=())
        trace.steps[-1] = replace(trace.steps[-1], drafted=True)
        *_, last = table(trace, 100)
        assert last.plain.startswith("+1000 ")
