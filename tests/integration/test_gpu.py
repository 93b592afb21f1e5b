"""Decoding on a GPU: captured or not, alone or in a batch, the tokens are those that plain torch gives.

And a token gets the same bits in a step, in a prompt, in chunks and in a batch. Sizes are the same wherever they may
be, because each other one is a kernel to compile.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Collection
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mocks import MockTokenizer
from tiny import FAMILIES
from torch import Tensor

from infer import LLM, KVCache, SamplingParams, SlidingCache, generate, generate_batch, load_model, stream
from infer.backend import Row, backend_for
from infer.backend.parts import ModelSnapshot
from infer.cache import BaseCache, Cache, NoCache, PagedCache
from infer.cache.pool import bytes_for
from infer.engine import drafters
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.engine.drafters import ModelDrafter
from infer.engine.engine import Engine
from infer.engine.memory import CacheMemory
from infer.engine.model import all_logits, step
from infer.engine.sampler import penalize, sample
from infer.engine.sequence import Sequence
from infer.engine.session import Session
from infer.evaluate.paths import Comparison
from infer.loader.text_tokenizers import character_tokenizer
from infer.loader.tokenizer import Tokenizer
from infer.models.common import Decoder
from infer.models.rows import ALL, LAST, NONE
from infer.nn.draw import weights
from infer.nn.linear import Linear
from infer.nn.norm import RMSNorm
from infer.trace.record import Trace

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer.backend.gpu import attention, captured, device_check, gemm, launcher
from infer.backend.gpu import backend as gpu_backend
from infer.backend.gpu import prompts as gpu_prompts
from infer.backend.gpu.launcher import compile_ahead
from infer.backend.gpu.sampling import DeviceSampler
from infer.backend.gpu.tuned import ROWS_COMPILED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
WINDOW = 70  # more than the keys that a program looks at together
VOCAB = 211
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 200,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,  # or every token is followed by itself
}
# A family's own, less what would make kernels differ for no other reason than their sizes.
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 24},
    "gemma3": {"head_dim": 24, "num_hidden_layers": 2, "sliding_window": WINDOW},
}
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, seed=17)
PENALIZED = SamplingParams(
    max_new_tokens=24, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, logit_bias={5: 1.0}
)
FREE = SamplingParams(max_new_tokens=24, temperature=0.9, frequency_penalty=0.5, seed=3)
EVERY_WAY = pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALIZED, FREE], ids=["greedy", "top", "penalty", "all"]
)

MakeModel = Callable[..., Decoder]


class Letters:
    """A letter for each token, however many there are."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in token_ids)


@pytest.fixture(autouse=True)
def compiled_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not compiled ahead: tests have more models than anybody runs."""
    monkeypatch.setattr(launcher, "can_compile_ahead", lambda: False)


@pytest.fixture
def make_model(tiny_model: MakeModel) -> MakeModel:
    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
        return tiny_model(model_type=family, dtype=dtype, **SIZES | OWN.get(family, {}) | changes).to("cuda")

    return make


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that backend/gpu/captured.py launches."""
    rows: list[int] = []
    launch = captured.CapturedStep.launch

    def counted(step: captured.CapturedStep) -> None:
        rows.append(step.rows)
        launch(step)

    monkeypatch.setattr(captured.CapturedStep, "launch", counted)
    return rows


