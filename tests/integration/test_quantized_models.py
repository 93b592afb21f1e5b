"""Real files kept quantised: their own weights, whatever their types, and text that is worth as much."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from amount import amount, once
from gguf import GGMLQuantizationType, quants

from infer import SamplingParams, Tokenizer, generate, load_model, perplexity
from infer.loader.builtin import BUILTIN, pull
from infer.loader.gguf_file import GGUFFile
from infer.loader.load import part_names
from infer.models.common import Decoder
from infer.nn.linear import FusedLinear
from infer.nn.quantized import QuantizedWeight

pytestmark = pytest.mark.slow

SMOLLM2, GEMMA = "smollm2-135m", "gemma-3-270m"
TEXT = Path(__file__).parents[2] / "benchmarks" / "text.md"
TOKENS = amount(1_000, 300)


@cache
def load(name: str, quantize: str | None) -> Decoder:
    return load_model(pull(BUILTIN[name]), dtype="float32", device="cpu", quantize=quantize)[0]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(pull(BUILTIN[name]))


@cache
def exact_perplexity(name: str) -> float:
    return measured(name, None)


def measured(name: str, quantize: str | None) -> float:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[:TOKENS]
    assert len(ids) == TOKENS
    return perplexity(load(name, quantize), ids, prefix=tokenizer.encode("")).perplexity


def tensors_in(name: str, quantize: str) -> list[tuple[str, str, QuantizedWeight, torch.Tensor, torch.Tensor]]:
    """Of every matrix in the file: its name, its type, the packed weight, its rows there, and the file's own floats."""
    model, file = load(name, quantize), GGUFFile(pull(BUILTIN[name]))
    found = []
    for module_name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, QuantizedWeight) or module is model.lm_head:  # tied to the embedding in both files
            continue
        parts = part_names(module, module_name, "weight") or [f"{module_name}.weight"]
        sizes = list(module.parts.values()) if isinstance(module, FusedLinear) else [weight.rows]
        for part, rows in zip(parts, weight.floats().split(sizes), strict=True):
            kind = GGMLQuantizationType(file._tensors[file.tensors[part].name].type).name
            found.append((part, kind, weight, rows, torch.cat(list(file.blocks(part)))))
    return found


def test_the_file_reads_as_gguf_says() -> None:
    """The floats that the tests below compare with, in one tensor of each type, by hand."""
    for name in (SMOLLM2, GEMMA):
        file = GGUFFile(pull(BUILTIN[name]))
        stored = file.tensors["layers.0.mlp.down_proj.weight"].name
        tensor = file._tensors[stored]
        with file.path.open("rb") as raw:
            raw.seek(tensor.offset)
            data = torch.frombuffer(bytearray(raw.read(tensor.nbytes)), dtype=torch.uint8).view(tensor.shape[0], -1)
        expected = quants.dequantize(data.numpy(), GGMLQuantizationType(tensor.type))
        got = torch.cat(list(file.blocks("layers.0.mlp.down_proj.weight")))
        assert torch.equal(got, torch.from_numpy(expected))


def test_smollm2_is_taken_over() -> None:
    """Every weight of its layers, and its embedding, to the last bit."""
    tensors = tensors_in(SMOLLM2, "int4")
    assert Counter(kind for _, kind, *_ in tensors) == {"Q4_1": 210, "Q8_0": 1}
    for name, kind, weight, got, expected in tensors:
        assert weight.bits == (4 if kind == "Q4_1" else 8)
        assert torch.equal(got, expected), name


def test_gemma_is_taken_over() -> None:
    """Every type within its bound: Q5_0 and Q8_0 to the last bit, Q4_K but for its scales, Q6_K rounded to 8 bits."""
    tensors = tensors_in(GEMMA, "int4")
    kinds = Counter(kind for _, kind, *_ in tensors)
    assert sum(kinds.values()) == 18 * 7 + 1
    assert set(kinds) == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    for name, kind, weight, got, expected in tensors:
        assert weight.bits == 8 or kind == "Q4_K"
        if weight.bits == 8 and kind in ("Q5_0", "Q8_0"):
            assert torch.equal(got, expected), name
            continue
        groups = expected.unflatten(1, (-1, 32))
        peak = groups.abs().amax(2)
        if weight.bits == 8:
            bound = peak / 127 / 2 + peak * 2**-11 + 127 * 2**-25
        else:
            bound = (groups.amax(2) - groups.amin(2) + peak) * 2**-10 + 2**-20
        assert ((got - expected).unflatten(1, (-1, 32)).abs() <= bound[..., None]).all(), name


@once(
    {
        "name, prompt, word": [
            (SMOLLM2, "The capital of France is", "Paris"),
            (GEMMA, "Monday, Tuesday, Wednesday,", "Thursday"),
            *amount(
                [(SMOLLM2, "The opposite of hot is", "cold"), (GEMMA, "Paris is the capital of", "France")],
                [],
            ),
        ]
    },
    quantize=["int4", "int8"],
)
def test_greedy_text(name: str, prompt: str, word: str, quantize: str) -> None:
    tokenizer = tokenizer_of(name)
    params = SamplingParams(max_new_tokens=amount(16, 8), ignore_eos=True)
    result = generate(load(name, quantize), tokenizer, tokenizer.encode(prompt), params)
    assert word in result.text
    if quantize == "int8":  # with 4 bits, activations are rounded so coarsely that the last digit of one may show
        uncached = generate(load(name, quantize), tokenizer, tokenizer.encode(prompt), params, use_kv_cache=False)
        assert result.token_ids == uncached.token_ids


@pytest.mark.parametrize(
    ("name", "quantize"),
    [(SMOLLM2, "int4"), *amount([(SMOLLM2, "int8"), (GEMMA, "int8"), (GEMMA, "int4")], [])],
)
def test_perplexity(name: str, quantize: str) -> None:
    most = {"int4": 0.03, "int8": 0.005}[quantize]
    exact, got = exact_perplexity(name), measured(name, quantize)
    print(f"{name}: {exact:.4f} in float32, {got:.4f} in {quantize}, {got / exact - 1:+.2%}")
    assert got != exact
    assert got == pytest.approx(exact, rel=most)
