"""The door to the backends: which one runs a model and why, and that nothing done to a model goes unnoticed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mocks import CACHES, MockModel
from tiny import FAMILIES, make_tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from infer import GrowingCache, KVCache, SlidingCache
from infer.backend import Row, backend_for, cpu, expected
from infer.backend.parts import ModelSnapshot, UnsupportedByKernels, parts_of
from infer.backend.plain import TorchBackend
from infer.cache import NoCache
from infer.config import RopeConfig
from infer.models.common import MLP, Block, Decoder, UngatedMLP
from infer.models.gemma3 import Gemma3Block
from infer.models.llama import Llama
from infer.models.rows import ALL, LAST, NONE
from infer.nn.activation import ACTIVATIONS
from infer.nn.linear import Linear
from infer.nn.norm import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from infer.nn.quantized import QuantizedWeight, quantize_rows
from infer.nn.rope import Rope

needs_kernels = pytest.mark.skipif(cpu.kernels() is None, reason="numba is not installed, or INFER_KERNELS=0")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_by_door(model: Any, ids: Tensor | None = None) -> Tensor:
    """[B, n, V] through the backend, a prompt in a cache."""
    ids = random_ids(1, 5) if ids is None else ids
    cache = KVCache.from_model_config(model.config, 8, batch_size=len(ids), dtype=model.dtype, device="cpu")
    return backend_for(model).run([Row(cache, ids, ALL)])[0]


def check(model: Any) -> None:
    """The backend, whichever it is, gives what the modules do."""
    torch.testing.assert_close(logits_by_door(model), model(random_ids(1, 5)), atol=1e-4, rtol=1e-4)


# What is done to a model, and what the door says of it.


class Doubled(nn.Module):
    """Of a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Silent(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual


class OwnMLP(MLP):
    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return 2 * super().forward(x, residual)


class OwnLinear(Linear):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return 3 * super().forward(x, residual)


class Parallel(Block):
    def forward(self, x: Tensor, forward_pass: Any) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), x, forward_pass)
        return self.mlp(self.post_attention_layernorm(x), attended)


def own_embed(model: Decoder) -> None:
    kind = type(model)
    model.embed = lambda ids, positions: 2 * kind.embed(model, ids, positions)


def own_forward(model: Decoder) -> None:
    kind = type(model)
    model.forward = lambda *args, **options: 2 * kind.forward(model, *args, **options)


def own_class(model: Decoder) -> None:
    class Own(type(model)):
        def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
            return 2 * super().embed(ids, positions)

    model.__class__ = Own


def across(module: Any) -> None:
    """The weight's rows and columns in the other order of memory."""
    module.weight = nn.Parameter(module.weight.t().contiguous().t(), requires_grad=False)


def put(module: Any, name: str, *shape: int) -> None:
    setattr(module, name, nn.Parameter(torch.randn(shape), requires_grad=False))


# Plain torch runs the model.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a module replaced": (lambda m: setattr(m.layers[0], "mlp", Silent()), "layers.0.mlp has a custom forward"),
    "a module added": (lambda m: m.layers[0].add_module("mlp", Silent()), "layers.0.mlp has a custom forward"),
    "torch's norm": (lambda m: setattr(m, "norm", nn.LayerNorm(32)), "norm has a custom forward"),
    "a subclass": (lambda m: setattr(m.layers[1].mlp, "__class__", OwnMLP), "layers.1.mlp has a custom forward"),
    "a head's subclass": (lambda m: setattr(m.lm_head, "__class__", OwnLinear), "lm_head has a custom forward"),
    "another order": (lambda m: setattr(m.layers[0], "__class__", Parallel), "layers.0 has a custom forward"),
    "its own forward": (
        lambda m: setattr(m.layers[0].mlp, "forward", lambda x, residual: residual),
        "layers.0.mlp has a custom forward",
    ),
    "an embedding of its own": (own_embed, "a custom embed"),
    "a forward of its own": (own_forward, "a custom forward"),
    "a class of its own": (own_class, "a custom embed"),
    "a parametrized weight": (
        lambda m: parametrize.register_parametrization(m.layers[0].mlp.down_proj, "weight", Doubled()),
        "layers.0.mlp.down_proj has parametrized weights",
    ),
    "a weight across": (lambda m: across(m.layers[0].mlp.down_proj), "layers.0.mlp.down_proj is no contiguous"),
    "layers swapped": (lambda m: m.layers.insert(0, m.layers.pop(1)), "layer 0 does not match the config"),
    "a layer twice": (lambda m: m.layers.__setitem__(1, m.layers[0]), "layer 1 does not match the config"),
    "a layer removed": (lambda m: m.layers.__delitem__(1), "has 1 layers, and its config 2"),
    "a window": (lambda m: setattr(m.layers[1].self_attn, "window", 1), "layer 1 does not match the config"),
    "one norm of heads": (lambda m: setattr(m.layers[0].self_attn, "q_norm", RMSNorm(8, 1e-5)), "layer 0"),
    "a bias that broadcasts": (
        lambda m: setattr(m.layers[0].self_attn.o_proj, "bias", nn.Parameter(torch.tensor([0.7]))),
        "do not fit",
    ),
    "float64": (lambda m: m.double(), "do not compute in torch.float64"),
}