@contextmanager
def plain() -> Iterator[None]:
    """Plain torch, module by module: as if there were a hook."""
    with mock.patch.object(ModelSnapshot, "hooked", return_value=True):
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "captured": nullcontext,
    "launched": captured.disabled,
    "plain": plain,
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def tokens_of(model: Decoder, prompt: Collection[int], params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    return generate(model, Letters(), prompt, params, **options).token_ids


def in_every_way(run: Callable[[], Any]) -> dict[str, Any]:
    results = {}
    for name, way in WAYS.items():
        with way():
            results[name] = run()
    return results


def plainly(model: Decoder, prompt: Collection[int], params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    with plain():
        return tokens_of(model, prompt, params, **options)


def make_cache(model: Decoder, kind: type[BaseCache], positions: int, **options: Any) -> Any:
    return kind.from_model_config(model.config, positions, dtype=model.dtype, device=model.device, **options)


# Kinds of caches that kernels write to, with a model that has a use for them.
CACHES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", KVCache, {}),
    "windows": ("gemma3", KVCache, {}),
    "ring": ("gemma3", SlidingCache, {"prefill_chunk": 8}),
    "tight ring": ("gemma3", SlidingCache, {"prefill_chunk": 1}),
    "pages": ("llama", PagedCache, {}),
    "windows in pages": ("gemma3", PagedCache, {}),
}
EVERY_CACHE = pytest.mark.parametrize("kind", CACHES)


class TestLogits:
    """Of one decode step, against float32 on the CPU from the same weights."""

    @pytest.mark.parametrize(
        ("family", "sliding"), [*((family, False) for family in FAMILIES), ("gemma3", True)], ids=str
    )
    @pytest.mark.parametrize(
        ("dtype", "batch", "most"),
        [
            *((torch.float32, batch, 1e-4) for batch in (1, 20)),
            *((torch.bfloat16, batch, 0.1) for batch in (1, 3, 20)),
            (torch.float16, 3, 0.01),
        ],
        ids=str,
    )
    @torch.inference_mode()
    def test_are_as_good_as_plain_torch(
        self,
        make_model: MakeModel,
        family: str,
        sliding: bool,
        dtype: torch.dtype,
        batch: int,
        most: float,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """most: the error by the logits' size. Besides, it is not far from plain torch's in the same dtype."""
        self.check(make_model(family, dtype), batch, sliding, most, monkeypatch)

    @pytest.mark.parametrize(("family", "head_dim"), [("llama", 64), ("qwen3", 128), ("gemma3", 64)])
    @pytest.mark.parametrize(
        ("dtype", "batch", "most"),
        [(torch.bfloat16, 1, 0.1), (torch.bfloat16, 20, 0.1), (torch.float16, 3, 0.01)],
        ids=str,
    )
    @torch.inference_mode()
    def test_with_heads_of_the_usual_sizes(
        self,
        make_model: MakeModel,
        family: str,
        head_dim: int,
        dtype: torch.dtype,
        batch: int,
        most: float,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Those that attention by warps is for."""
        self.check(make_model(family, dtype, head_dim=head_dim), batch, family == "gemma3", most, monkeypatch)

    def check(self, model: Decoder, batch: int, sliding: bool, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
        exact = copy.deepcopy(model).to("cpu", torch.float32)
        prompts = [prompt_of(1 + (149 + 37 * i) % (3 * WINDOW), seed=i) for i in range(batch)]
        expected = torch.cat([exact(torch.tensor([prompt]))[:, -1] for prompt in prompts])

        def error(logits: Tensor) -> float:
            assert logits.shape == expected.shape
            return float((logits.float().cpu() - expected).square().mean().sqrt() / expected.square().mean().sqrt())

        launch = mock.Mock(wraps=gpu_backend.launch)
        monkeypatch.setattr(gpu_backend, "launch", launch)
        got = error(self.decoded(model, prompts, sliding))
        assert launch.call_count == 1
        with plain():
            reference = error(self.decoded(model, prompts, sliding))
        assert launch.call_count == 1
        assert got < most
        assert got < 2.5 * reference + 1e-5

    @staticmethod
    def decoded(model: Decoder, prompts: Collection[Collection[int]], sliding: bool) -> Tensor:
        """Logits [B, V] behind each prompt, of which the last token is decoded."""
        rows: list[Cache] = []
        for prompt in prompts:
            cache = (
                make_cache(model, SlidingCache, 256, prefill_chunk=5) if sliding else make_cache(model, KVCache, 256)
            )
            with plain():
                if prompt[:-1]:
                    step(model, cache, torch.tensor([prompt[:-1]], device="cuda"))
            rows.append(cache)
        fed = [Row(cache, prompt[-1:]) for cache, prompt in zip(rows, prompts, strict=True)]
        return torch.cat([logits[:, -1] for logits in backend_for(model).run(fed)])

    @pytest.mark.parametrize(
        ("family", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("qwen3", torch.float32)], ids=str
    )
    def test_heads_may_be_small(self, tiny_model: MakeModel, family: str, dtype: torch.dtype) -> None:
        """Fewer dimensions than a matrix product on a GPU takes."""
        model = tiny_model(model_type=family, dtype=dtype, head_dim=8).to("cuda")
        prompt = [i % 64 for i in prompt_of(9)]
        with captured.disabled():
            expected = tokens_of(model, prompt)
        assert tokens_of(model, prompt) == expected
        if dtype is torch.float32:
            assert plainly(model, prompt) == expected


class TestTokens:
    @EVERY_FAMILY
    @EVERY_WAY
    def test_do_not_depend_on_how_a_step_is_launched(
        self, make_model: MakeModel, family: str, params: SamplingParams, launches: list[int]
    ) -> None:
        model = make_model(family)
        results = in_every_way(lambda: tokens_of(model, prompt_of(67), params))
        assert results["captured"] == results["launched"] == results["plain"]
        assert len(set(results["plain"])) > 3
        # Captured, and kernel by kernel: a step for each token; nothing is launched beyond the last one.
        assert launches == [1] * (2 * params.max_new_tokens)

    @pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    @pytest.mark.parametrize(
        ("family", "head_dim"), [*((each, 24) for each in FAMILIES), ("llama", 64), ("qwen3", 128)]
    )
    def test_in_16_bits(self, make_model: MakeModel, family: str, head_dim: int, params: SamplingParams) -> None:
        """Captured or not, it is the same kernels; and a second run replays what the first has captured."""
        model = make_model(family, torch.bfloat16, head_dim=head_dim)
        with captured.disabled():
            expected = tokens_of(model, prompt_of(67), params)
        assert tokens_of(model, prompt_of(67), params) == expected
        assert tokens_of(model, prompt_of(67), params) == expected

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_few(self, make_model: MakeModel, count: int, launches: list[int]) -> None:
        """Fewer than are launched ahead."""
        model = make_model()
        prompt = prompt_of(5)
        cache = make_cache(model, KVCache, 40)
        assert (
            tokens_of(model, prompt, SamplingParams(max_new_tokens=count), cache=cache)
            == plainly(model, prompt)[:count]
        )
        assert launches == [1] * count
        assert cache.seq_len == 5 + count - 1

    def test_of_a_prompt_that_is_one_token(self, make_model: MakeModel) -> None:
        model = make_model("gemma3")
        assert tokens_of(model, [7]) == plainly(model, [7])

    def test_weights_may_change(self, make_model: MakeModel) -> None:
        """In place, where a captured step reads them; or to another place."""
        model, other = make_model(), make_model(seed=1)
        prompt = prompt_of(9)
        before, expected = tokens_of(model, prompt), tokens_of(other, prompt)
        assert before != expected
        saved = copy.deepcopy(model.state_dict())
        model.load_state_dict(other.state_dict())
        assert tokens_of(model, prompt) == expected
        model.load_state_dict(saved, assign=True)
        assert tokens_of(model, prompt) == before


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drafts are verified whatever they cost. Returns the width of each step that does."""
    widths: list[int] = []
    verify = captured.CapturedStep.verify

    def counted(step: captured.CapturedStep, width: int, drafts: Any) -> Tensor:
        widths.append(width)
        return verify(step, width, drafts)

    monkeypatch.setattr(captured.CapturedStep, "verify", counted)
    monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
    return widths


def drafts_of(texts: Collection[Collection[int]], right: float) -> Callable[[Sequence, int], list[int]]:
    """Proposes what a known text says next, each token right with this chance."""
    chance, known = random.Random(1), [[*text] for text in texts]

    def propose(sequence: Sequence, count: int) -> list[int]:
        text = next(text for text in known if text[: sequence.prompt_len] == sequence.prompt)
        ahead = text[sequence.num_tokens :][: chance.randint(1, count)]
        return [token if chance.random() < right else (token + 1) % VOCAB for token in ahead]

    return propose


class TestDrafts:
    """Texts and log-probabilities are those without drafts."""

    @pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED, FREE], ids=["greedy", "top", "penalty", "all"])
    @pytest.mark.parametrize(
        ("family", "dtype", "head_dim"),
        [*((each, torch.float32, 24) for each in FAMILIES), ("llama", torch.bfloat16, 64)],
        ids=str,
    )
    def test_of_every_family(
        self,
        make_model: MakeModel,
        verified: list[int],
        family: str,
        dtype: torch.dtype,
        head_dim: int,
        params: SamplingParams,
    ) -> None:
        model = make_model(family, dtype, head_dim=head_dim)
        params = replace(params, max_new_tokens=60, logprobs=3, ignore_eos=True)
        prompts = [prompt_of(length, seed=1) for length in (67, 5, 130)]
        expected = generate_batch(model, Letters(), prompts, params)
        texts = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, expected, strict=True)]
        for right in (0.0, 0.7, 1.0):
            with LLM(model, Letters(), speculate=drafts_of(texts, right), cache_memory=10**8) as llm:
                results = llm.generate(prompts, params)
            for result, each in zip(results, expected, strict=True):
                assert result.token_ids == each.token_ids
                assert result.logprobs == each.logprobs
            drafted, accepted = (sum(getattr(each, name) for each in results) for name in ("drafted", "accepted"))
            assert accepted <= right * drafted + 0.2 * drafted
            assert drafted > 20
        assert set(verified) >= {5, 9}

    @EVERY_CACHE
    def test_in_every_cache(self, make_model: MakeModel, verified: list[int], kind: str) -> None:
        """A tight ring can take few drafts back, and gets no more."""
        family, cls, options = CACHES[kind]
        model = make_model(family, torch.bfloat16, head_dim=64)
        params = SamplingParams(max_new_tokens=200, ignore_eos=True)
        prompt = prompt_of(40)
        text = [*prompt, *tokens_of(model, prompt, params)]
        cache = make_cache(model, cls, 256, **options)
        got = generate(model, Letters(), prompt, params, cache=cache, speculate=drafts_of([text], 0.8))
        assert [*prompt, *got.token_ids] == text
        assert cache.seq_len == len(text) - 1
        assert max(verified) == (9 if kind != "tight ring" else 2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_of_many_rows(self, make_model: MakeModel, verified: list[int], dtype: torch.dtype) -> None:
        """They come and go; keys of long and short rows; more drafts than a step takes are left out."""
        model = make_model("llama", dtype, head_dim=64)
        prompts = [prompt_of(1 + 53 * i % 700, seed=i) for i in range(70)]
        params = [
            SamplingParams(max_new_tokens=5 + 7 * i % 40, temperature=i % 3 * 0.6, seed=i, ignore_eos=True)
            for i in range(70)
        ]
        expected = [each.token_ids for each in generate_batch(model, Letters(), prompts, params)]
        texts = [[*prompt, *each] for prompt, each in zip(prompts, expected, strict=True)]
        with LLM(model, Letters(), speculate=drafts_of(texts, 0.8), cache_memory=10**9) as llm:
            assert [each.token_ids for each in llm.generate(prompts, params)] == expected
        assert set(verified) == {2, 3, 5, 9}

    @pytest.mark.parametrize("seed", [0, 1])
    def test_of_a_draft_model(self, make_model: MakeModel, verified: list[int], seed: int) -> None:
        """The same model is always right, another hardly ever; its own steps are captured, too."""
        model, other = (make_model("llama", torch.bfloat16, head_dim=64, seed=each) for each in (0, seed))
        prompts = [prompt_of(length, seed=1) for length in (67, 5, 130)]
        params = SamplingParams(max_new_tokens=60, ignore_eos=True)
        expected = [each.token_ids for each in generate_batch(model, Letters(), prompts, params)]
        drafter = ModelDrafter(other)
        with mock.patch.object(drafters, "SURE", 0.0), LLM(model, Letters(), speculate=drafter) as llm:
            results = llm.generate(prompts, params)
        assert [each.token_ids for each in results] == expected
        drafted, accepted = (sum(getattr(each, name) for each in results) for name in ("drafted", "accepted"))
        assert accepted > 0.9 * drafted > 50 if seed == 0 else accepted < 0.5 * drafted
        assert verified
        with torch.inference_mode():
            assert backend_for(other)._steps._steps  # type: ignore[attr-defined]

    def test_launched_kernel_by_kernel(self, make_model: MakeModel, verified: list[int]) -> None:
        model = make_model("qwen3", torch.bfloat16)
        text = [*prompt_of(9), *tokens_of(model, prompt_of(9), FREE)]
        with captured.disabled():
            got = tokens_of(model, prompt_of(9), FREE, speculate=drafts_of([text], 0.8))
        assert [*prompt_of(9), *got] == text
        assert verified

    def test_with_a_grammar(self, make_model: MakeModel, verified: list[int]) -> None:
        """The host chooses: a pass verifies what the grammar forces."""
        pytest.importorskip("llguidance")
        model, tokenizer = make_model(vocab_size=256), MockTokenizer([chr(i) for i in range(256)])
        params = SamplingParams(max_new_tokens=60, regex="(a long and boring text[123] ){2}")
        expected = generate(model, tokenizer, prompt_of(9), params)
        got = generate(model, tokenizer, prompt_of(9), params, speculate="ngram")
        assert got.text == expected.text
        assert got.accepted > 20
        assert not verified


BATCH_LENGTHS = [1, 2, 130, 64, 7, 300, 65, 3, 20]
BATCH_PARAMS = [
    SamplingParams(max_new_tokens=40),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=2),
    replace(SAMPLED, max_new_tokens=33),
    replace(PENALIZED, max_new_tokens=21),
    replace(FREE, max_new_tokens=9),
    replace(SAMPLED, seed=18),
    replace(FREE, seed=4, repetition_penalty=1.5),
    replace(GREEDY, logit_bias={9: 4.0}, frequency_penalty=2.0),
]


