"""A model that is called runs on its backend, and a pass returns hidden states where a row asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mocks import CACHES
from tiny import FAMILIES, make_tiny_config

from infer import KVCache
from infer.backend import backend_for
from infer.backend.cpu import ops
from infer.backend.cpu.backend import CpuBackend
from infer.backend.parts import HeadParts
from infer.cache import BaseCache, NoCache
from infer.models.common import Decoder
from infer.models.registry import build_model
from infer.models.rows import ALL, LAST, NONE, HiddenStates, Row
from infer.nn.quantized import QuantizedWeight

IDS = torch.tensor([[(7 * i + i * i) % 64 for i in range(23)]])


def empty(kind: type[BaseCache], model: Decoder) -> BaseCache:
    return kind.from_model_config(model.config, 40, dtype="float32", device="cpu")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(model_type=request.param)


def test_shapes_on_the_meta_device() -> None:
    """It has no autocast."""
    with torch.device("meta"):
        assert build_model(make_tiny_config()).eval()(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 64)


def test_quantized_weights_cannot_be_trained(tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model()
    linear = model.layers[0].mlp.down_proj
    linear.weight = QuantizedWeight.of(linear.weight, "int8")
    with pytest.raises(ValueError, match='dtype="float32"'):
        model.requires_grad_(True)
    assert not any(weight.requires_grad for weight in model.requires_grad_(False).parameters())


class TestCalls:
    @pytest.mark.parametrize("kind", CACHES)
    def test_cached_is_uncached_to_the_bit(self, model: Decoder, kind: type[BaseCache]) -> None:
        """In passes of any sizes, with any cache; no `torch.no_grad` is needed where no weight has gradients."""
        expected = model(IDS)
        cache = empty(kind, model)
        pieces = [model(IDS[:, a:b], cache, all_logits=True) for a, b in ((0, 9), (9, 10), (10, 22), (22, 23))]
        assert torch.equal(torch.cat(pieces, 1), expected)
        assert torch.equal(model(IDS, NoCache(1))[:, -1], expected[:, -1])

    def test_by_kernels(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        run, calls = CpuBackend.run, list[int]()
        monkeypatch.setattr(CpuBackend, "run", lambda backend, rows: calls.append(len(rows)) or run(backend, rows))
        assert model(IDS).shape == (1, 23, 64)
        assert calls == [1]

    @pytest.mark.parametrize("how", ["gradients", "hook", "own hook"])
    def test_in_plain_torch(self, model: Decoder, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        monkeypatch.setattr(CpuBackend, "run", lambda *_: pytest.fail("kernels"))
        seen: list[Any] = []
        if how == "gradients":
            model.requires_grad_(True)
        else:
            module = model if how == "own hook" else model.layers[0]
            module.register_forward_hook(lambda *_: seen.append(1))
        logits = model(IDS)
        assert logits.requires_grad == (how == "gradients")
        assert bool(seen) == (how != "gradients")

    def test_a_batch(self, model: Decoder) -> None:
        both = torch.cat([IDS, IDS.flip(1)])
        expected = torch.cat([model(each[None]) for each in both])
        cache = KVCache.from_model_config(model.config, 40, batch_size=2, dtype="float32", device="cpu")
        assert torch.equal(model(both), expected)
        assert torch.equal(model(both, cache, all_logits=True), expected)


def hidden_of(run: Callable[[list[Row]], Any], model: Decoder, sizes: list[int], kind: Any) -> dict[int, torch.Tensor]:
    """Of all layers, and under -1 the final ones, of a sequence computed in passes of these sizes."""
    cache, at = NoCache(1) if kind is NoCache else empty(kind, model), 0
    found: dict[int, list[torch.Tensor]] = {}
    layers = range(model.config.num_hidden_layers)
    for size in sizes:
        hidden = HiddenStates(layers, final=True)
        run([Row(cache, IDS[:, at : at + size], NONE, hidden)])
        at += size
        for layer, states in {**hidden.layers, -1: hidden.final}.items():
            assert states is not None
            found.setdefault(layer, []).append(states)
    return {layer: torch.cat(states, 1) for layer, states in found.items()}


class TestHiddenStates:
    @torch.no_grad()
    def test_of_every_layer(self, model: Decoder) -> None:
        """By kernels those of plain torch, within rounding; the bits depend neither on passes nor on caches."""
        backend = backend_for(model)
        assert backend.name == "cpu"
        plain = hidden_of(model.run, model, [23], NoCache)
        expected = hidden_of(backend.run, model, [23], NoCache)
        for layer, states in expected.items():
            assert states.shape == (1, 23, model.config.hidden_size)
            torch.testing.assert_close(states, plain[layer], rtol=1e-4, atol=1e-4)
        for sizes, kind in (([23], KVCache), ([9, 1, 13], KVCache), ([17, 1, 1, 4], CACHES[-1])):
            found = hidden_of(backend.run, model, sizes, kind)
            assert all(torch.equal(found[layer], expected[layer]) for layer in expected)

    @torch.no_grad()
    def test_logits_come_of_the_final_ones(self, model: Decoder) -> None:
        hidden = HiddenStates(final=True)
        [logits] = backend_for(model).run([Row(NoCache(1), IDS, ALL, hidden)])
        assert hidden.final is not None
        config = model.config
        head = HeadParts(model.norm, model.lm_head, config.logits_scaling, config.final_logit_softcapping)
        assert torch.equal(ops.scale_logits(ops.linear(hidden.final[0], model.lm_head), head), logits[0])
        assert torch.equal(logits, model(IDS))

    @torch.no_grad()
    def test_positions_and_rows(self, model: Decoder) -> None:
        """Each row returns its own; rows beside it return what they return alone."""
        alone, some = HiddenStates([0], final=True), HiddenStates([0], final=True, positions=LAST)
        backend = backend_for(model)
        backend.run([Row(empty(KVCache, model), IDS[:, :7], NONE, alone)])
        rows = [
            Row(empty(KVCache, model), IDS, LAST),
            Row(empty(KVCache, model), IDS[:, :7], NONE, some),
            Row(empty(KVCache, model), IDS[:, :5], ALL, HiddenStates([1])),
        ]
        logits = backend.run(rows)
        assert [tuple(each.shape) for each in logits] == [(1, 1, 64), (1, 0, 64), (1, 5, 64)]
        assert torch.equal(logits[0], model(IDS)[:, -1:])
        for mine, whole in ((some.layers[0], alone.layers[0]), (some.final, alone.final)):
            assert mine is not None
            assert whole is not None
            assert torch.equal(mine, whole[:, -1:])
        assert rows[2].hidden is not None
        assert rows[2].hidden.final is None

    def test_with_hooks(self, model: Decoder) -> None:
        """A hook on a module, or on the model itself, sees the pass that returns them."""
        hidden, seen = HiddenStates([1], final=True), []
        model.register_forward_hook(lambda *_: seen.append(1))
        with torch.no_grad():
            backend_for(model).run([Row(NoCache(1), IDS, LAST, hidden)])
            assert seen
            assert hidden.layers[1] is not None
            assert torch.equal(model.norm(hidden.layers[1]), hidden.final) or model.config.num_hidden_layers > 2

    def test_another_model(self) -> None:
        from mocks import MockModel

        with pytest.raises(ValueError, match="infer's own models only"):
            backend_for(MockModel(0)).run([Row(NoCache(1), [1, 2], LAST, HiddenStates([0]))])
