"""Captured passes of prompts: caches are filled as by a pass that is launched kernel by kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amount import amount
from interpreted import hurried, matrix_units, poison
from mocks import Letters
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from infer import CacheMemory, KVCache, SamplingParams, generate_batch
from infer import backend as infer_backend
from infer.backend.gpu import attention, captured, gemm, prompts, step
from infer.backend.gpu import backend as gpu_backend
from infer.backend.gpu.backend import GpuBackend
from infer.backend.gpu.prompts import CapturedPass, Inputs
from infer.backend.parts import parts_of
from infer.cache import Cache
from infer.models.common import Decoder
from infer.models.rows import LAST, NONE, Row

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter; a GPU has tests of its own"
    ),
    # Of rows without a token, which have no slots and no keys.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in fmod:RuntimeWarning"),
]
Make = Callable[..., Decoder]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CapturedPass]:
    """The passes that were captured: launched kernel by kernel again, with what lies in their buffers."""
    found: list[CapturedPass] = []

    def capture(self: CapturedPass, run: Callable[[Inputs], Any], *_: Any) -> None:
        found.append(self)

        def replay() -> None:
            self.output = run(self.inputs)

        self._graph = SimpleNamespace(replay=replay)  # type: ignore[assignment]

    event = SimpleNamespace(record=lambda: None, wait=lambda: None)
    cuda = SimpleNamespace(Event=lambda: event, graph_pool_handle=lambda: 1)
    monkeypatch.setattr(prompts, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
    monkeypatch.setattr(CapturedPass, "capture", capture)
    for name, value in {"PASSES": (8, 16), "TOKENS_PER_ROW": 2, "MIN_USES": 1}.items():
        monkeypatch.setattr(prompts, name, value)
    poison(monkeypatch, attention, gemm, step)
    hurried(monkeypatch)
    matrix_units(monkeypatch)
    return found


def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and the passes beside them are launched kernel by kernel, in the interpreter."""
    events = SimpleNamespace(record=lambda: None, wait=lambda: None, synchronize=lambda: None)
    changed = {"empty": lambda *shape, pin_memory=False, **options: torch.empty(*shape, **options)}
    changed |= {"cuda": SimpleNamespace(Event=lambda: events)}
    monkeypatch.setattr(captured, "torch", SimpleNamespace(**vars(torch) | changed))
    monkeypatch.setattr(captured, "_capturing", False)
    monkeypatch.setattr(infer_backend, "_with_kernels", lambda model: GpuBackend.of(parts_of(model), model.dtype))
    poison(monkeypatch, attention, gemm, step)
    hurried(monkeypatch)


@pytest.fixture
def small(tiny_model: Make) -> Make:
    def make(model_type: str = "llama") -> Decoder:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 24, "num_hidden_layers": 1}
        if model_type == "gemma3":
            sizes |= {"num_hidden_layers": 2}
        return tiny_model(model_type=model_type, **sizes)

    return make


def backend_of(model: Decoder) -> GpuBackend:
    return GpuBackend.of(parts_of(model), torch.float32)


def fed(caches: Sequence[Cache], pieces: Sequence[Sequence[int]], wanted: slice = NONE) -> list[Row]:
    return [Row(cache, list(tokens), wanted) for cache, tokens in zip(caches, pieces, strict=True)]


def last_logits(backend: GpuBackend, caches: Sequence[Cache]) -> list[Tensor]:
    return backend.run(fed(caches, [[7]] * len(caches), LAST))