class TestBatches:
    @EVERY_FAMILY
    @pytest.mark.parametrize("count", [2, 5, 9])
    def test_rows_are_what_each_prompt_gives_alone(
        self, make_model: MakeModel, family: str, count: int, launches: list[int]
    ) -> None:
        model = make_model(family)
        prompts, params = [prompt_of(n) for n in BATCH_LENGTHS[:count]], BATCH_PARAMS[:count]
        results = in_every_way(lambda: [r.token_ids for r in generate_batch(model, Letters(), prompts, params)])
        assert results["captured"] == results["launched"] == results["plain"]
        assert launches
        for got, prompt, each in zip(results["captured"], prompts, params, strict=True):
            assert len(got) == each.max_new_tokens
            assert got == tokens_of(model, prompt, each)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_rows_end_early(self, make_model: MakeModel, family: str) -> None:
        """By an end-of-sequence token, by a stop string, and not at all; the others go on."""
        model = make_model(family)
        varied = replace(FREE, temperature=2.0)
        prompts = [prompt_of(n) for n in (5, 66, 12, 140, 3)]
        free = [plainly(model, prompt, varied) for prompt in prompts]
        # A token that some row comes to, but not at once, and not every row.
        eos = next(token for token in free[0][6:] if token not in free[0][:6] and token not in free[1])
        model.config = replace(model.config, eos_token_ids=(eos,))
        stop = Letters().decode(free[1][8:11])
        params = [varied, replace(varied, stop=stop), replace(varied, ignore_eos=True), *[varied] * 2]
        results = in_every_way(lambda: generate_batch(model, Letters(), prompts, params))
        outcomes = {way: [(r.token_ids, r.text, r.finish_reason) for r in of_way] for way, of_way in results.items()}
        assert outcomes["captured"] == outcomes["launched"] == outcomes["plain"]
        assert [reason for *_, reason in outcomes["captured"]][:3] == ["eos", "stop", "length"]
        for got, prompt, each in zip(results["captured"], prompts, params, strict=True):
            assert got.token_ids == tokens_of(model, prompt, each)

    def test_the_same_prompt_twice_with_other_seeds(self, make_model: MakeModel) -> None:
        model = make_model()
        params = [replace(SAMPLED, seed=seed) for seed in (1, 2, 1)]
        first, second, third = (r.token_ids for r in generate_batch(model, Letters(), [prompt_of(8)] * 3, params))
        assert first == third != second

    def test_in_16_bits(self, make_model: MakeModel) -> None:
        model = make_model("gemma3", torch.bfloat16)
        prompts = [prompt_of(n) for n in BATCH_LENGTHS]
        run = lambda: [r.token_ids for r in generate_batch(model, Letters(), prompts, BATCH_PARAMS)]  # noqa: E731
        with captured.disabled():
            expected = run()
        assert run() == expected


class Text:
    """A text to generate, and at which step it is submitted."""

    def __init__(self, at: int, length: int, params: SamplingParams) -> None:
        self.at, self.params = at, params
        self.prompt = prompt_of(length, seed=at)
        self.sequence: Sequence

    def submit(self, engine: Engine) -> None:
        model, positions = engine.model, len(self.prompt) + self.params.max_new_tokens
        assert isinstance(model, Decoder)
        if model.config.has_windows:
            cache = make_cache(model, SlidingCache, positions, prefill_chunk=8)
        else:
            cache = make_cache(model, KVCache, positions)
        self.sequence = Sequence(model.config, Letters(), self.prompt, self.params, cache=cache)
        engine.submit(self.sequence)

    @property
    def tokens(self) -> list[int]:
        return self.sequence.token_ids[len(self.prompt) :]


