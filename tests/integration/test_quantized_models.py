"""Real files kept quantised: their own weights, whatever their types, and text that is worth as much."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import accumulate
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
from infer.nn.quantized import Quantized, QuantizedWeight

pytestmark = pytest.mark.slow

SMOLLM2, GEMMA = "smollm2-135m", "gemma-3-270m"
TEXT = Path(__file__).parents[2] / "benchmarks" / "text.md"
TOKENS = amount(1_000, 300)


@cache
def load(name: str, quantize: str | None) -> Decoder:
    dtype = "auto" if quantize == "auto" else "float32"
    return load_model(pull(BUILTIN[name]), dtype=dtype, device="cpu", quantize=quantize)[0]


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
        if not isinstance(weight, Quantized) or module is model.lm_head:  # tied to the embedding in both files
            continue
        parts = part_names(module, module_name, "weight") or [f"{module_name}.weight"]
        sizes = list(module.parts.values()) if isinstance(module, FusedLinear) else [weight.rows]
        starts = accumulate(sizes, initial=0)
        for part, start, rows in zip(parts, starts, weight.floats().split(sizes), strict=False):
            kind = GGMLQuantizationType(file._tensors[file.tensors[part].name].type).name
            found.append((part, kind, weight.part(start)[0], rows, torch.cat(list(file.blocks(part)))))
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


@pytest.mark.parametrize(
    ("name", "kinds"),
    [(SMOLLM2, {"Q4_1": 210, "Q8_0": 1}), (GEMMA, None)],
)
def test_blocks_are_taken_over(name: str, kinds: dict[str, int] | None) -> None:
    """Every weight of every type, to the last bit."""
    tensors = tensors_in(name, "auto")
    found = Counter(kind for _, kind, *_ in tensors)
    assert found == kinds if kinds else set(found) == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    for part, kind, weight, got, expected in tensors:
        assert weight.kind == kind
        assert torch.equal(got, expected), part


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
    [(SMOLLM2, "int4"), (GEMMA, "auto"), *amount([(SMOLLM2, "int8"), (GEMMA, "int8"), (GEMMA, "int4")], [])],
)
def test_perplexity(name: str, quantize: str) -> None:
    most = {"auto": 5e-5, "int4": 5e-5, "int8": 0.005}[quantize]
    exact, got = exact_perplexity(name), measured(name, quantize)
    print(f"{name}: {exact:.4f} in float32, {got:.4f} in {quantize}, {got / exact - 1:+.2%}")
    assert got == pytest.approx(exact, rel=most)
