"""Mixtures of experts: routing, what is read, and the forms in which checkpoints have their weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    TOLERANCE,
    byte_tokenizer_metadata,
    check_logits,
    difference,
    gguf_metadata,
    gguf_tensors,
    kernel_logits,
    load,
    random_ids,
    reference_model,
    save_folder,
    save_gguf,
    save_mxfp4,
    write_gguf,
)
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model
from torch import Tensor

from infer import load_model
from infer.backend import backend_for
from infer.backend.cpu import kernels
from infer.backend.cpu.ops import mix_experts
from infer.backend.parts import parts_of
from infer.cache import NoCache
from infer.loader.hf_config import config_from_hf
from infer.models.common import Decoder
from infer.models.moe import MoE
from infer.models.rows import ALL, Row
from infer.nn.quantized import QuantizedWeight, StackedWeight

MIXTURES = ["qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss"]
FORMS = ["float32", "bfloat16", "int8", "int4", "mixed"]  # of experts; mixed: gate and up in different types


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def mixture_model(form: str = "float32", **changes: Any) -> Decoder:
    sizes = {"hidden_size": 36, "intermediate_size": 21}  # an expert begins within a tile
    model = make_tiny_model(model_type="gpt_oss", num_hidden_layers=1, **sizes | changes)
    for linear in (model.layers[0].mlp.experts.gate_up_proj, model.layers[0].mlp.experts.down_proj):
        if form == "mixed":
            parts, kinds = linear.weight.split([*linear.parts.values()]), itertools.cycle(["int8", "int4"])
            linear.weight = StackedWeight([QuantizedWeight.of(*part) for part in zip(parts, kinds, strict=False)])
        elif form.startswith("int"):
            linear.weight = QuantizedWeight.of(linear.weight, form)
        else:
            linear.weight.data = linear.weight.to(getattr(torch, form))
    return model


def mixture(form: str = "float32", **changes: Any) -> Callable[[Tensor], Tensor]:
    """A MoE as a function of x [T, C], by kernels if there are any."""
    model = mixture_model(form, **changes)
    if kernels() is None:
        return lambda x: model.layers[0].mlp(x, None)  # type: ignore[no-any-return]
    parts = parts_of(model).blocks[0]
    return lambda x: mix_experts(x, parts)


def expert_by_expert(moe: MoE, x: Tensor) -> Tensor:
    """Written out for one token at a time, in float64."""
    moe, out = moe.double(), []
    for token in x.double():
        logits = moe.router(token[None])[0]
        chosen = sorted(range(len(logits)), key=lambda e: (-logits[e].item(), e))[: moe.top_k]
        weights = logits.softmax(0)[chosen]
        weights = weights / weights.sum() if moe.norm_topk else weights
        each = [moe.experts(token[None], torch.tensor([[e]]), torch.ones(1, 1).double())[0] for e in chosen]
        out.append(sum(weight * y for weight, y in zip(weights, each, strict=True)))
    return torch.stack(out)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 1), (5, 2), (7, 4), (4, 4), (40, 8)])
def test_against_one_token_at_a_time(experts: int, top_k: int, norm: bool) -> None:
    changes = {"num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": norm}
    x = torch.randn(19, 36)
    found = mixture(**changes)(x)
    model = make_tiny_model(model_type="gpt_oss", num_hidden_layers=1, hidden_size=36, intermediate_size=21, **changes)
    moe = model.layers[0].mlp
    assert difference(moe(x, None), found) < 1e-4
    assert difference(expert_by_expert(moe, x).float(), found) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_kernels_and_torch(form: str) -> None:
    x, model = torch.randn(33, 36), mixture_model(form)
    found = mixture(form)(x)
    assert difference(model.layers[0].mlp(x, None), found) < 1e-3
    assert found.std() > 0.1


@pytest.mark.skipif(kernels() is None, reason="plain torch promises no bits")
@pytest.mark.parametrize("form", FORMS)
def test_a_token_gets_what_it_gets_alone(form: str) -> None:
    """Whatever experts the others choose, in any order, on any number of threads."""
    run, x = mixture(form, num_experts=6, num_experts_per_tok=3), torch.randn(70, 36)
    alone = torch.cat([run(x[t : t + 1]) for t in range(70)])
    order, before = torch.randperm(70), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(run(x), alone)
            assert torch.equal(run(x[order]), alone[order])
            assert torch.equal(run(x[:1].expand(33, -1)), alone[:1].expand(33, -1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_equal_logits_go_to_the_lower_expert(backend: str) -> None:
    model = make_tiny_model(model_type="qwen3_moe", num_hidden_layers=1, dense_layers=(), num_experts_per_tok=2)
    moe, x = model.layers[0].mlp, torch.randn(9, 32)
    moe.router.weight.zero_()
    if backend == "kernels" and kernels() is not None:
        found = mix_experts(x, parts_of(model).blocks[0])
    else:
        found = moe(x, None)
    chosen = torch.tensor([[0, 1]]).expand(9, -1)
    assert difference(found, moe.experts(x, chosen, torch.full((9, 2), 1 / 5))) < 1e-5


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_only_the_chosen_experts_are_read(backend: str) -> None:
    model = make_tiny_model(model_type="qwen3_moe", num_hidden_layers=1, dense_layers=())
    moe, x = model.layers[0].mlp, torch.randn(1, 32)
    chosen, _ = moe.route(x)
    for linear in (moe.experts.gate_up_proj, moe.experts.down_proj):
        rows = linear.weight.view(5, -1)
        rows[[e for e in range(5) if e not in chosen]] = torch.nan
    found = mix_experts(x, parts_of(model).blocks[0]) if backend == "kernels" and kernels() else moe(x, None)
    assert found.isfinite().all()


def test_nan_stays() -> None:
    x = torch.randn(3, 36)
    x[1] = torch.nan
    found = mixture()(x)
    assert found[1].isnan().all()
    assert found[::2].isfinite().all()


def fused(folder: Path, transpose: bool = False) -> None:
    """Turn the tensors of single experts into one of all, as transformers has them in memory."""
    tensors = load_file(folder / "model.safetensors")
    made, parts = {}, {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)_proj\.weight", name):
            parts[found[1], int(found[2]), found[3]] = tensor
        else:
            made[name] = tensor
    for prefix in {prefix for prefix, _, _ in parts}:
        count = len({expert for at, expert, _ in parts if at == prefix})
        stacks = [torch.stack([parts[prefix, i, part] for i in range(count)]) for part in ("gate", "up", "down")]
        made[f"{prefix}.gate_up_proj"], made[f"{prefix}.down_proj"] = torch.cat(stacks[:2], 1), stacks[2]
    save_file(made, folder / "model.safetensors")


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    reference = reference_model("qwen3_moe")
    save_folder(reference, tmp_path)
    fused(tmp_path)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    check_logits(load(tmp_path), random_ids(), reference(random_ids()).logits)


@pytest.mark.parametrize(("dtype", "quantize"), [("auto", None), ("float32", None), ("float32", "int8")])
def test_mxfp4(tmp_path: Path, dtype: str, quantize: str | None) -> None:
    """As published: the experts in blocks of 4 bits, everything else in bfloat16."""
    expected = reference_model("gpt_oss", intermediate_size=64)
    tensors = save_mxfp4(expected, tmp_path)
    model, _ = load_model(tmp_path, dtype=dtype, device="cpu", quantize=quantize)
    ids = random_ids(1, 40)
    logits = expected(ids).logits
    if quantize is None:
        weight, name = model.layers[0].mlp.experts.gate_up_proj.weight, "model.layers.0.mlp.experts.gate_up_proj"
        values = expected.get_parameter(name).transpose(1, 2)  # [E, 2 I, C], gate and up alternate
        values = torch.cat((values[:, ::2], values[:, 1::2]), 1).flatten(0, 1)
        if kernels() is not None and dtype == "auto":
            assert isinstance(weight, QuantizedWeight)
            assert weight.kind == "MXFP4"
            assert torch.equal(weight.floats(), values)
            similar = torch.nn.functional.cosine_similarity(kernel_logits(model, NoCache(), ids), logits, dim=-1)
            assert similar.median() > 0.9999  # activations are rounded
        else:
            check_logits(model, ids, logits)
            assert torch.equal(weight.float(), values)
            assert kernels() is None or weight.dtype is torch.bfloat16
    else:
        assert (
            torch.nn.functional.cosine_similarity(kernel_logits(model, NoCache(), ids), logits, dim=-1).median() > 0.99
        )
    del tensors[next(name for name in tensors if name.endswith("_scales"))]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="U8, which is not a float dtype"):
        load(tmp_path)


@pytest.mark.parametrize("family", MIXTURES)
def test_hooks_see_the_router_and_the_experts(family: str, tmp_path: Path) -> None:
    """A model with a hook is plain torch, and computes the same."""
    reference = reference_model(family)
    model, seen = load(save_folder(reference, tmp_path)), []
    model.layers[0].mlp.router.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    ids = random_ids(1, 12)
    assert backend_for(model).name == "torch"
    assert difference(backend_for(model).run([Row(NoCache(), ids, ALL)])[0], reference(ids).logits) <= TOLERANCE
    assert seen == [(12, model.config.num_experts)]


QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}


def test_published_configs() -> None:
    qwen = config_from_hf(QWEN3_30B)
    assert (qwen.num_experts, qwen.num_experts_per_tok, qwen.moe_intermediate_size) == (128, 8, 768)
    assert qwen.norm_topk_prob
    assert all(qwen.has_experts(i) for i in range(48))
    assert not qwen.has_windows
    oss = config_from_hf(GPT_OSS_20B)
    assert (oss.num_experts, oss.num_experts_per_tok, oss.mlp_bias, oss.attention_bias) == (32, 4, True, True)
    assert oss.windows == (128, None) * 12
    assert oss.rope is not None
    assert (oss.rope.factor, oss.rope.truncate, oss.rope.theta) == (32.0, False, 150_000.0)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok must be from 1 to the 128 experts, not 129"),
        (QWEN3_30B, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64 is not supported"),
        (
            QWEN3_30B,
            {"model_type": "olmoe", "clip_qkv": 8.0, "decoder_sparse_step": 0, "moe_intermediate_size": 0}
            | {"head_dim": None, "max_window_layers": 0},
            "clip_qkv 8.0 is not supported for olmoe",
        ),
        (QWEN3_30B, {"model_type": "qwen3"}, "is not supported for qwen3: delete the key"),
        (GPT_OSS_20B, {"swiglu_limit": 9.0}, "swiglu_limit 9.0 is not supported for gpt_oss"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "fp8"}}, "quantized with 'fp8' are not supported"),
    ],
)
def test_refused_configs(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(base | changes)


def test_gguf_of_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    """As newer converters write it on request."""
    reference = reference_model("mixtral")
    tensors = gguf_tensors(reference)
    for i in range(reference.config.num_hidden_layers):
        pair = [tensors.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(pair, 1)
    metadata = gguf_metadata(reference) | byte_tokenizer_metadata()
    model = load(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    check_logits(model, random_ids(), reference(random_ids()).logits)


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q8_0, Quant.MXFP4])
def test_gguf_blocks_are_kept(tmp_path: Path, quant: Quant) -> None:
    reference = reference_model("gpt_oss")
    path = save_gguf(reference, tmp_path / "m.gguf", quant, byte_tokenizer_metadata())
    model = load_model(path, device="cpu")[0]
    floats = load_model(path, device="cpu", dtype="float32")[0]
    for linear, expected in zip(
        (model.layers[1].mlp.experts.gate_up_proj, model.layers[1].mlp.experts.down_proj),
        (floats.layers[1].mlp.experts.gate_up_proj, floats.layers[1].mlp.experts.down_proj),
        strict=True,
    ):
        if kernels() is not None:
            assert isinstance(linear.weight, QuantizedWeight)
            assert torch.equal(linear.weight.floats(), expected.weight)