class TestComingAndGoing:
    """Texts that are submitted one by one while others are generated: each is what its prompt gives alone."""

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(("way", "prefill_chunk"), [("captured", None), ("captured", 20), ("launched", 20)])
    def test_one_by_one(
        self,
        make_model: MakeModel,
        family: str,
        dtype: torch.dtype,
        way: str,
        prefill_chunk: int | None,
        launches: list[int],
    ) -> None:
        """Greedy ones first, then others; in larger steps, then smaller ones; prompts in one pass, or in several."""
        model = make_model(family, dtype)
        texts = [
            Text(0, 5, replace(GREEDY, max_new_tokens=40)),
            Text(3, 130, GREEDY),
            Text(5, 1, replace(GREEDY, max_new_tokens=2)),
            Text(6, 66, SAMPLED),
            Text(6, 7, PENALIZED),
            Text(11, 90, FREE),
            Text(60, 12, SAMPLED),  # after all others have finished
            Text(62, 3, GREEDY),
        ]
        with WAYS[way]():
            self.run(model, texts, prefill_chunk=prefill_chunk)
            assert set(launches) >= {1, 2, 4}
            for text in texts:
                assert len(text.tokens) == text.params.max_new_tokens
                assert text.tokens == tokens_of(model, text.prompt, text.params)

    @staticmethod
    def run(
        model: Decoder,
        texts: Collection[Text],
        aborted: dict[int, Text] | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """aborted: texts by the step before which they are aborted."""
        with Engine(model, prefill_chunk=prefill_chunk) as engine:
            for i in range(200):
                for text in texts:
                    if text.at == i:
                        text.submit(engine)
                if aborted is not None and i in aborted:
                    engine.abort([aborted[i].sequence])
                engine.step()
            assert engine.is_idle

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_one_that_is_aborted(self, make_model: MakeModel, family: str) -> None:
        """While a step of it is launched ahead: the others continue, and another one takes its slot."""
        model = make_model(family, torch.bfloat16)
        texts = [Text(0, 70, SAMPLED), Text(0, 9, SAMPLED), Text(2, 30, GREEDY), Text(8, 4, PENALIZED)]
        self.run(model, texts, aborted={8: texts[1]})
        assert 0 < len(texts[1].tokens) < SAMPLED.max_new_tokens
        for text in texts:
            expected = tokens_of(model, text.prompt, text.params)
            assert text.tokens == (expected[: len(text.tokens)] if text is texts[1] else expected)


class TestLengths:
    BLOCKS = tuple(k * 64 + d for k in (1, 2, 4) for d in (-1, 0, 1))
    WINDOWS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 3 * WINDOW)

    @EVERY_CACHE
    @pytest.mark.parametrize("prefill_chunk", [None, 1, 33])
    def test_across_blocks_and_windows(self, make_model: MakeModel, kind: str, prefill_chunk: int | None) -> None:
        """A step before, at and behind each edge; prompts longer than a window; rings that wrap, then wrap again."""
        family, cache_type, options = CACHES[kind]
        model = make_model(family)
        params = replace(GREEDY, max_new_tokens=4)
        for length in sorted({*self.BLOCKS, *self.WINDOWS} if prefill_chunk is None else self.WINDOWS[1:5:3]):
            prompt = prompt_of(length - 2)
            cache = make_cache(model, cache_type, length + 8, **options)
            got = tokens_of(model, prompt, params, cache=cache, prefill_chunk=prefill_chunk)
            assert got == plainly(model, prompt, params, use_kv_cache=False), length

    @EVERY_CACHE
    def test_through_several_rounds_of_a_ring(self, make_model: MakeModel, kind: str) -> None:
        family, cache_type, options = CACHES[kind]
        model = make_model(family)
        params = replace(SAMPLED, max_new_tokens=4 * WINDOW)
        cache = make_cache(model, cache_type, 5 * WINDOW, **options)
        assert tokens_of(model, prompt_of(9), params, cache=cache) == plainly(model, prompt_of(9), params)

    @pytest.mark.parametrize(
        ("family", "head_dim", "dtype", "tolerance"),
        [
            ("llama", 24, torch.float32, 2e-3),
            ("gemma3", 24, torch.float32, 2e-3),
            ("llama", 64, torch.float16, 0.1),
            ("qwen3", 128, torch.float16, 0.1),
        ],
        ids=str,
    )
    @torch.inference_mode()
    def test_where_groups_grow(
        self, make_model: MakeModel, family: str, head_dim: int, dtype: torch.dtype, tolerance: float
    ) -> None:
        """From one block of keys in each group to two, and on."""
        model = make_model(family, dtype, head_dim=head_dim, max_position_embeddings=16_384)
        edge = attention.GROUPS * attention._shape(4, 2, head_dim, dtype, model.device)["BLOCK"]
        cache = make_cache(model, KVCache, 2 * edge + 64)
        for length in (edge - 1, edge, edge + 1, edge + 2, edge + 700, 2 * edge):
            fed = torch.tensor([prompt_of(length - cache.seq_len)], device="cuda")
            with plain():
                step(model, cache, fed)
            token = torch.tensor([[7]], device="cuda")
            got = step(model, cache, token)
            cache.truncate(length)
            with plain():
                expected = step(model, cache, token)
            cache.truncate(length)
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance / 2)

    @pytest.mark.parametrize(("family", "head_dim"), [("llama", 24), ("gemma3", 24), ("llama", 64), ("qwen3", 128)])
    def test_long_runs_neither_drift_nor_grow(self, make_model: MakeModel, family: str, head_dim: int) -> None:
        model = make_model(family, torch.bfloat16, head_dim=head_dim)
        params = replace(SAMPLED, max_new_tokens=2000)
        prompt = prompt_of(50)
        with captured.disabled():
            expected = tokens_of(model, prompt, params)
        gc.collect()  # or what other tests have left might go meanwhile
        tokens, peaks = [], {}
        for token in stream(model, Letters(), prompt, params):
            tokens.append(token.token_id)
            if len(tokens) in (50, 100, 1990):
                peaks[len(tokens)] = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
        assert peaks[1990] <= peaks[100]  # since the token before
        assert tokens == expected


class TestCaches:
    """What a run leaves in a cache is what the next one needs."""

    @EVERY_CACHE
    @pytest.mark.parametrize("taken", [1, 2, 3, 10, WINDOW + 5])
    def test_a_stream_that_is_abandoned(self, make_model: MakeModel, kind: str, taken: int) -> None:
        family, cache_type, options = CACHES[kind]
        model = make_model(family)
        prompt, params = prompt_of(11), replace(SAMPLED, max_new_tokens=120)
        cache = make_cache(model, cache_type, 256, **options)
        tokens = stream(model, Letters(), prompt, params, cache=cache)
        got = [token.token_id for token in itertools.islice(tokens, taken)]
        tokens.close()  # type: ignore[attr-defined]
        assert got == plainly(model, prompt, params)[:taken]
        assert cache.seq_len == len(prompt) + taken - 1
        then = prompt + got + prompt_of(6)
        assert tokens_of(model, then, SAMPLED, cache=cache) == plainly(model, then, SAMPLED)

    @EVERY_CACHE
    def test_turns_of_a_chat(self, make_model: MakeModel, kind: str) -> None:
        family, cache_type, options = CACHES[kind]
        model = make_model(family)
        cache = make_cache(model, cache_type, 256, **options)
        prompt = prompt_of(20)
        for turn in range(4):
            params = replace(SAMPLED, seed=turn)
            got = tokens_of(model, prompt, params, cache=cache)
            assert got == plainly(model, prompt, params)
            assert cache.seq_len == len(prompt) + len(got) - 1
            # The last of them alone, or more besides: then prefill comes first.
            prompt = prompt + got + prompt_of(turn % 2 * 9)

    @EVERY_CACHE
    def test_truncated(self, make_model: MakeModel, kind: str) -> None:
        family, cache_type, options = CACHES[kind]
        model = make_model(family)
        back = 1 if kind == "tight ring" else 6
        prompt = prompt_of(WINDOW + 30)
        cache = make_cache(model, cache_type, 256, **options)
        first = tokens_of(model, prompt, cache=cache)
        kept = cache.seq_len - back
        cache.truncate(kept)
        begun = [*prompt, *first][: kept + 1]
        assert begun[-1] == first[-back - 1]
        again = tokens_of(model, begun, cache=cache)
        assert again[:back] == first[-back:]
        assert again == plainly(model, begun)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_streams_side_by_side(self, make_model: MakeModel, family: str) -> None:
        """Token by token, of one model: each has a captured step of its own."""
        model = make_model(family)
        cases = [(prompt_of(70), SAMPLED), (prompt_of(3), SAMPLED), (prompt_of(12), PENALIZED), (prompt_of(9), GREEDY)]
        alone = [plainly(model, *case) for case in cases]
        together = zip(*(stream(model, Letters(), *case) for case in cases), strict=True)
        got = [[token.token_id for token in row] for row in zip(*together, strict=True)]
        assert got == alone

    def test_generating_while_a_stream_waits(self, make_model: MakeModel) -> None:
        model = make_model()
        waiting = stream(model, Letters(), prompt_of(5), SAMPLED)
        first = [token.token_id for token in itertools.islice(waiting, 4)]
        assert tokens_of(model, prompt_of(30)) == plainly(model, prompt_of(30))
        prompts = [prompt_of(4), prompt_of(40)]
        rows = generate_batch(model, Letters(), prompts, SAMPLED)
        assert [row.token_ids for row in rows] == [plainly(model, prompt, SAMPLED) for prompt in prompts]
        assert first + [token.token_id for token in waiting] == plainly(model, prompt_of(5), SAMPLED)

    def test_filled_to_the_last_position(self, make_model: MakeModel) -> None:
        model = make_model("gpt2", max_position_embeddings=40)
        prompt = prompt_of(16)
        cache = make_cache(model, KVCache, 40)
        assert tokens_of(model, prompt, cache=cache) == plainly(model, prompt)
        assert cache.seq_len == 39
        with pytest.raises(ValueError, match="exceed"):
            tokens_of(model, prompt, replace(GREEDY, max_new_tokens=25))