@needs_kernels
class TestRefused:
    """What kernels do not compute, plain torch does: the whole model, and what comes out is what its modules give."""

    @pytest.mark.parametrize("warm", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("change", REFUSED)
    def test_changes(self, change: str, warm: bool, tiny_model: Callable) -> None:
        """Before the first pass or after it: what is known of a model does not outlast a change."""
        model, (make, why) = tiny_model(), REFUSED[change]
        if warm:
            logits_by_door(model)
        make(model)
        backend = backend_for(model)
        assert backend.name == "torch"
        assert why in backend.reason
        assert "\n" not in backend.reason
        check(model)

    @pytest.mark.parametrize("warm", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize(
        ("family", "kind"),
        [
            ("llama", Block),
            ("llama", MLP),
            ("llama", Linear),
            ("gpt2", UngatedMLP),
            ("gpt2", LayerNorm),
            ("gemma3", RMSNorm),  # of which gemma3's norm is a subclass
            ("gemma3", Gemma3Block),
        ],
    )
    def test_a_class_that_is_patched(
        self, family: str, kind: type, warm: bool, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For as long as it is."""
        model, forward = tiny_model(model_type=family), kind.forward
        if warm:
            logits_by_door(model)
        monkeypatch.setattr(kind, "forward", lambda self, x, *args: forward(self, 1.5 * x + 0.1, *args))
        assert backend_for(model).name == "torch"
        check(model)
        monkeypatch.undo()
        assert backend_for(model).name == "cpu"
        check(model)

    @pytest.mark.parametrize("warm", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("kind", [Decoder, Llama])
    def test_a_models_class_that_is_patched(
        self, kind: type, warm: bool, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, embed = tiny_model(), kind.embed
        if warm:
            logits_by_door(model)
        monkeypatch.setattr(kind, "embed", lambda self, ids, positions: 2 * embed(self, ids, positions))
        assert backend_for(model).name == "torch"
        check(model)
        monkeypatch.undo()
        assert backend_for(model).name == "cpu"

    def test_an_activation_without_a_kernel(self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model()
        for layer in model.layers:
            layer.mlp.activation = "relu"
        assert "layer 0: unsupported block structure" in backend_for(model).reason
        monkeypatch.setitem(ACTIVATIONS, "relu", F.relu)
        model.layers[0].mlp.activation = "silu"
        assert "kernels do not have the activation" in backend_for(model).reason
        check(model)

    def test_training_with_dropout(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gpt2", dropout=0.1)
        assert backend_for(model).name == "cpu"
        model.train()
        assert (backend_for(model).name, backend_for(model).reason) == ("torch", "it is in training mode, with dropout")
        assert not torch.equal(logits_by_door(model), logits_by_door(model))
        model.eval()
        assert backend_for(model).name == "cpu"
        without = tiny_model(model_type="gpt2").train()  # nothing is random in it
        assert backend_for(without).name == "cpu"

    def test_gradients(self, tiny_model: Callable) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            model = tiny_model()
            assert backend_for(model).name == "cpu"  # its weights have no gradients
            model.requires_grad_(True)
            with torch.no_grad():
                assert backend_for(model).name == "cpu"
            assert (backend_for(model).name, backend_for(model).reason) == ("torch", "gradients are recorded")
            cache = GrowingCache.from_model_config(model.config, 8, dtype="float32", device="cpu")
            backend_for(model).run([Row(cache, [3, 4])])[0].sum().backward()
            assert all(weight.grad is not None for weight in model.parameters())
        with torch.no_grad():
            assert backend_for(model).name == "cpu"

    def test_another_device(self, tiny_model: Callable) -> None:
        assert backend_for(tiny_model().to("meta")).reason == "there are no kernels for meta"

    def test_weights_in_a_form_that_no_kernel_reads(self, tiny_model: Callable) -> None:
        model = tiny_model()
        model.layers[0].input_layernorm.to(torch.bfloat16)
        assert backend_for(model).reason == "kernels do not read the dtype or device of its weights"
        check(model)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_foretold(self, dtype: torch.dtype, tiny_model: Callable) -> None:
        """What is said before there is a model is what then runs it."""
        backend, said = backend_for(tiny_model(dtype=dtype)), expected(torch.device("cpu"), dtype)
        assert said.startswith(f"{backend.name}: ")
        assert backend.name == "torch" or said == f"cpu: {backend.reason}"
        assert expected(torch.device("meta"), dtype) == "torch: there are no kernels for meta"

    def test_another_model(self) -> None:
        backend = backend_for(MockModel(3))
        assert (backend.name, backend.reason) == ("torch", "not an infer model class")

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("embed_tokens", (64, 24)),
            ("layers.0.self_attn.qkv_proj", (62, 32)),
            ("layers.0.self_attn.o_proj", (32, 30)),
            ("layers.1.self_attn.o_proj", (30, 32)),
            ("layers.0.mlp.gate_up_proj", (94, 32)),
            ("layers.1.mlp.down_proj", (32, 40)),
            ("layers.1.input_layernorm", (24,)),
            ("norm", (24,)),
            ("lm_head", (64, 24)),
        ],
    )
    @pytest.mark.parametrize("warm", [False, True], ids=["before", "after"])
    def test_weights_that_do_not_fit_each_other(
        self, name: str, shape: tuple[int, ...], warm: bool, tiny_model: Callable
    ) -> None:
        """Refused by torch, as ever: a kernel would read and write beside what is there."""
        model = tiny_model()
        if warm:
            logits_by_door(model)
        put(model.get_submodule(name), "weight", *shape)
        assert backend_for(model).reason == "shapes of its weights do not fit each other"
        with pytest.raises(RuntimeError):
            logits_by_door(model)

    @pytest.mark.parametrize("where", ["block", "head"])
    def test_parts_of_another_hidden_size(self, where: str, tiny_model: Callable) -> None:
        """All weights of a part fit each other, and none fits what stands before it."""
        model = tiny_model()
        if where == "head":
            put(model.norm, "weight", 24)
            put(model.lm_head, "weight", 64, 24)
        else:
            layer = model.layers[0]
            put(layer.self_attn.qkv_proj, "weight", 64, 24)
            put(layer.self_attn.o_proj, "weight", 24, 32)
            put(layer.mlp.gate_up_proj, "weight", 96, 24)
            put(layer.mlp.down_proj, "weight", 24, 48)
            put(layer.input_layernorm, "weight", 24)
            put(layer.post_attention_layernorm, "weight", 24)
        assert backend_for(model).reason == "shapes of its weights do not fit each other"
        with pytest.raises(RuntimeError):
            logits_by_door(model)

    def test_more_layers_than_the_cache_has(self, tiny_model: Callable) -> None:
        """A layer that is there twice stores in the same place, as its modules do."""
        model = tiny_model()
        logits_by_door(model)
        model.layers.append(model.layers[0])
        assert backend_for(model).name == "torch"
        assert logits_by_door(model).isfinite().all()
        del model.layers[2], model.layers[1]
        assert logits_by_door(model).isfinite().all()


def exchanged_norm(model: Decoder) -> None:
    model.norm = LayerNorm(32, 0.5).requires_grad_(False)


def assigned(model: Decoder) -> None:
    model.load_state_dict(make_tiny_model(seed=9).state_dict(), assign=True)


def ropes_replaced(model: Decoder) -> None:
    model.ropes = {kind: Rope(RopeConfig(theta=50.0), 8) for kind in model.ropes}


def quantised(model: Decoder) -> None:
    for layer in model.layers:
        layer.mlp.down_proj.weight = QuantizedWeight.of(layer.mlp.down_proj.weight, "int8")


# Kernels go on, with what has changed.
TAKEN: dict[str, Callable[[Any], Any]] = {
    "eps": lambda m: setattr(m.layers[0].input_layernorm, "eps", 3.0),
    "a norm's kind": lambda m: setattr(m.norm, "__class__", ZeroCenteredRMSNorm),
    "a norm": exchanged_norm,
    "a scale": lambda m: setattr(m.layers[0].self_attn, "scale", 1.5),
    "an activation": lambda m: setattr(m.layers[0].mlp, "activation", "gelu"),
    "RoPE": ropes_replaced,
    "a weight's memory": lambda m: setattr(m.layers[0].mlp.down_proj.weight, "data", torch.randn(32, 48)),
    "a weight in place": lambda m: m.layers[0].mlp.down_proj.weight.zero_(),
    "a weight": lambda m: put(m.layers[0].mlp.down_proj, "weight", 32, 48),
    "a bias": lambda m: put(m.layers[0].mlp.down_proj, "bias", 32),
    "a module": lambda m: setattr(m.layers[0], "mlp", make_tiny_model(seed=5).layers[0].mlp),
    "a layer": lambda m: m.layers.__setitem__(0, make_tiny_model(seed=5).layers[0]),
    "all weights": assigned,
    "16 bits and back": lambda m: m.bfloat16().float(),
    "quantised weights": quantised,
    "heads tied": lambda m: setattr(m.lm_head, "weight", m.embed_tokens.weight),
}


@needs_kernels
class TestTaken:
    @pytest.mark.parametrize("warm", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("change", TAKEN)
    def test_changes(self, change: str, warm: bool, tiny_model: Callable) -> None:
        model = tiny_model()
        before = logits_by_door(model) if warm else model(random_ids(1, 5))
        TAKEN[change](model)
        assert (backend_for(model).name, backend_for(model).reason) == ("cpu", "numba kernels")
        check(model)
        assert not torch.allclose(logits_by_door(model), before, atol=1e-3)

    def test_packed_bytes(self, tiny_model: Callable) -> None:
        """Quantised weights are buffers: written to, exchanged, or read from a file."""
        model = tiny_model()
        quantised(model)
        weight = model.layers[0].mlp.down_proj.weight
        logits_by_door(model)
        weight.fill(0, quantize_rows(torch.randn(32, 48), "int8"))
        check(model)
        weight.packed = QuantizedWeight.of(torch.randn(32, 48), "int8").packed
        check(model)

    def test_a_weight_across_in_its_own_memory(self, tiny_model: Callable) -> None:
        model = tiny_model()
        logits_by_door(model)
        weight = model.layers[0].mlp.down_proj.weight
        weight.data = weight.data.t().contiguous().t()
        assert backend_for(model).name == "torch"
        check(model)
        weight.data = weight.data.contiguous()
        assert backend_for(model).name == "cpu"
        check(model)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bits(self, dtype: torch.dtype, tiny_model: Callable) -> None:
        model, ids = tiny_model(), random_ids(1, 5)
        wide = logits_by_door(model)
        model.to(dtype)
        assert backend_for(model).name == "cpu"
        got = logits_by_door(model)
        assert got.dtype is dtype
        torch.testing.assert_close(got, model(ids), atol=0.1, rtol=0.1)
        torch.testing.assert_close(got.float(), wide, atol=0.1, rtol=0.1)


LLAMA_MODULES = [
    "embed_tokens",
    "layers.0",
    "layers.0.input_layernorm",
    "layers.1.self_attn",
    "layers.0.self_attn.qkv_proj",
    "layers.1.self_attn.o_proj",
    "layers.0.post_attention_layernorm",
    "layers.1.mlp",
    "layers.0.mlp.gate_up_proj",
    "layers.1.mlp.down_proj",
    "norm",
    "lm_head",
]


class TestHooks:
    """One hook anywhere, and the modules themselves run."""

    @pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
    @pytest.mark.parametrize("name", LLAMA_MODULES)
    def test_they_fire(self, name: str, kind: str, tiny_model: Callable) -> None:
        """Once in a pass, before the first one or after it; without them, the model runs as before."""
        model, seen = tiny_model(), []
        before, plain = backend_for(model), logits_by_door(model)
        hook = getattr(model.get_submodule(name), kind)(lambda *args: seen.append(1))
        assert (backend_for(model).name, backend_for(model).reason) == ("torch", "a module has a hook")
        torch.testing.assert_close(logits_by_door(model), plain, atol=1e-4, rtol=1e-4)
        assert seen == [1]
        hook.remove()
        if before.name == "cpu":
            assert backend_for(model) is before
        assert torch.equal(logits_by_door(model), plain)
        assert seen == [1]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_on_all_modules(self, family: str, tiny_model: Callable) -> None:
        """Of every family, those inside packed weights too: all fire, once for a pass over several rows.

        The matrices of experts are called for each expert.
        """
        model, seen = tiny_model(model_type=family), []
        output = model.layers[0].self_attn.o_proj
        output.weight = QuantizedWeight.of(output.weight, "int8")
        names = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
        assert "layers.0.self_attn.o_proj.weight" in names
        for name in names:
            model.get_submodule(name).register_forward_hook(lambda *args, name=name: seen.append(name))
        caches = [KVCache.from_model_config(model.config, 8, dtype="float32", device="cpu") for _ in range(3)]
        backend_for(model).run([Row(cache, [3] * (1 + i)) for i, cache in enumerate(caches)])
        assert sorted(seen if not model.config.num_experts else {*seen}) == sorted(names)

    def test_what_they_change_counts(self, tiny_model: Callable) -> None:
        model = tiny_model()
        logits_by_door(model)
        model.layers[0].register_forward_hook(lambda module, args, out: torch.stack((2 * out, out), -1)[..., 0])
        check(model)

    def test_on_the_model(self, tiny_model: Callable) -> None:
        """It is called, row by row: its hooks see ids and logits as whoever calls a model does."""
        model, seen = tiny_model(), []
        ids = random_ids(1, 4)
        unhooked = model(ids)
        logits_by_door(model)
        model.register_forward_hook(lambda _, args, out: seen.append((args[0].tolist(), out.shape)) or 2 * out)
        caches = [KVCache.from_model_config(model.config, 8, dtype="float32", device="cpu") for _ in range(3)]
        rows = [Row(caches[0], ids, ALL), Row(caches[1], ids[0].tolist()), Row(caches[2], ids, slice(1, 3))]
        got = backend_for(model).run(rows)
        assert [each for each, _ in seen] == [ids.tolist()] * 3
        for logits, wanted in zip(got, (slice(None), slice(-1, None), slice(1, 3)), strict=True):
            torch.testing.assert_close(logits, 2 * unhooked[:, wanted], atol=1e-4, rtol=1e-4)
        assert [cache.seq_len for cache in caches] == [4] * 3

    def test_one_that_raises(self, tiny_model: Callable) -> None:
        """No cache has moved; the next pass is as if that one had not been."""
        model = tiny_model()
        caches = [cls.from_model_config(model.config, 8, dtype="float32", device="cpu") for cls in CACHES]

        def refuse(*args: Any) -> None:
            raise RuntimeError("no")

        hook = model.layers[1].register_forward_hook(refuse)
        with pytest.raises(RuntimeError, match="no"):
            backend_for(model).run([Row(cache, [3, 4, 5]) for cache in caches])
        assert [cache.seq_len for cache in caches] == [0] * len(caches)
        hook.remove()
        for logits in backend_for(model).run([Row(cache, [6, 7], ALL) for cache in caches]):
            torch.testing.assert_close(logits, model(torch.tensor([[6, 7]])), atol=1e-4, rtol=1e-4)


class TestPlans:
    """What is found out about a model is kept for as long as it holds."""

    @needs_kernels
    def test_made_once(self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        model, other = tiny_model(), tiny_model()
        backend = backend_for(model)
        logits_by_door(model)
        other.layers[0].mlp.activation = "gelu"  # another model
        other.eval()
        model.eval()
        assert backend_for(model) is backend
        monkeypatch.setattr("infer.backend.parts_of", lambda _: pytest.fail("planned again"))
        logits_by_door(model)

    @needs_kernels
    def test_made_again(self, tiny_model: Callable) -> None:
        model = tiny_model()
        backend = backend_for(model)
        model.layers[0].mlp.activation = "gelu"
        assert backend_for(model) is not backend

    def test_gone_with_the_model(self, tiny_model: Callable) -> None:
        model = tiny_model()
        logits_by_door(model)
        gone = weakref.ref(model), weakref.ref(model.layers[0])
        del model
        gc.collect()
        assert [each() for each in gone] == [None, None]

    def test_a_watch(self, tiny_model: Callable) -> None:
        model = tiny_model()
        watch = ModelSnapshot(model)
        model.eval()
        assert not watch.changed(model)
        assert not watch.hooked()
        hook = model.layers[1].self_attn.register_forward_pre_hook(lambda *args: None)
        assert watch.hooked()
        assert not watch.changed(model)
        hook.remove()
        assert not watch.hooked()
        tiny_model()  # another model's modules
        assert not watch.changed(model)
        with torch.no_grad():
            model.norm.weight.mul_(2)  # in its place
        assert not watch.changed(model)
        model.norm.weight.data = model.norm.weight.data.clone()
        assert watch.changed(model)
        assert watch.changed(model)
        assert not ModelSnapshot(model).changed(model)


class TestParts:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_of_every_family(self, family: str, tiny_model: Callable) -> None:
        model = tiny_model(model_type=family)
        parts, config = parts_of(model), model.config
        assert len(parts.blocks) == config.num_hidden_layers
        assert parts.config is config
        assert parts.head[:2] == (model.norm, model.lm_head)
        assert parts.embedding.tokens is model.embed_tokens
        assert (parts.embedding.positions is not None) == (family == "gpt2")
        assert parts.embedding.factor == model.embed_scale
        assert bool(parts.ropes) == (family != "gpt2")
        for i, (block, layer) in enumerate(zip(parts.blocks, model.layers, strict=True)):
            attention, norms = layer.self_attn, layer.norms()
            assert block.gated is not isinstance(layer.mlp, UngatedMLP)
            assert (block.q_norm, block.k_norm) == (attention.q_norm, attention.k_norm)
            assert [getattr(block, name) for name in norms._fields] == list(norms)
            assert (block.window, block.rope_type) == (config.window(i), config.rope_type(i))
            assert (block.sinks is not None) == (family == "gpt_oss")
            assert (block.routing is not None) == config.has_experts(i)
            assert (block.heads, block.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
            assert block.scale == layer.self_attn.scale
            routers = [] if block.routing is None else [layer.mlp.router]
            assert block.linears == [layer.self_attn.qkv_proj, layer.self_attn.o_proj, block.up, block.down, *routers]

    @pytest.mark.parametrize("change", sorted(set(REFUSED) - {"float64"}))  # which parts are in is for backends to say
    def test_what_is_not_plain(self, change: str, tiny_model: Callable) -> None:
        model, (make, why) = tiny_model(), REFUSED[change]
        make(model)
        with pytest.raises(UnsupportedByKernels) as error:
            parts_of(model)
        assert why in str(error.value)

    def test_positions_that_were_learned(self, tiny_model: Callable) -> None:
        assert parts_of(tiny_model(model_type="gpt2", max_position_embeddings=8)).positions_learned == 8
        assert parts_of(tiny_model()).positions_learned is None


class TestTorchBackend:
    """The modules, over rows."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_rows_of_any_lengths(self, family: str, tiny_model: Callable) -> None:
        """Each as it is alone, within rounding; of every cache, and of none."""
        model = tiny_model(model_type=family)
        backend = TorchBackend(model, "asked for")
        assert (backend.name, backend.reason, backend.captured_decoder()) == ("torch", "asked for", None)
        new: dict[str, Any] = {"device": "cpu"}
        kinds = [
            *((cls, new | {"dtype": dtype}) for cls in CACHES for dtype in ("float32", "int8")),
            (SlidingCache, new | {"dtype": "float32", "prefill_chunk": 1}),
            (KVCache, new | {"dtype": "float32", "batch_size": 2}),
        ]
        lengths = [5, 1, 9, 1, 3, 7, 6, 1, 1, 4]
        wanted = [ALL, LAST, slice(2, 5), LAST, NONE, LAST, slice(1, 4), LAST, ALL, LAST]
        rows, alone = [], []
        for i, (cls, options) in enumerate(kinds):
            ids = random_ids(options.get("batch_size", 1), 2 * i + lengths[i], seed=i)
            caches = [cls.from_model_config(model.config, 32, **options) for _ in range(2)]
            if i:
                for cache in caches:
                    model(ids[:, : 2 * i], kv_cache=cache)
            rows.append(Row(caches[0], ids[:, 2 * i :], wanted[i]))
            alone.append(model(ids[:, 2 * i :], kv_cache=caches[1], all_logits=True)[:, wanted[i]])
        rows.append(Row(NoCache(), [3, 4, 5], ALL))
        alone.append(model(torch.tensor([[3, 4, 5]])))
        got = backend.run(rows)
        for i, (one, other) in enumerate(zip(got, alone, strict=True)):
            close = 5e-2 if i < len(kinds) and rows[i].cache.quantized else 1e-4
            torch.testing.assert_close(one, other, atol=close, rtol=close)
        assert [row.cache.seq_len for row in rows[:-1]] == [2 * i + lengths[i] for i in range(len(kinds))]

    def test_the_modules_run(self, tiny_model: Callable) -> None:
        model, ids = tiny_model(), random_ids(2, 5)
        cache = KVCache.from_model_config(model.config, 8, batch_size=2, dtype="float32", device="cpu")
        assert torch.equal(
            TorchBackend(model, "").run([Row(cache, ids, ALL)])[0], model.run([Row(NoCache(2), ids, ALL)])[0]
        )

    def test_what_is_refused(self, tiny_model: Callable) -> None:
        model = tiny_model(model_type="gpt2", max_position_embeddings=12)
        new = {"dtype": "float32", "device": "cpu"}
        fine, short = (KVCache.from_model_config(model.config, size, **new) for size in (20, 2))
        for wrong, message in [
            (Row(short, [3, 4, 5]), "overflow"),
            (Row(fine, [3]), "a cache of its own"),
            (Row(NoCache(), list(range(13))), "13 positions exceed the 12"),
        ]:
            with pytest.raises(ValueError, match=message):
                TorchBackend(model, "").run([Row(fine, [1, 2]), wrong])
            assert (fine.seq_len, short.seq_len) == (0, 0)

    def test_another_model(self) -> None:
        """Somebody else's model is called with ids [1, n], a row at a time."""
        model = MockModel(3, 5, 7)
        got = backend_for(model).run([Row(NoCache(), [1, 2]), Row(NoCache(), torch.tensor([[4]]), ALL)])
        assert model.fed == [[1, 2], [4]]
        assert [tuple(each.shape) for each in got] == [(1, 1, 10), (1, 1, 10)]
        assert [each.argmax().item() for each in got] == [3, 5]
        got = backend_for(model).run([Row(NoCache(), [1, 2, 3], slice(1, 3))])
        assert got[0].shape == (1, 2, 10)


def in_fresh_python(code: str, **environment: str) -> str:
    """What the code prints in an interpreter of its own, which finds the tests."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path} | environment
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return run.stdout


def door_in_words() -> str:
    """For another process: which backend runs a model, why, and the logits."""
    with torch.inference_mode():
        model = make_tiny_model()
        backend = backend_for(model)
        logits = logits_by_door(model)[0, -1]
        return json.dumps([backend.name, backend.reason, cpu.expected(), logits.tolist()])


class TestWithoutKernels:
    def test_switched_off(self) -> None:
        code = "import test_backend; print(test_backend.door_in_words())"
        name, why, foreseen, logits = json.loads(in_fresh_python(code, INFER_KERNELS="0"))
        assert (name, foreseen) == ("torch", False)
        assert "INFER_KERNELS=0" in why
        torch.testing.assert_close(torch.tensor(logits), logits_by_door(make_tiny_model())[0, -1], atol=1e-4, rtol=1e-4)

    def test_none_for_this_cpu(self, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.backend.cpu.backend.kernels", lambda: None)
        model = tiny_model()
        assert backend_for(model).name == "torch"
        assert backend_for(model).reason.startswith("there are no kernels for this CPU")
        check(model)

    def test_the_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INFER_KERNELS", "0")
        assert cpu._kernels.__wrapped__() is None
        assert not cpu.expected()

    @needs_kernels
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_process(self) -> None:
        """It cannot run numba's kernels: plain torch takes over, in a model that was planned before too."""
        code = (
            "import os, sys, torch; torch.set_num_threads(1)\n"
            "import test_backend as t\n"
            "model = t.make_tiny_model()\n"
            "with torch.inference_mode():\n"
            "    before = t.logits_by_door(model)\n"
            "    if os.fork() == 0:\n"
            "        near = torch.allclose(t.logits_by_door(model), before, atol=1e-4)\n"
            "        print(t.backend_for(model).name, near, flush=True); os._exit(0)\n"
            "    os.wait()\n"
            "    print(t.backend_for(model).name)\n"
        )
        assert in_fresh_python(code).split() == ["torch", "True", "cpu"]
