"""What a trace keeps of the prompt: predictions and rows of its last tokens, and none of it changes the run."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mocks import Letters
from traces import make_trace

from infer import LLM, KVCache, SamplingParams, Trace, generate
from infer.compat.seeds import full_attention_matrix
from infer.models.common import Decoder
from infer.trace import predictions as recording
from infer.trace.page import shown_settings
from infer.trace.predictions import first_query

FAMILIES = ["llama", "gemma3", "gpt2"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(max_new_tokens=4)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(model_type=request.param)


def run(model: Decoder, trace: Trace | None = None, prompt: list[int] = PROMPT, **settings: Any) -> list[int]:
    return generate(model, Letters(), prompt, GREEDY, trace=trace, **settings).token_ids


def assert_rows(model: Decoder, trace: Trace, positions: range) -> None:
    """Those positions and no others, with the rows of a pass without a cache."""
    kept = [i for i, token in enumerate(trace.prompt) if token.prediction is not None]
    assert kept == list(positions)
    tokens = [token.token_id for token in trace.prompt]
    for layer in trace.layers:
        matrix = full_attention_matrix(model, tokens, trace_layer=layer)[0, trace.heads].numpy()
        for position in positions:
            prediction = trace.prompt[position].prediction
            assert prediction is not None
            first, weights = prediction.attention[layer]
            assert first == max(0, position - (model.config.window(layer) or 99))
            assert weights.shape == (len(trace.heads), position - first)
            np.testing.assert_allclose(weights, matrix[:, position - 1, first:position], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"use_kv_cache": False}, {"prefill_chunk": 3}, {"cache_dtype": "int8"}])
def test_rows(model: Decoder, settings: dict[str, Any]) -> None:
    trace = Trace(layers=[0, -1], heads=[1, 3])
    assert run(model, trace, **settings) == run(model, None, **settings)
    if "cache_dtype" not in settings:  # which rounds
        assert_rows(model, trace, range(1, 8))
    assert trace.predicted_from == 1


@pytest.mark.parametrize("settings", [{}, {"use_kv_cache": False}, {"prefill_chunk": 3}])
def test_predictions(model: Decoder, settings: dict[str, Any]) -> None:
    trace = Trace(layers=[], top_k=4)
    run(model, trace, **settings)
    logits = model(torch.tensor([PROMPT]))[0].double()
    assert trace.prompt[0].prediction is None
    for position in range(1, 8):
        found = trace.prompt[position].prediction
        assert found is not None
        probabilities = logits[position - 1].softmax(-1)
        own = probabilities[PROMPT[position]]
        assert found.probability == pytest.approx(own.item(), abs=1e-5)
        assert found.surprisal == pytest.approx(-math.log(own.item()), abs=1e-4)
        assert found.entropy == pytest.approx(-(probabilities * probabilities.log()).sum().item(), abs=1e-4)
        assert found.rank == 1 + int((probabilities > own).sum())
        assert [a.token_id for a in found.alternatives] == probabilities.topk(4).indices.tolist()


@pytest.mark.parametrize(("asked", "kept"), [(0, range(0)), (3, range(5, 8)), (99, range(1, 8))])
@pytest.mark.parametrize("chunk", [None, 2, 3])
def test_the_last_tokens(model: Decoder, asked: int, kept: range, chunk: int | None) -> None:
    trace = Trace(layers=[0, -1], prompt_rows=asked)
    run(model, trace, prefill_chunk=chunk)
    assert_rows(model, trace, kept)
    assert trace.predicted_from == (kept.start if kept else 8)


def test_a_long_prompt_has_fewer(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit into PROMPT_WEIGHTS."""
    config, layers = model.config, [0]
    window = config.window(0) or 99
    for rows in range(8):
        weights = 4 * sum(min(i, window) for i in range(8 - rows, 8))
        monkeypatch.setattr(recording, "PROMPT_WEIGHTS", weights)
        assert first_query(config, layers, 4, 8, 99) == 7 - rows
    trace = Trace(layers=[0])
    monkeypatch.setattr(recording, "PROMPT_WEIGHTS", 4 * (min(7, window) + min(6, window)))
    run(model, trace)
    assert_rows(model, trace, range(6, 8))