class TestFullContext:
    CONTEXT = 40
    # Greedy: plain torch agrees within rounding, and a draw may lie closer than that to where two tokens meet.
    PARAMS = replace(GREEDY, max_new_tokens=30)

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    @pytest.mark.parametrize("positions", [None, 32, 40, 64], ids=str)
    def test_is_recomputed(self, make_model: MakeModel, family: str, positions: int | None) -> None:
        """positions: of a cache that is given; it may have more than the model, and less."""
        model = make_model(family, max_position_embeddings=self.CONTEXT)
        prompt = prompt_of(20)

        def run() -> list[int]:
            cache = None if positions is None else make_cache(model, KVCache, positions)
            return tokens_of(model, prompt, self.PARAMS, cache=cache, on_full="recompute")

        results = in_every_way(run)
        assert results["captured"] == results["launched"] == results["plain"]
        assert len(results["plain"]) == 30

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_is_recomputed_and_sampled(self, make_model: MakeModel, family: str) -> None:
        model, params = make_model(family, max_position_embeddings=self.CONTEXT), replace(SAMPLED, max_new_tokens=30)
        replayed = tokens_of(model, prompt_of(20), params, on_full="recompute")
        with captured.disabled():
            assert replayed == tokens_of(model, prompt_of(20), params, on_full="recompute")

    def test_in_a_batch(self, make_model: MakeModel) -> None:
        model = make_model("gpt2", max_position_embeddings=self.CONTEXT)
        prompts = [prompt_of(n) for n in (39, 4, 50, 20)]

        def run() -> list[list[int]]:
            rows = generate_batch(model, Letters(), prompts, self.PARAMS, on_full="recompute")
            return [row.token_ids for row in rows]

        results = in_every_way(run)
        assert results["captured"] == results["launched"] == results["plain"]


class TestNoNumbers:
    """Where logits are no numbers: an error that says which text it was, and a device that still works."""

    @EVERY_WAY
    @pytest.mark.parametrize("way", ["captured", "launched"])
    def test_of_a_token_fed_later(self, make_model: MakeModel, params: SamplingParams, way: str) -> None:
        model, healthy = make_model(), make_model()
        prompts = [prompt_of(5), prompt_of(30), prompt_of(12)]
        expected = [plainly(healthy, prompt, params) for prompt in prompts]
        at = next(i for i, t in enumerate(expected[1]) if i > 2 and t not in [*prompts[1], *expected[1][:i]])
        poison = expected[1][at]
        model.embed_tokens.weight.data[poison] = torch.nan
        with WAYS[way]():
            with pytest.raises(ValueError, match=rf"position {30 + at + 1}\b") as error:
                tokens_of(model, prompts[1], params)
            assert "NaN" in str(error.value)
            others = [p for p, tokens in zip(prompts, expected, strict=True) if poison not in [*p, *tokens]]
            with pytest.raises(ValueError, match=rf"prompt {len(others)}: .*position {30 + at + 1}\b"):
                generate_batch(model, Letters(), [*others, prompts[1]], params)
            for prompt in others:  # the model's other tokens are healthy
                assert tokens_of(model, prompt, params) == plainly(healthy, prompt, params)
            assert [tokens_of(healthy, prompt, params) for prompt in prompts] == expected
        torch.cuda.synchronize()

    def test_from_the_start(self, make_model: MakeModel) -> None:
        model = make_model()
        model.layers[1].mlp.down_proj.weight.data.fill_(torch.nan)
        with pytest.raises(ValueError, match=r"prompt 0: .*position 6\b"):
            generate_batch(model, Letters(), [prompt_of(6), prompt_of(3)], GREEDY)
        torch.cuda.synchronize()
        assert tokens_of(make_model(), prompt_of(6)) == plainly(make_model(), prompt_of(6))


class CountingCache(KVCache):
    """A user's own."""

    attended = 0

    def attend(self, *args: Any, **options: Any) -> Tensor:
        self.attended += 1
        return super().attend(*args, **options)


