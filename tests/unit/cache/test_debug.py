"""KV_DEBUG prints what the cache does; without it nothing stands between the model and its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mocks import Letters
from torch import Tensor

from infer import LLM, KVCache, SamplingParams, Trace, generate, generate_batch
from infer.backend import Row
from infer.backend.cpu.backend import CpuBackend
from infer.cache import Cache, TracedCache
from infer.cache.debug import debugged
from infer.models.common import Decoder

PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture(params=["gpt2", "gemma3"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(model_type=request.param)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., list[str]]:
    def run(model: Decoder, layer: str = "0", new: int = 3, **settings: Any) -> list[str]:
        monkeypatch.setenv("KV_DEBUG", "1")
        monkeypatch.setenv("KV_DEBUG_LAYER", layer)
        generate(model, Letters(), PROMPT, SamplingParams(max_new_tokens=new), **settings)
        output = capsys.readouterr()
        assert output.out == ""
        return output.err.splitlines()

    return run


def test_a_run(model: Decoder, events: Callable[..., list[str]]) -> None:
    keys = [6, 7, 8] if model.config.window(0) is None else [6, 4, 4]
    assert events(model) == [
        "[KVDBG][GPT] kv_cache=none b=1 t=6 cache_pos=0 pos=[0,1,2,3,4,5]",
        "[KVDBG][Attn L0] init_cache T=6 max_ctx=9",
        f"[KVDBG][Attn L0] T_q=6 T_k={keys[0]}",
        "[KVDBG][GPT] kv_cache=present b=1 t=1 cache_pos=6 pos=[6]",
        "[KVDBG][Attn L0] cache_pos=6 T=1 new_cache_pos=7 max_ctx=9",
        f"[KVDBG][Attn L0] using cache T_q=1 T_k={keys[1]}",
        "[KVDBG][GPT] kv_cache=present b=1 t=1 cache_pos=7 pos=[7]",
        "[KVDBG][Attn L0] cache_pos=7 T=1 new_cache_pos=8 max_ctx=9",
        f"[KVDBG][Attn L0] using cache T_q=1 T_k={keys[2]}",
    ]


def test_all_layers(model: Decoder, events: Callable[..., list[str]]) -> None:
    layers = model.config.num_hidden_layers
    lines = events(model, layer="", new=1)
    assert [line for line in lines if "init_cache" in line] == [
        f"[KVDBG][Attn L{i}] init_cache T=6 max_ctx=7" for i in range(layers)
    ]
    assert len(lines) == 1 + 2 * layers


def test_traced_layers_are_printed_too(model: Decoder, events: Callable[..., list[str]]) -> None:
    assert events(model, trace=Trace()) == events(model)


def test_without_a_cache(model: Decoder, events: Callable[..., list[str]]) -> None:
    lines = [line for line in events(model, use_kv_cache=False) if "Attn" in line]
    assert lines == [f"[KVDBG][Attn L0] no cache T_q={n} T_k={n}" for n in (6, 7, 8)]


def printing(cache: Cache) -> Cache:
    return debugged(cache, 2)


@torch.no_grad()
@pytest.mark.parametrize("wrap", [lambda cache: cache, printing, lambda cache: TracedCache(printing(cache), [0])])
def test_a_model_that_is_called(
    model: Decoder, wrap: Callable[[Cache], Cache], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each event once, also where the cache prints already."""
    monkeypatch.setenv("KV_DEBUG", "1")
    monkeypatch.setenv("KV_DEBUG_LAYER", "0")
    cache = wrap(KVCache.from_model_config(model.config, 20, dtype="float32", device="cpu"))
    model(torch.tensor([PROMPT]), kv_cache=cache)
    model(torch.tensor([[7]]), cache)
    model(torch.tensor([PROMPT]))
    lines = [line.removeprefix("[KVDBG]") for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if "T_k" not in line] == [
        "[GPT] kv_cache=none b=1 t=6 cache_pos=0 pos=[0,1,2,3,4,5]",
        "[Attn L0] init_cache T=6 max_ctx=20",
        "[GPT] kv_cache=present b=1 t=1 cache_pos=6 pos=[6]",
        "[Attn L0] cache_pos=6 T=1 new_cache_pos=7 max_ctx=20",
        "[GPT] kv_cache=none b=1 t=6 cache_pos=0 pos=[0,1,2,3,4,5]",
    ]
    assert len(lines) == 8


def test_a_cache_of_the_users(model: Decoder, events: Callable[..., list[str]]) -> None:
    cache = KVCache.from_model_config(model.config, 20, dtype="float32", device="cpu")
    assert "init_cache T=6 max_ctx=20" in events(model, cache=cache)[1]


def test_long_passes_are_cut_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("KV_DEBUG", "1")
    debugged(KVCache.allocate(1, 1, 2, 20, dtype="float32", device="cpu"), 1).positions(20)
    assert capsys.readouterr().err == "[KVDBG][GPT] kv_cache=none b=1 t=20 cache_pos=0 pos=[0,1,2,...,19]\n"


def test_batches(model: Decoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("KV_DEBUG", "1")
    monkeypatch.setenv("KV_DEBUG_LAYER", "1")
    generate_batch(model, Letters(), [[1, 2], [3, 4, 5]], SamplingParams(max_new_tokens=2))
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines() if "Attn L1" in line]
    assert [line for line in lines if "max_ctx" in line] == [
        "init_cache T=2 max_ctx=4",
        "init_cache T=3 max_ctx=5",
        "cache_pos=2 T=1 new_cache_pos=3 max_ctx=4",
        "cache_pos=3 T=1 new_cache_pos=4 max_ctx=5",
    ]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off(model: Decoder, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """The model gets the cache itself: there is nothing to branch on."""
    if value is None:
        monkeypatch.delenv("KV_DEBUG", raising=False)
    else:
        monkeypatch.setenv("KV_DEBUG", value)
    cache = KVCache.from_model_config(model.config, 20, dtype="float32", device="cpu")
    seen, run = [], CpuBackend.run

    def watch(backend: CpuBackend, rows: Sequence[Row]) -> list[Tensor]:
        seen.extend(row.cache for row in rows)
        return run(backend, rows)

    monkeypatch.setattr(CpuBackend, "run", watch)
    generate(model, Letters(), PROMPT, SamplingParams(max_new_tokens=2), cache=cache)
    assert all(held is cache for held in seen)
    assert len(seen) == 2


@pytest.mark.parametrize("layer", ["x", "-1", "1.5", "99"])
def test_bad_layer(model: Decoder, monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    monkeypatch.setenv("KV_DEBUG", "1")
    monkeypatch.setenv("KV_DEBUG_LAYER", layer)
    last = model.config.num_hidden_layers - 1
    for run in (
        lambda: generate(model, Letters(), PROMPT, SamplingParams(max_new_tokens=2)),
        lambda: model(torch.tensor([PROMPT])),
        lambda: LLM(model, Letters(), cache_memory=10**6).submit(
            PROMPT, max_new_tokens=2
        ),  # refused before the engine has it
    ):
        with pytest.raises(ValueError, match=f"KV_DEBUG_LAYER must be the number of a layer, 0 to {last}, not"):
            run()
