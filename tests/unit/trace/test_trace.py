"""What a trace records, keeps in memory and writes to files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mocks import Letters, MockModel, MockTokenizer, UniformMockModel

from infer import KVCache, SamplingParams, Trace, generate, stream
from infer.compat.seeds import full_attention_matrix
from infer.models.common import Decoder
from infer.trace import record
from infer.trace.text import joined, partial_bytes, token_text, token_texts

FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "rope_gpt"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(max_new_tokens=7)
SEEDED = SamplingParams(max_new_tokens=7, temperature=1.5, seed=3)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(model_type=request.param)


def run(model: Decoder, trace: Trace | None = None, params: SamplingParams = GREEDY, **settings: Any) -> list[int]:
    return generate(model, Letters(), PROMPT, params, trace=trace, **settings).token_ids


class TestRun:
    @pytest.mark.parametrize("params", [GREEDY, SEEDED])
    @pytest.mark.parametrize("settings", [{}, {"use_kv_cache": False}, {"prefill_chunk": 3}])
    def test_same_tokens(self, model: Decoder, params: SamplingParams, settings: dict[str, Any]) -> None:
        trace = Trace()
        assert run(model, trace, params, **settings) == run(model, None, params, **settings)
        assert [step.token_id for step in trace.steps] == run(model, None, params)

    @pytest.mark.parametrize("settings", [{}, {"use_kv_cache": False}, {"prefill_chunk": 3}, {"cache": KVCache}])
    def test_rows(self, model: Decoder, settings: dict[str, Any]) -> None:
        """The same whatever keeps the keys: a window layer's have the window's length at most."""
        if "cache" in settings:
            settings = {"cache": KVCache.from_model_config(model.config, 20, dtype="float32", device="cpu")}
        trace = Trace(layers=[0, -1], heads=[1, 3])
        tokens = PROMPT + run(model, trace, **settings)
        last = model.config.num_hidden_layers - 1
        assert (trace.layers, trace.heads) == ([0, last], [1, 3])
        for layer in trace.layers:
            matrix = full_attention_matrix(model, tokens, trace_layer=layer)[0, [1, 3]]
            for number, step in enumerate(trace.steps):
                first, weights = step.attention[layer]
                at = len(PROMPT) + number - 1  # the query that the token was chosen from
                assert weights.dtype == np.float16
                assert first == max(0, at + 1 - (model.config.window(layer) or 99))
                assert first + weights.shape[1] == at + 1
                expected = matrix[:, at, first : at + 1].numpy()
                np.testing.assert_allclose(weights, expected, atol=1e-5, rtol=1e-3)  # half a digit of float16
                assert matrix[:, at, :first].abs().sum() == 0

    def test_probabilities(self, model: Decoder) -> None:
        trace = Trace(layers=[], top_k=4)
        tokens = PROMPT + run(model, trace, SEEDED)
        logits = model(torch.tensor([tokens]))[0].double()
        for number, step in enumerate(trace.steps):
            probabilities = logits[len(PROMPT) + number - 1].softmax(-1)
            assert step.probability == pytest.approx(probabilities[step.token_id].item(), abs=1e-5)
            assert step.entropy == pytest.approx(-(probabilities * probabilities.log()).sum().item(), abs=1e-4)
            best = probabilities.topk(4)
            assert [a.token_id for a in step.alternatives] == best.indices.tolist()
            assert [a.probability for a in step.alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert step.attention == {}

    def test_cache_state(self, model: Decoder) -> None:
        trace = Trace(layers=[])
        result = generate(model, Letters(), PROMPT, GREEDY, trace=trace)
        assert [step.cache_positions for step in trace.steps] == [len(PROMPT) + i for i in range(7)]
        assert {step.cache_bytes for step in trace.steps} == {result.cache_memory_bytes}
        assert trace.cache_capacity == len(PROMPT) + 7
        assert [step.time_s for step in trace.steps] == [
            result.timing.prefill_time_s,
            *result.timing.decode_times_s,
        ]

    def test_beyond_the_context(self, tiny_model: Callable[..., Decoder]) -> None:
        """Positions are those of the whole text, also when only the last ones are fed."""
        model = tiny_model(model_type="gpt2", max_position_embeddings=10)
        trace = Trace(layers=[1])
        tokens = PROMPT + run(model, trace, on_full="recompute")
        for number, step in enumerate(trace.steps):
            fed = len(PROMPT) + number
            cut = max(0, fed - 10)
            first, weights = step.attention[1]
            assert (first, first + weights.shape[1]) == (cut, fed)
            expected = full_attention_matrix(model, tokens[cut:fed], trace_layer=1)[0, :, -1]
            np.testing.assert_allclose(weights, expected.numpy(), atol=1e-5, rtol=1e-3)
        assert [step.cache_positions for step in trace.steps] == [8, 9, 10, 0, 0, 0, 0]
        assert trace.cache_capacity == 10

    def test_no_cache_has_no_capacity(self, model: Decoder) -> None:
        trace = Trace(layers=[])
        run(model, trace)
        run(model, trace, use_kv_cache=False)
        assert trace.cache_capacity == 0
        assert {step.cache_bytes for step in trace.steps} == {0}

    def test_grows_with_the_stream(self, model: Decoder) -> None:
        trace = Trace()
        for count, token in enumerate(stream(model, Letters(), PROMPT, GREEDY, trace=trace), start=1):
            assert len(trace.steps) == count
            assert trace.steps[-1].token_id == token.token_id

    def test_starts_afresh(self, model: Decoder) -> None:
        trace = Trace()
        run(model, trace)
        run(model, trace)
        assert len(trace.steps) == 7

    def test_title(self, model: Decoder, tiny_model: Callable[..., Decoder]) -> None:
        """The kind of model, unless it was given another."""
        trace = Trace()
        run(model, trace)
        run(tiny_model(model_type="gemma3"), trace)
        assert trace.title == "gemma3"
        trace.title = "mine"
        run(model, trace)
        assert trace.title == "mine"

    def test_a_fair_choice(self) -> None:
        trace = Trace()
        generate(UniformMockModel(0), MockTokenizer(), [1], SamplingParams(max_new_tokens=1), trace=trace)
        assert trace.steps[0].entropy == pytest.approx(math.log(10))
        assert trace.steps[0].probability == pytest.approx(0.1)
        assert len(trace.steps[0].alternatives) == 10

    def test_a_certain_choice(self) -> None:
        """Tokens of probability 0 add nothing to the entropy."""

        class Certain(MockModel):
            def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                return super().__call__(*args, **kwargs).masked_fill(torch.arange(10) != 4, -torch.inf)

        trace = Trace()
        generate(Certain(4), MockTokenizer(), [1], SamplingParams(max_new_tokens=1), trace=trace)
        assert trace.steps[0].entropy == 0
        assert trace.steps[0].probability == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("asked", "complaint"),
        [
            ({"layers": [0, 2]}, "no layer 2 to trace: the model has layers 0 to 1"),
            ({"layers": [-3]}, "no layer -3"),
            ({"layers": [0.5]}, r"no layer 0\.5"),
            ({"heads": [4]}, "no head 4 to trace: the model has heads 0 to 3"),
        ],
    )
    def test_not_there(self, tiny_model: Callable[..., Decoder], asked: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            stream(tiny_model(), Letters(), PROMPT, GREEDY, trace=Trace(**asked))

    @pytest.mark.parametrize("top_k", [0, -1, 1.5, None, True])
    def test_top_k(self, top_k: Any) -> None:
        with pytest.raises(ValueError, match="top_k must be an integer, 1 or more"):
            Trace(top_k=top_k)

    @pytest.mark.parametrize("asked", [{"layers": 0}, {"layers": "0"}, {"heads": 1}])
    def test_no_list(self, asked: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match="must be a list of numbers"):
            Trace(**asked)
        with pytest.raises(ValueError, match="heads is empty"):
            Trace(heads=[])

    def test_no_trace(self, tiny_model: Callable[..., Decoder]) -> None:
        with pytest.raises(TypeError, match="trace must be a Trace, not bool"):
            stream(tiny_model(), Letters(), PROMPT, GREEDY, trace=True)  # type: ignore[arg-type]

    def test_a_refused_run_leaves_the_last_one(self, tiny_model: Callable[..., Decoder]) -> None:
        model, trace = tiny_model(), Trace()
        run(model, trace)
        full = KVCache.from_model_config(model.config, 40, dtype="float32", device="cpu")
        full.advance(20)
        with pytest.raises(ValueError, match="nothing is left to compute"):
            run(model, trace, cache=full)
        assert len(trace.steps) == 7

    def test_memory(self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
        """1 + 2 + ... + 14 positions, 2 layers, 4 heads, 2 bytes each; a window layer's 4 at most."""
        for kind, needed in (("llama", 2 * 4 * 2 * 105), ("gemma3", 2 * 4 * (105 + 2 * 50))):
            model = tiny_model(model_type=kind)
            monkeypatch.setattr(record, "available_memory", lambda device, free=needed: free)
            run(model, Trace())
            monkeypatch.setattr(record, "available_memory", lambda device, free=needed - 1: free)
            with pytest.raises(ValueError, match="trace fewer layers or heads"):
                run(model, Trace())