def test_what_the_cache_held_was_not_computed(tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model()
    cache = KVCache.from_model_config(model.config, 20, dtype="float32", device="cpu")
    generate(model, Letters(), PROMPT[:5], SamplingParams(max_new_tokens=1), cache=cache)
    trace = Trace()
    assert run(model, trace, cache=cache) == run(model)
    assert trace.num_cached_tokens == 5
    assert_rows(model, trace, range(6, 8))


def test_beyond_the_context(tiny_model: Callable[..., Decoder]) -> None:
    """A prompt that is fed anew for each token has no rows of its own."""
    model = tiny_model(model_type="gpt2", max_position_embeddings=6)
    trace = Trace()
    run(model, trace, on_full="recompute")
    assert trace.predicted_from == 8
    assert all(token.prediction is None for token in trace.prompt)


def test_among_others(tiny_model: Callable[..., Decoder]) -> None:
    """In chunks, beside rows that are not traced, with log-probabilities of the prompt."""
    model = tiny_model()
    with LLM(model, Letters(), prefill_chunk=3) as llm:
        params = SamplingParams(max_new_tokens=4, prompt_logprobs=0)
        trace = Trace()
        handles = [llm.submit([7, 7, 7, 2, i], GREEDY) for i in range(3)]
        result = llm.submit(PROMPT, params, trace=trace).result()
        for handle in handles:
            handle.result()
    assert_rows(model, trace, range(1, 8))
    surprisals = [token.prediction.surprisal for token in trace.prompt[1:] if token.prediction]
    assert [-each.logprob for each in result.prompt_logprobs[1:]] == pytest.approx(surprisals, abs=1e-5)
    assert trace.settings["prefill_chunk"] == 3


def test_the_same_bits(tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of all positions, where those of the last would do, change none of them."""
    model, seen = tiny_model(), list[torch.Tensor]()
    record = Trace.record

    def noted(self: Trace, tokens: Any, logits: torch.Tensor, *more: Any) -> None:
        seen.append(logits.clone())
        record(self, tokens, logits, *more)

    monkeypatch.setattr(Trace, "record", noted)
    run(model, Trace(prompt_rows=0))
    run(model, Trace())
    run(model, Trace(), prefill_chunk=3)
    assert len(seen) == 12
    for without, once, chunked in zip(seen[:4], seen[4:8], seen[8:], strict=True):
        torch.testing.assert_close(once, without, rtol=0, atol=0)
        torch.testing.assert_close(chunked, without, rtol=0, atol=0)


@pytest.mark.parametrize("prompt_rows", [-1, 1.5, None, True])
def test_refused(prompt_rows: Any) -> None:
    with pytest.raises(ValueError, match="prompt_rows must be an integer, 0 or more"):
        Trace(prompt_rows=prompt_rows)


def test_json_lines(tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    trace = Trace(layers=[1], heads=[2], prompt_rows=3)
    run(tiny_model(), trace)
    trace.save(tmp_path / "run.jsonl")
    head = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert head["settings"] == trace.settings
    assert [sorted(token) for token in head["prompt"][:5]] == [["text", "token_id"]] * 5
    for line, token in zip(head["prompt"][5:], trace.prompt[5:], strict=True):
        assert token.prediction is not None
        assert (line["probability"], line["rank"]) == (token.prediction.probability, token.prediction.rank)
        weights = np.array(line["attention"]["1"]["weights"], dtype=np.float16)
        np.testing.assert_allclose(weights, token.prediction.attention[1].weights, rtol=1e-3)


def test_arrays(tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    trace = Trace(layers=[1], heads=[2], prompt_rows=3)
    run(tiny_model(model_type="gemma3"), trace)
    trace.save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz", allow_pickle=False) as arrays:
        assert json.loads(str(arrays["settings"])) == trace.settings
        assert arrays["prompt_from"] == 5
        assert arrays["prompt_attention_1"].shape == (3, 1, 7)
        for number, token in enumerate(trace.prompt[5:]):
            assert token.prediction is not None
            assert arrays["prompt_probability"][number] == token.prediction.probability
            first, rows = token.prediction.attention[1]
            row = arrays["prompt_attention_1"][number]
            np.testing.assert_array_equal(row[:, first : first + rows.shape[1]], rows)
            assert row.sum() == pytest.approx(1, abs=5e-3)


class TestSettings:
    def test_recorded(self, tiny_model: Callable[..., Decoder]) -> None:
        trace = Trace(layers=[], top_k=3)
        bias = {4: -math.inf, 5: 1.5}
        params = SamplingParams(max_new_tokens=2, temperature=0.5, stop="!", logit_bias=bias)
        generate(tiny_model(), Letters(), PROMPT, params, trace=trace, cache_dtype="int8", prefill_chunk=5)
        settings = trace.settings
        assert json.loads(json.dumps(settings, allow_nan=False)) == settings
        assert (settings["dtype"], settings["quantize"], settings["device"]) == ("float32", None, "cpu")
        assert (settings["kv_cache"], settings["cache_dtype"], settings["prefill_chunk"]) == (True, "int8", 5)
        assert (settings["top_k"], settings["prompt_rows"]) == (3, 256)
        assert settings["params"]["stop"] == ["!"]
        assert settings["params"]["logit_bias"] == {"4": "-inf", "5": 1.5}
        again = Trace(layers=[])
        seeded = SamplingParams(max_new_tokens=2, temperature=0.5, seed=settings["params"]["seed"], logit_bias=bias)
        generate(tiny_model(), Letters(), PROMPT, seeded, trace=again, cache_dtype="int8")
        assert [step.token_id for step in again.steps] == [step.token_id for step in trace.steps]

    def test_without_a_cache(self, tiny_model: Callable[..., Decoder]) -> None:
        trace = Trace(layers=[])
        run(tiny_model(), trace, use_kv_cache=False)
        assert trace.settings["kv_cache"] is False

    def test_in_words(self, tiny_model: Callable[..., Decoder]) -> None:
        trace = Trace(layers=[])
        run(tiny_model(), trace)
        shown = dict(shown_settings(trace))
        assert shown["dtype"] == "float32"
        assert shown["weights"] == "float32"
        assert shown["max new tokens"] == "4"
        assert shown["seed"] == str(trace.settings["params"]["seed"])
        assert shown["KV cache"] == "yes"
        assert shown["top k"] == "off"
        assert "logprobs" not in shown


class TestNotebooks:
    def test_repr(self) -> None:
        assert repr(Trace()) == "<Trace of no run yet: give it to generate>"
        assert Trace()._repr_html_() is None
        trace = make_trace(steps=2)
        assert repr(trace) == "<Trace of made up: 5 prompt tokens, 2 generated, 2 layers x 3 heads: ' w0 w1'>"
        assert len(repr(make_trace(steps=200))) < 140

    def test_html(self) -> None:
        html = make_trace(texts=['"><script>'])._repr_html_()
        assert html is not None
        assert html.startswith('<iframe title="made up · trace" sandbox="allow-scripts"')
        assert html.count("<") == 2, "the frame, and nothing else"
        assert html.endswith("</iframe>")

    def test_no_pandas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
            make_trace().to_pandas()

    def test_pandas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Frame:
            def __init__(self, rows: list[dict[str, Any]]) -> None:
                self.rows, self.index, self.types = rows, types.SimpleNamespace(name=None), {}

            def astype(self, kinds: dict[str, str]) -> Frame:
                self.types = kinds
                return self

        monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=Frame))
        trace = make_trace(prompt=5, prompt_rows=2, steps=3)
        trace.steps[1] = replace(trace.steps[1], drafted=True)
        with pytest.raises(ValueError, match="the trace is empty"):
            Trace().to_pandas()
        frame = trace.to_pandas()
        assert frame.index.name == "position"
        assert set(frame.types) == {"step", "rank", "cache_positions", "cache_bytes", "drafted"}
        assert [row["drafted"] for row in frame.rows] == [None] * 5 + [False, True, False]
        assert [row["step"] for row in frame.rows] == [None] * 5 + [0, 1, 2]
        assert [row["text"] for row in frame.rows] == [t.text for t in trace.prompt] + [s.text for s in trace.steps]
        assert [row["probability"] is None for row in frame.rows] == [True] * 3 + [False] * 5
        assert frame.rows[5]["surprisal"] == pytest.approx(-math.log(trace.steps[0].probability))
        assert frame.rows[5]["top_token"] == trace.steps[0].text
        assert frame.rows[4]["rank"] == 6
        assert all(row.keys() == frame.rows[0].keys() for row in frame.rows)