@pytest.mark.parametrize("family", amount(["llama", "qwen3", "gemma3", "gpt2"], ["gemma3"]))
@torch.inference_mode()
def test_as_kernel_by_kernel(small: Make, made: list[CapturedPass], family: str) -> None:
    """In two chunks, the second of other sizes; one of the rows comes later."""
    model = small(family)
    backend, memory = backend_of(model), CacheMemory(model, 2**20)
    chunks = [[[1, 2, 3, 4, 5], [6]], [[8, 9], [10, 11, 12], [13, 14, 15, 16]]]
    for captures in (True, False):
        caches = [memory.cache(64) for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(captured, "_capturing", captures)
            if captures:  # as with many tokens: GEMMs with the residual and the norm in their epilogue
                patch.setattr(gemm, "SMALL_ROWS", 4)
                patch.setattr(gemm, "MAX_SMALL_ROWS", 4)
                patch.setattr(gemm, "FUSED_ROWS", 8)
                patch.setattr(gpu_backend, "FUSED_ROWS", 8)
            for chunk in chunks:
                got = backend.run(fed(caches[: len(chunk)], chunk))
                assert [x.shape for x in got] == [(1, 0, 24)] * len(chunk)
        assert [cache.seq_len for cache in caches] == [7, 4, 4]
        assert caches[0].contents.tokens(7) == [1, 2, 3, 4, 5, 8, 9]
        logits = last_logits(backend, caches)
        if captures:
            expected, count = logits, len(made)
    assert len(made) == count == 2  # of 8 tokens, and of 16
    assert all(torch.equal(x, y) for x, y in zip(logits, expected, strict=True))


@torch.inference_mode()
def test_what_was_there_before_is_gone(small: Make, made: list[CapturedPass]) -> None:
    """A pass of few tokens after one of many, in the same buffers."""
    model = small()
    backend, memory = backend_of(model), CacheMemory(model, 2**20)
    backend.run(fed([memory.cache(64)], [range(8)]))
    caches = [memory.cache(64), memory.cache(64)]
    backend.run(fed(caches, [[1, 2, 3], [4, 5]]))
    assert len(made) == 1
    others = [KVCache.from_model_config(model.config, 64, dtype="float32", device="cpu") for _ in caches]
    model.run(fed(others, [[1, 2, 3], [4, 5]]))
    for x, y in zip(last_logits(backend, caches), last_logits(backend, others), strict=True):
        torch.testing.assert_close(x, y)


@torch.inference_mode()
def test_the_last_used_are_kept(small: Make, made: list[CapturedPass], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_PASSES", 1)
    model = small()
    backend, memory = backend_of(model), CacheMemory(model, 2**20)
    for size, count in ((8, 1), (7, 1), (16, 2), (8, 3)):
        backend.run(fed([memory.cache(64)], [range(size)]))
        assert (len(made), len(backend.passes._passes)) == (count, 1)


@torch.inference_mode()
def test_left_to_others(small: Make, made: list[CapturedPass], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logits are wanted, there are too many tokens, or too many rows; and at first."""
    model = small()
    backend, memory = backend_of(model), CacheMemory(model, 2**20)

    def runs(pieces: Sequence[Sequence[int]], wanted: slice = NONE) -> None:
        backend.run(fed([memory.cache(64) for _ in pieces], pieces, wanted))

    runs([range(8)], LAST)
    runs([range(17)])
    runs([[1], [2], [3], [4], [5]])
    assert not made
    monkeypatch.setattr(prompts, "MIN_USES", 2)
    runs([range(8)])
    assert not made
    runs([range(8)])
    assert len(made) == 1


@torch.inference_mode()
def test_refusals_change_nothing(small: Make, made: list[CapturedPass]) -> None:
    model = small()
    backend, memory = backend_of(model), CacheMemory(model, 2**20)
    caches = [memory.cache(64), memory.cache(4)]
    with pytest.raises(ValueError, match="overflow"):
        backend.run(fed(caches, [[1, 2, 3], [1, 2, 3, 4, 5]]))
    with pytest.raises(ValueError, match="a cache of its own"):
        backend.run(fed([caches[0], caches[0]], [[1, 2, 3], [4, 5]]))
    assert [cache.seq_len for cache in caches] == [0, 0]
    assert not made


@torch.inference_mode()
def test_without_memory_for_it(small: Make, made: list[CapturedPass], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    model = small()
    backend, memory = backend_of(model), CacheMemory(model, 2**20)
    monkeypatch.setattr(CapturedPass, "capture", full)
    for _ in range(2):
        cache = memory.cache(64)
        backend.run(fed([cache], [range(8)]))
        assert cache.seq_len == 8
    assert not made


@pytest.mark.parametrize("family", amount(["llama", "qwen3", "gemma3", "gpt2", "olmoe"], ["gemma3", "olmoe"]))
def test_beside_a_step(small: Make, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Prompts in chunks beside sequences that decode, and sequences that enter in the pass of their prompt."""
    on_the_host(monkeypatch)
    model = small(family)
    beside, run_beside = [], GpuBackend.run_beside

    def counted(self: GpuBackend, step: captured.CapturedStep, rows: Sequence[Row]) -> bool:
        beside.append((step.rows, sum(len(row.tokens) for row in rows)))
        return run_beside(self, step, rows)

    monkeypatch.setattr(GpuBackend, "run_beside", counted)
    sampled = SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=1.0, seed=3)
    prompts = [[1 + i % 20 for i in range(n)] for n in (3, 7, 1)]
    together = generate_batch(model, Letters(), prompts, sampled, prefill_chunk=6, memory=CacheMemory(model, 2**20))
    assert {rows for rows, _ in beside} >= {1, 4}
    assert sum(tokens for _, tokens in beside) == sum(map(len, prompts)) - len(prompts)
    monkeypatch.setattr(GpuBackend, "run_beside", lambda *_: False)
    for prompt, got in zip(prompts, together, strict=True):
        assert got.token_ids == generate_batch(model, Letters(), [prompt], sampled)[0].token_ids


@pytest.mark.parametrize("new", [1, 5])
def test_scored_prompts(small: Make, monkeypatch: pytest.MonkeyPatch, new: int) -> None:
    """A pass scores the prompt but for its last token, which enters a captured step; then comes another page."""
    on_the_host(monkeypatch)
    model = small()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True, prompt_logprobs=0)
    prompts = [[1 + i % 20 for i in range(n)] for n in (62, 3)]
    memory = CacheMemory(model, 2**20)
    for prompt, got in zip(prompts, generate_batch(model, Letters(), prompts, params, memory=memory), strict=True):
        assert got.prompt_logprobs is not None
        assert (len(got.prompt_logprobs), len(got.token_ids)) == (len(prompt), new)
        plain = replace(params, prompt_logprobs=None)
        assert got.token_ids == generate_batch(model, Letters(), [prompt], plain)[0].token_ids
    assert not memory.index.pages_in_use().size