class TestFallingBack:
    """What the kernels cannot know of runs, through the modules, and gives the same tokens."""

    PROMPT = prompt_of(9)

    @pytest.fixture
    def model(self, make_model: MakeModel, launches: list[int]) -> Iterator[Decoder]:
        """It runs in captured steps before and after, and not while the test does."""
        model = make_model()
        expected = tokens_of(model, self.PROMPT)
        assert len(launches) == GREEDY.max_new_tokens
        launches.clear()
        yield model
        assert not launches
        assert tokens_of(model, self.PROMPT) == expected
        assert len(launches) == GREEDY.max_new_tokens

    def check(self, model: Decoder, **options: Any) -> None:
        assert tokens_of(model, self.PROMPT, **options) == plainly(model, self.PROMPT)

    @pytest.mark.parametrize("name", ["", "embed_tokens", "layers.1", "layers.0.mlp.down_proj", "norm", "lm_head"])
    def test_hooks(self, model: Decoder, name: str) -> None:
        seen: list[Tensor] = []
        hook = model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out))
        got = tokens_of(model, self.PROMPT)
        calls = len(seen)
        hook.remove()
        assert calls == GREEDY.max_new_tokens
        assert got == plainly(model, self.PROMPT)

    def test_a_hook_that_changes_something(self, model: Decoder) -> None:
        before = plainly(model, self.PROMPT)
        hook = model.layers[1].register_forward_hook(lambda module, args, out: out * -3)
        got, expected = tokens_of(model, self.PROMPT), plainly(model, self.PROMPT)
        hook.remove()
        assert got == expected != before

    def test_a_patched_module(self, model: Decoder) -> None:
        mlp = model.layers[0].mlp
        mlp.forward = mock.Mock(wraps=mlp.forward)
        self.check(model)
        assert mlp.forward.call_count == 2 * GREEDY.max_new_tokens
        del mlp.forward

    def test_a_patched_class(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = RMSNorm.forward
        before = plainly(model, self.PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(RMSNorm, "forward", lambda norm, x: forward(norm, x) * 0.5)
            self.check(model)
            assert tokens_of(model, self.PROMPT) != before

    def test_a_patched_embedding(self, model: Decoder) -> None:
        model.embed = mock.Mock(wraps=model.embed)  # type: ignore[method-assign]
        self.check(model)
        assert model.embed.call_count == 2 * GREEDY.max_new_tokens
        del model.embed

    def test_a_cache_of_another_class(self, model: Decoder) -> None:
        cache = make_cache(model, CountingCache, 64)
        self.check(model, cache=cache)
        assert cache.attended == GREEDY.max_new_tokens * model.config.num_hidden_layers

    def test_a_cache_that_rounds(self, model: Decoder) -> None:
        got = tokens_of(model, self.PROMPT, cache_dtype="int8")
        assert got == plainly(model, self.PROMPT, cache_dtype="int8")

    def test_a_trace(self, model: Decoder) -> None:
        trace = Trace()
        self.check(model, trace=trace)
        assert [step.cache_positions for step in trace.steps] == list(range(9, 9 + GREEDY.max_new_tokens))
        assert all(len(step.attention) == model.config.num_hidden_layers for step in trace.steps)

    def test_gradients(self, model: Decoder) -> None:
        """Where torch is to record them, nothing may run that it does not see."""
        model.requires_grad_(True)
        backend = backend_for(model)
        assert (backend.name, backend.reason) == ("torch", "gradients are recorded")
        [logits] = backend.run([Row(NoCache(1, "cuda"), self.PROMPT[:1], ALL)])
        logits.sum().backward()
        assert model.layers[0].mlp.down_proj.weight.grad is not None
        model.requires_grad_(False)


def sensitive(rows: int, n: int, k: int) -> tuple[Tensor, Linear]:
    """Vectors and a matrix whose product is another one in any other order of the sums."""
    return device_check.sensitive(rows, n, k, 1, torch.empty(0, dtype=torch.bfloat16, device="cuda"))


def same(got: Tensor, expected: Tensor) -> None:
    """The very same bits, but for the sign of a zero; and numbers."""
    assert not expected.isnan().any()
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


class TestWhatIsTakenForGranted:
    """By the kernels, of the device: that matrix instructions of all sizes add up alike, and torch's products too."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @torch.inference_mode()
    def test_instructions_agree(self, dtype: torch.dtype) -> None:
        """If not, few rows are slower, and as exact: then this test is what tells."""
        assert gemm.compare_instructions(torch.device("cuda", 0), dtype)

    @pytest.mark.parametrize("agree", [True, False], ids=["", "as if they did not"])
    @torch.inference_mode()
    def test_products(self, agree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the device's answers, rows get the same bits."""
        if not agree:
            monkeypatch.setattr(device_check, "instructions_agree", lambda *_: False)
            monkeypatch.setattr(device_check, "torch_agrees", lambda *_: False)
        for n, k, slices in ((1024, 2048, 1), (1024, 2048, 4), (211, 64, 1), (50257, 768, 1)):
            x, linear = sensitive(300, n, k)
            linear.slices = slices
            many, _ = gemm.gemm(linear, gemm.GemmInput(x), None)
            for count in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129):
                got, _ = gemm.gemm(linear, gemm.GemmInput(x[:count].contiguous()), None)
                same(got, many[:count])

    @torch.inference_mode()
    def test_another_order_shows(self) -> None:
        """In nearly every number: a check with these notices."""
        vectors, linear = sensitive(128, 1024, 2048)
        x = gemm.GemmInput(vectors)
        one, _ = gemm.gemm(linear, x, None)
        linear.slices = 4
        assert (gemm.gemm(linear, x, None)[0] != one).float().mean() > 0.5


CHUNKS = (1, 2, 8, 9, 16, 17, 64, 128, 129, 256, 257, 512)
BATCHES = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256)
RAGGED = (  # how many tokens of each of eight rows are in each pass
    (1, 200, 3, 63, 128, 0, 1, 2),
    (0, 1, 0, 1, 1, 7, 1, 0),  # few in all
    (0, 1, 0, 0, 0, 1, 1, 0),  # a step
    (0, 498, 0, 0, 0, 32, 297, 0),
    (0, 1, 0, 0, 5, 0, 1, 0),
)


@pytest.mark.parametrize(
    ("family", "head_dim", "dtype"),
    [
        ("llama", 64, torch.bfloat16),
        ("qwen3", 128, torch.bfloat16),
        ("gemma3", 256, torch.bfloat16),
        ("llama", 64, torch.float16),
        ("qwen3", 128, torch.float32),
    ],
    ids=str,
)
class TestSameBits:
    """Of a token's logits, in one pass over 700 tokens, in chunks, and in steps beside others."""

    POSITIONS = 700

    @pytest.fixture
    def model(self, tiny_model: MakeModel, family: str, head_dim: int, dtype: torch.dtype) -> Decoder:
        sizes = SIZES | {
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_attention_heads": 8,
            "num_hidden_layers": 3,
            "head_dim": head_dim,
        }
        own = {"sliding_window": 100} if family == "gemma3" else {}
        model = tiny_model(model_type=family, **sizes | own)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data *= 0.2  # of 0.3: else attention is to a single token
        model = model.to("cuda", dtype)
        self.compile(model)
        return model

    @torch.inference_mode()
    def compile(self, model: Decoder) -> None:
        """What is launched below, in threads: one by one, it would take minutes."""
        backend = backend_for(model)
        assert isinstance(backend, gpu_backend.GpuBackend)

        def walk() -> None:
            for rows in ROWS_COMPILED:
                captured.CapturedStep(model.config, backend.plan, model.device, rows, rows == 1).run()
            for n in (1, 2, 16, 32, 64, 128, 256):
                all_logits(model, NoCache(1, "cuda"), torch.zeros(1, n, dtype=torch.int64, device="cuda"))

        compile_ahead(model.device, walk)

    @torch.inference_mode()
    def test_of_a_pass(self, model: Decoder) -> None:
        tokens = torch.tensor([prompt_of(self.POSITIONS)], device="cuda")
        whole = all_logits(model, NoCache(1, "cuda"), tokens)[0]
        for size in CHUNKS:
            count = self.POSITIONS if size > 8 else 200
            for kind in (KVCache, PagedCache):
                cache = make_cache(model, kind, self.POSITIONS)
                parts = [all_logits(model, cache, each)[0] for each in tokens[:, :count].split(size, 1)]
                same(torch.cat(parts), whole[:count])
        lengths = [1 + i * 37 % 600 for i in range(max(BATCHES))]
        caches = []
        for length in lengths:
            caches.append(make_cache(model, KVCache, length + 1))
            step(model, caches[-1], tokens[:, :length])
        for rows in BATCHES:
            fed = [Row(cache, tokens[:, n : n + 1]) for cache, n in zip(caches[:rows], lengths, strict=False)]
            same(torch.cat(backend_for(model).run(fed))[:, 0], whole[lengths[:rows]])
            for cache, length in zip(caches[:rows], lengths, strict=False):
                cache.truncate(length)

    @pytest.mark.parametrize("kind", [KVCache, SlidingCache, PagedCache])
    @torch.inference_mode()
    def test_of_ragged_passes(self, model: Decoder, kind: type[BaseCache]) -> None:
        """Prompts of different lengths, pieces of others, and single tokens, all in one pass; rows come and go."""
        prompts = [prompt_of(sum(sizes), seed=i) for i, sizes in enumerate(zip(*RAGGED, strict=True))]
        alone = [all_logits(model, NoCache(1, "cuda"), torch.tensor([ids], device="cuda"))[0] for ids in prompts]
        options = {"prefill_chunk": 512} if kind is SlidingCache else {}
        caches: list[Any] = [
            make_cache(model, kind, len(ids) + 2, **options) if i % 3 < 2 else make_cache(model, KVCache, len(ids) + i)
            for i, ids in enumerate(prompts)
        ]
        for sizes in RAGGED:
            taking_part = [i for i, size in enumerate(sizes) if size]
            spans = [slice(caches[i].seq_len, caches[i].seq_len + sizes[i]) for i in taking_part]
            rows = [Row(caches[i], prompts[i][span], ALL) for i, span in zip(taking_part, spans, strict=True)]
            for got, i, span in zip(backend_for(model).run(rows), taking_part, spans, strict=True):
                same(got[0], alone[i][span])
        assert [cache.seq_len for cache in caches] == [len(ids) for ids in prompts]

    def test_of_a_text(self, model: Decoder) -> None:
        """Sampled: captured, launched kernel by kernel, without a cache, in chunks, traced, and in a batch."""
        params = SamplingParams(max_new_tokens=20, temperature=1.1, seed=5)
        prompts = [prompt_of(n, seed=n) for n in (9, 150, 1)]

        def alone(**options: Any) -> list[list[int]]:
            return [tokens_of(model, prompt, params, **options) for prompt in prompts]

        expected = alone(use_kv_cache=False)
        assert len(set(expected[0])) > 3
        assert alone() == expected
        assert alone(prefill_chunk=4) == expected
        assert [row.token_ids for row in generate_batch(model, Letters(), prompts, params)] == expected
        assert tokens_of(model, prompts[1], params, trace=Trace()) == expected[1]
        with captured.disabled():
            assert alone() == expected