class TestFiles:
    @pytest.fixture
    def trace(self, tiny_model: Callable[..., Decoder]) -> Trace:
        trace = Trace(layers=[0, 1], heads=[2], top_k=3)
        run(tiny_model(model_type="gemma3"), trace)
        return trace

    def test_json_lines(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "run.jsonl")
        first, *lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
        assert first["layers"] == [0, 1]
        assert first["heads"] == [2]
        assert [token["token_id"] for token in first["prompt"]] == PROMPT
        assert "".join(token["text"] for token in first["prompt"]) == Letters().decode(PROMPT)
        assert [line["step"] for line in lines] == list(range(7))
        for line, step in zip(lines, trace.steps, strict=True):
            assert line["token_id"] == step.token_id
            assert line["text"] == step.text
            assert line["probability"] == step.probability
            assert line["entropy"] == step.entropy
            assert [a["token_id"] for a in line["alternatives"]] == [a.token_id for a in step.alternatives]
            assert line["cache"] == {"positions": step.cache_positions, "bytes": step.cache_bytes}
            for layer, rows in step.attention.items():
                assert line["attention"][str(layer)]["first"] == rows.first
                weights = np.array(line["attention"][str(layer)]["weights"], dtype=np.float16)
                np.testing.assert_allclose(weights, rows.weights, rtol=1e-3)

    def test_arrays(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(str(tmp_path / "run.npz"))
        with np.load(tmp_path / "run.npz", allow_pickle=False) as arrays:
            assert arrays["prompt_ids"].tolist() == PROMPT
            assert arrays["token_ids"].tolist() == [step.token_id for step in trace.steps]
            assert arrays["token_texts"].tolist() == [step.text for step in trace.steps]
            assert "".join(arrays["prompt_texts"]) == Letters().decode(PROMPT)
            assert arrays["top_k_ids"].shape == (7, 3)
            for layer in (0, 1):
                weights = arrays[f"attention_{layer}"]
                assert weights.shape == (7, 1, 14)
                assert weights.dtype == np.float16
                for number, step in enumerate(trace.steps):
                    first, rows = step.attention[layer]
                    np.testing.assert_array_equal(weights[number, :, first : first + rows.shape[1]], rows)
                    assert weights[number].sum() == pytest.approx(1, abs=5e-3)

    def test_no_number(self, trace: Trace, tmp_path: Path) -> None:
        """JSON has no NaN."""
        trace.steps[0] = replace(trace.steps[0], probability=math.nan, entropy=math.nan)
        trace.save(tmp_path / "run.jsonl")
        line = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])
        assert (line["probability"], line["entropy"]) == (None, None)

    @pytest.mark.parametrize("name", ["run.txt", "run", "nowhere/run.npz"])
    def test_refused(self, trace: Trace, tmp_path: Path, name: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=r"saved as|no folder"):
            trace.save(tmp_path / name)
        assert list(tmp_path.iterdir()) == []