@torch.inference_mode()
def test_a_ring_has_the_same_bits(make_model: MakeModel) -> None:
    model = make_model("gemma3", torch.bfloat16)
    tokens = torch.tensor([prompt_of(3 * WINDOW)], device="cuda")
    whole = all_logits(model, NoCache(1, "cuda"), tokens)
    for size in (1, 7, 64):
        for chunk in {size, 3}:  # a pass may be wider than the ring was made for
            cache = make_cache(model, SlidingCache, 256, prefill_chunk=chunk)
            parts = [all_logits(model, cache, each) for each in tokens.split(size, 1)]
            same(torch.cat(parts, 1), whole)


class TestPages:
    """Caches in pages of one memory, whose lists grow while captured steps run."""

    @EVERY_FAMILY
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_however_a_cache_came_to_its_pages(self, make_model: MakeModel, family: str, dtype: torch.dtype) -> None:
        """Prefix hits, eviction, forks, a file: the bits of one pass without a cache. A page has 64 positions."""
        model = make_model(family, dtype)
        comparison = Comparison(model, Letters(), [prompt_of(150), prompt_of(64, seed=1), prompt_of(65, seed=2)], 8)
        found = [path.check(path.name) for path in comparison.paths if path.name.startswith("PagedCache")]
        assert len(found) >= 8
        assert [result for result in found if not result.equal] == []

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_a_batch_shares_its_beginning(self, make_model: MakeModel, family: str) -> None:
        """Rows that go on beyond several pages, some sampled; all at once, and with room for two at a time."""
        model = make_model(family, torch.bfloat16)
        common = prompt_of(130)
        prompts = [[*common, *prompt_of(n, seed=n)] for n in (1, 30, 62, 63, 64)] + [common]
        params = [SamplingParams(max_new_tokens=90, temperature=0.9 * (i % 2), seed=i) for i in range(len(prompts))]
        expected = [tokens_of(model, ids, each) for ids, each in zip(prompts, params, strict=True)]
        for rows in (len(prompts), 2):
            memory = CacheMemory(model, (rows + 1) * bytes_for(model.config, 320, 2))
            results = generate_batch(model, Letters(), prompts, params, memory=memory)
            assert [result.token_ids for result in results] == expected
            memory.index.check()
            memory.index.clear()
            assert memory.pool.num_free_pages == memory.pool.num_pages

    def test_a_session(self, make_model: MakeModel, tmp_path: Path) -> None:
        """Forked, rewound, saved and loaded: the answers of fresh runs."""
        model = make_model("gemma3", torch.bfloat16)
        params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)

        def encode(messages: list[dict[str, str]]) -> list[int]:
            return [ord(letter) % VOCAB for message in messages for letter in f"{message['content']}/"] + [7]

        def fresh(session: Session, text: str) -> list[int]:
            prompt = encode([*session.messages, {"role": "user", "content": text}])
            return tokens_of(model, prompt, params, use_kv_cache=False)

        llm, other = (LLM(model, Letters(), cache_memory=40 * bytes_for(model.config, 600, 2)) for _ in range(2))
        session = llm.session(params=params, context=600, encode=encode)
        for text in ("a question of some length, so that pages fill", "and another"):
            expected = fresh(session, text)
            assert session.send(text).token_ids == expected
        twin, asked = session.fork(), fresh(session, "why?")
        session.save(tmp_path / "a")
        assert twin.send("something else altogether").token_ids == fresh(session, "something else altogether")
        assert session.send("why?").token_ids == asked
        loaded = other.load_session(tmp_path / "a", encode=encode)
        assert len(loaded.tokens) > 100
        assert loaded.send("why?").token_ids == asked
        session.rewind(2)
        expected = fresh(session, "and another")
        assert session.send("and another").token_ids == expected


class TestCapturedPasses:
    """Prompts that go through captured passes, in chunks of any lengths."""

    @EVERY_FAMILY
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @torch.inference_mode()
    def test_fill_caches_alike(self, make_model: MakeModel, family: str, dtype: torch.dtype) -> None:
        model = make_model(family, dtype)
        found = backend_for(model)
        assert isinstance(found, gpu_backend.GpuBackend)
        memory = CacheMemory(model, 40 * bytes_for(model.config, 3000, dtype.itemsize))
        lengths = [[300, 64, 1], [40, 1, 500], [2100, 200, 63], [41, 2, 501], [1, 70, 2]]
        for _ in range(3):  # at first, sizes are not captured
            caches = [memory.cache(3000) for _ in range(6)]
            for i, counts in enumerate(lengths):
                pieces = [prompt_of(n, seed=i) for n in counts]
                found.run([Row(cache, ids, NONE) for cache, ids in zip(caches[:3], pieces, strict=True)])
                with captured.disabled():
                    found.run([Row(cache, ids, NONE) for cache, ids in zip(caches[3:], pieces, strict=True)])
            logits = found.run([Row(cache, [7], LAST) for cache in caches])
            for got, expected in zip(logits[:3], logits[3:], strict=True):
                same(got, expected)
            for cache in caches:
                cache.reset()
        assert len(found.passes._passes) >= 3

    @EVERY_FAMILY
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_beside_steps(
        self, make_model: MakeModel, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Prompts in one pass with sequences that decode: every text is that of passes and steps apart."""
        model = make_model(family, dtype)
        prompts = [prompt_of(n, seed=i) for i, n in enumerate((300, 64, 1, 40, 500, 1100, 17, 33, 200, 900))]
        params = [SamplingParams(max_new_tokens=4 + 3 * i, temperature=1.0, seed=i) for i in range(len(prompts))]

        def texts(chunk: int | None = None) -> list[list[int]]:
            memory = CacheMemory(model, 60 * bytes_for(model.config, 1200, dtype.itemsize))
            results = generate_batch(model, Letters(), prompts, params, memory=memory, prefill_chunk=chunk)
            return [result.token_ids for result in results]

        with monkeypatch.context() as patch:
            patch.setattr(gpu_backend.GpuBackend, "run_beside", lambda *_: False)
            patch.setattr(gpu_backend.GpuBackend, "_run_captured", lambda *_: None)
            expected = texts()
        monkeypatch.setattr(gpu_prompts, "MIN_USES", 1)
        for chunk in (None, 256, None):
            assert texts(chunk) == expected
        found = backend_for(model)
        assert isinstance(found, gpu_backend.GpuBackend)
        assert sum(len(step.passes) for step in found.captured._steps) > 3

    @pytest.mark.parametrize(("heads", "head_dim"), [(8, 64), (16, 128)])
    def test_256_ragged_requests(self, make_model: MakeModel, heads: int, head_dim: int) -> None:
        """Each as it is alone: sampled or not, with stop strings and log-probabilities, at any load."""
        sizes = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": head_dim}
        model = make_model("qwen3", torch.bfloat16, hidden_size=256, intermediate_size=512, **sizes)
        rng = random.Random(head_dim)
        prompts = [prompt_of(rng.randint(1, 400), seed=i) for i in range(256)]
        params = [
            SamplingParams(
                max_new_tokens=rng.randint(1, 60),
                temperature=rng.choice((0.0, 0.7, 1.3)),
                top_k=rng.choice((None, 20)),
                top_p=rng.choice((1.0, 0.9)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
                stop=rng.choice(((), (), ("ab",))),
                logprobs=2 if i % 50 == 0 else None,
                seed=i,
            )
            for i in range(256)
        ]
        expected = [generate(model, Letters(), *each) for each in zip(prompts, params, strict=True)]
        for pages in (4000, 160):  # room for all, and for a few at a time
            memory = CacheMemory(model, pages * bytes_for(model.config, 64, 2))
            with LLM(model, Letters(), memory=memory) as llm:
                results = llm.generate(prompts, params)
            for got, alone in zip(results, expected, strict=True):
                assert (got.token_ids, got.text, got.logprobs) == (alone.token_ids, alone.text, alone.logprobs)
            memory.index.check()
            memory.index.clear()
            assert memory.pool.num_free_pages == memory.pool.num_pages


def test_constrained_rows_among_others(make_model: MakeModel) -> None:
    """Each as it is alone, and only what its constraint allows."""
    pytest.importorskip("llguidance", reason="constraints need llguidance")
    model = make_model("qwen3", torch.bfloat16)
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer._backend, tokenizer._single = character_tokenizer({chr(i): i - 32 for i in range(32, 127)}), {}
    regexes = [r"[ab]{5,30}", None, r"(x[0-9]+,){3}", None, r"\{.{9,20}\}"]
    prompts = [prompt_of(5 + 9 * i, seed=i) for i in range(40)]
    params = [
        SamplingParams(
            max_new_tokens=48,
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
            regex=regexes[i % 5],
            logprobs=(None, 2)[i % 3 == 0],
        )
        for i in range(40)
    ]
    expected = [generate(model, tokenizer, *each) for each in zip(prompts, params, strict=True)]
    with LLM(model, tokenizer, cache_memory=200 * bytes_for(model.config, 64, 2)) as llm:
        results = llm.generate(prompts, params)
    for got, alone, own in zip(results, expected, params, strict=True):
        assert (got.token_ids, got.text, got.logprobs) == (alone.token_ids, alone.text, alone.logprobs)
        if own.regex is not None and got.finish_reason != "length":
            assert re.fullmatch(own.regex, got.text)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_quantised_weights_are_refused(quantize: str) -> None:
    with pytest.raises(ValueError, match="on the CPU only"):
        load_model("anything", device="cuda", quantize=quantize)


def run_alone(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with Letters and tests/tiny.py at hand."""
    root = Path(__file__).parents[2]
    paths = [str(root / "src"), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    letters = """
class Letters:
    def decode(self, token_ids):
        return ""
"""
    return subprocess.run(
        [sys.executable, "-c", letters + program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("family", "head_dim", "dtype"), [("qwen3", 24, "bfloat16"), ("qwen3", 128, "bfloat16"), ("gemma3", 24, "float32")]
)
def test_nothing_is_compiled_later(family: str, head_dim: int, dtype: str, tmp_path: Path) -> None:
    """On a machine that has compiled nothing yet: after one text, steps of any rows and settings find it all."""
    sizes = SIZES | {"model_type": family} | OWN.get(family, {}) | {"head_dim": head_dim}
    program = f"""
import os, torch, triton
from tiny import make_tiny_model
from infer import SamplingParams, generate, generate_batch

model = make_tiny_model(**{sizes!r}).to("cuda", torch.{dtype})
generate(model, Letters(), [1, 2, 3], SamplingParams(max_new_tokens=4))
there = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
late = set()
triton.knobs.compilation.listener = lambda *, src, **_: late.add(src.name)
sampled = dict(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias={{5: 1.0}}, seed=3)
generate(model, Letters(), [4, 5, 6], SamplingParams(max_new_tokens=4, **sampled))
for count in (1, 2, 5, 8, 16, 20, 40, 70, 128):
    prompts = [[1 + i % 7] for i in range(count)]
    generate_batch(model, Letters(), prompts, SamplingParams(max_new_tokens=4))
    if count < 8:
        generate_batch(model, Letters(), prompts, SamplingParams(max_new_tokens=4, **sampled))
print(sorted(late), set(os.listdir(os.environ["TRITON_CACHE_DIR"])) - there)
"""
    done = run_alone(program, TRITON_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "[] set()\n")
    assert done.stderr.splitlines() == ["compiling kernels for this GPU: seconds, once for each kind of model"]


def test_without_kernels(make_model: MakeModel) -> None:
    """INFER_KERNELS=0: plain torch, without a word about it."""
    sizes = SIZES | {"model_type": "gemma3"} | OWN["gemma3"]
    program = f"""
import torch
from tiny import make_tiny_model
from infer import SamplingParams, generate
from infer.backend import backend_for

model = make_tiny_model(**{sizes!r}).to("cuda")
with torch.inference_mode():
    backend = backend_for(model)
    assert (backend.name, "INFER_KERNELS=0" in backend.reason) == ("torch", True)
print(*generate(model, Letters(), {prompt_of(80)!r}, SamplingParams(max_new_tokens=12)).token_ids)
"""
    done = run_alone(program, INFER_KERNELS="0")
    assert (done.returncode, done.stderr) == (0, "")
    expected = plainly(make_model("gemma3"), prompt_of(80), SamplingParams(max_new_tokens=12))
    assert done.stdout.split() == list(map(str, expected))


@pytest.mark.parametrize("vocab", [128_256, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_and_device_draw_the_same(vocab: int, dtype: torch.dtype) -> None:
    """The device's sampler against the host's, token for token: over settings, seeds, positions and a growing text."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 1.5},
        {"top_k": 50},
        {"top_k": 5000, "top_p": 0.8, "min_p": 0.001},
        {"min_p": 0.02, "temperature": 1.3},
        {"temperature": 1e-3},
        {"temperature": 50.0},
        {"top_p": 0.97, "repetition_penalty": 1.3, "presence_penalty": 0.1, "frequency_penalty": 0.7},
        {"top_k": 100, "presence_penalty": -1.1, "logit_bias": {0: 4.0, 7: float("-inf"), 99_990: 5.5}},
        {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    ]
    rows, steps, prompt_len = 4 * len(settings), 12, 3
    params = [SamplingParams(**({"temperature": 1.0} | settings[row % len(settings)])) for row in range(rows)]
    # Of different lengths; of tokens with these counts, fused penalties would have other bits.
    texts = [[1, 2, 3] + [0] * 3 + [1] * 5 + [2] * 7 + [9] * (row % 5) for row in range(rows)]
    sampler = DeviceSampler(rows, vocab, "cuda")
    for row, own in enumerate(params):
        sampler.set_rows([row], [own.packed(row, vocab)], [texts[row]], [prompt_len])
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    host_tokens = torch.zeros(1, rows, dtype=torch.int64, device="cuda")
    for turn in range(steps):
        logits = torch.randn(rows, vocab, generator=generator, device="cuda").mul(1 + turn % 4).to(dtype)
        positions = torch.tensor([len(text) for text in texts], dtype=torch.int32, device="cuda")
        sampler.launch(logits, positions, tokens, host_tokens, torch.zeros(1, dtype=torch.int32, device="cuda"))
        on_host, chosen, kept = logits.cpu(), tokens.tolist(), sampler._buffers[len(logits)].weights.sum(1).tolist()
        for row, (own, text, param) in enumerate(zip(on_host, texts, params, strict=True)):
            assert chosen[row] == sample(own, text, prompt_len, param, row), (row, turn)
            if param.temperature > 0:
                columns = param.packed(row, vocab).columns
                _, mass = weights(penalize(own.float().numpy(), text, prompt_len, param), columns)
                assert kept[row] == int(mass.sum()), (row, turn)
            text.append(chosen[row])