class TestTokenText:
    class SentencePiece:
        """Drops the space of a first word, keeps silent about special tokens, and has halves of characters."""

        words = ("Hello", " world", "<s>", b"\xc3", b"\xa9")

        def decode(self, token_ids: list[int]) -> str:
            parts = [self.words[i] for i in token_ids if i != 2]
            data = b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)
            return data.decode(errors="replace").removeprefix(" ")

        def id_to_token(self, token_id: int) -> str:
            return str(self.words[token_id])

    @pytest.mark.parametrize(
        ("token", "before", "text"),
        [
            (0, None, "Hello"),
            (1, None, "world"),
            (1, 0, " world"),
            (2, 0, "<s>"),
            (1, 2, "world"),
            (3, 0, "\N{REPLACEMENT CHARACTER}"),
            (4, 3, "\N{REPLACEMENT CHARACTER}"),
        ],
    )
    def test_text(self, token: int, before: int | None, text: str) -> None:
        assert token_text(self.SentencePiece(), token, before) == text

    def test_no_name_either(self) -> None:
        assert token_text(MockTokenizer([""]), 0) == "<0>"

    class ByteLevel:
        """A token for each byte, whose bytes it tells."""

        def decode(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode(errors="replace")

        def bytes_of(self, token_id: int) -> bytes:
            return bytes([token_id])

    def test_parts_of_a_character(self) -> None:
        tokenizer, token_ids = self.ByteLevel(), [*"aé 你!".encode()]
        names = ["a", "<0xC3>", "<0xA9>", " ", "<0xE4>", "<0xBD>", "<0xA0>", "!"]
        assert token_texts(tokenizer, token_ids) == names
        raw = [partial_bytes(tokenizer, token) for token in token_ids]
        assert joined(raw) == [(1, 3, "é"), (4, 7, "你")]

    @pytest.mark.parametrize(
        ("raw", "found"),
        [
            ([b"\xe4", b"\xbd"], []),  # the end of the text
            ([b"\xe4", b"", b"\xbd\xa0"], []),  # another token between
            ([b"\xff", b"\xc3", b"\xa9"], [(1, 3, "é")]),
            ([b"\xe4", b"\xc3", b"\xa9"], [(1, 3, "é")]),  # one is cut off by the next
            ([b" \xe4\xbd", b"\xa0 a\xc3", b"\xa9"], [(0, 3, " 你 aé")]),
            ([b"\xc3", b"\xa9", b"\xc3", b"\xa9"], [(0, 2, "é"), (2, 4, "é")]),
        ],
    )
    def test_joined(self, raw: list[bytes], found: list[tuple[int, int, str]]) -> None:
        assert joined(raw) == found

    def test_a_replacement_character_that_is_one(self) -> None:
        class Whole(self.ByteLevel):  # type: ignore[name-defined, misc]
            def bytes_of(self, token_id: int) -> bytes:
                return "\N{REPLACEMENT CHARACTER}".encode()

        assert partial_bytes(Whole(), 255) == b""
        assert token_text(Whole(), 255) == "\N{REPLACEMENT CHARACTER}"
