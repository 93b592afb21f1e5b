"""GGUF files: weights in every type, header, tokenizers rebuilt from metadata, and files that are refused."""

from __future__ import annotations

import itertools
import json
import struct
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from amount import pairs
from checkpoints import (
    LLAMA3_ROPE,
    byte_tokenizer,
    byte_tokenizer_metadata,
    check_logits,
    gguf_metadata,
    gguf_tensors,
    kernel_logits,
    llama_cpp_order,
    quantised,
    reference_model,
    save_gguf,
    write_gguf,
)
from gguf import GGMLQuantizationType as Quant
from gguf import quants
from texts import (
    SENTENCEPIECE_TEXTS,
    SYMBOL_TEXTS,
    TEKKEN_REGEX,
    TEXTS,
    USER_SYMBOLS,
    assert_agrees_with_sentencepiece,
    random_texts,
    train_sentencepiece,
)
from tokenizers import AddedToken, ByteLevelBPETokenizer, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from infer import ModelConfig, SamplingParams, Tokenizer, generate, load_model
from infer.cache import NoCache
from infer.cli.common import DEFAULT_MODEL
from infer.loader import gguf_file
from infer.loader.builtin import BUILTIN, pull
from infer.loader.describe import describe
from infer.loader.gguf_file import GGUFFile, read_header
from infer.loader.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from infer.nn.quantized import QuantizedWeight
from infer.nn.schemes import SCHEMES


def _can(function: Any, quant: Quant) -> bool:
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    row = np.zeros((1, block), np.float32) if function is quants.quantize else np.zeros((1, block_bytes), np.uint8)
    try:
        function(row, quant)
    except NotImplementedError:
        return False
    return True


READABLE = [quant for quant in Quant if _can(quants.dequantize, quant)]
WRITABLE = [quant for quant in READABLE if _can(quants.quantize, quant)]
UNREADABLE = [quant for quant in Quant if quant not in READABLE]


def by_name(quant: Quant) -> str:
    return quant.name


def random_ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 50), generator=torch.Generator().manual_seed(1))


def load(path: Path, quantize: str | None = None) -> Any:
    return load_model(path, dtype="float32", device="cpu", quantize=quantize)[0]


# Weights


@torch.inference_mode()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"head_dim": 32},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["untied", "tied", "gqa3", "llama3", "linear", "head-dim", "biases"],
)
def test_same_logits_as_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = reference_model(**changes)
    model = load(save_gguf(reference, tmp_path / "m.gguf"))
    check_logits(model, random_ids(), reference(random_ids()).logits)


@torch.inference_mode()
@pytest.mark.parametrize("quant", WRITABLE, ids=by_name)
def test_quantised_logits(tmp_path: Path, quant: Quant) -> None:
    """A quantized file gives the logits of the model with the dequantized weights."""
    block = gguf.GGML_QUANT_SIZES[quant][0]
    size = max(64, block)
    reference = reference_model(hidden_size=size, intermediate_size=size, num_hidden_layers=2)
    model = load(save_gguf(reference, tmp_path / "m.gguf", quant))
    expected = quantised(reference, quant)(random_ids()).logits
    check_logits(model, random_ids(), expected, 1e-4 * max(1, expected.abs().max().item()))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_quantised_families(tmp_path: Path, family: str) -> None:
    """Norms are kept in float32, whose 1 comes off again in Gemma's."""
    changes = {"sliding_window_pattern": 6, "query_pre_attn_scalar": 32} if family == "gemma3" else {}
    reference = reference_model(family, tie_word_embeddings=True, **changes)
    keys = {"gemma3.rope.freq_base_swa": 1e3} if family == "gemma3" else {}
    metadata = byte_tokenizer_metadata() | keys
    model = load(save_gguf(reference, tmp_path / "m.gguf", Quant.Q8_0, metadata))
    expected = quantised(reference, Quant.Q8_0)(random_ids()).logits
    check_logits(model, random_ids(), expected)


@pytest.mark.parametrize("quant", READABLE, ids=by_name)
def test_every_readable_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: Quant) -> None:
    """Whatever its bytes, a tensor reads as gguf itself dequantises it, in blocks of any size."""
    reference = reference_model(hidden_size=256, intermediate_size=32, num_hidden_layers=1, vocab_size=19)
    row_bytes = 256 // gguf.GGML_QUANT_SIZES[quant][0] * gguf.GGML_QUANT_SIZES[quant][1]
    raw = np.random.default_rng(0).integers(0, 256, (19, row_bytes), dtype=np.uint8)
    tensors: dict[str, Any] = gguf_tensors(reference) | {"token_embd.weight": (raw, quant)}
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(reference), tensors)
    with np.errstate(all="ignore"):  # random bytes may spell any float
        expected = quants.dequantize(raw, quant).astype(np.float32)
    for block_weights in [1, 2200, gguf_file.BLOCK_WEIGHTS]:
        monkeypatch.setattr(gguf_file, "BLOCK_WEIGHTS", block_weights)
        with np.errstate(all="ignore"):
            blocks = list(GGUFFile(path).blocks("embed_tokens.weight"))
        rows = max(1, block_weights // 256)
        assert len(blocks) == -(-19 // rows)
        np.testing.assert_array_equal(torch.cat(blocks).numpy(), expected)


@pytest.mark.parametrize("kind", [*UNREADABLE, 4, 999], ids=str)
def test_unreadable_types_are_refused(tmp_path: Path, kind: int) -> None:
    reference = reference_model(hidden_size=256, num_hidden_layers=1)
    path = save_gguf(reference, tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    info = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    struct.pack_into("<I", data, info, kind)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"GGUF type {int(kind)} cannot be read"):
        load(path)


def test_text_in_text_out(tmp_path: Path) -> None:
    path = save_gguf(reference_model(), tmp_path / "m.gguf")
    model, tokenizer = load(path), Tokenizer(path)
    ids = tokenizer.encode("Hello, GGUF")
    assert ids == byte_tokenizer().encode("Hello, GGUF").ids
    assert tokenizer.decode(ids) == "Hello, GGUF"
    assert len(generate(model, tokenizer, ids, SamplingParams(max_new_tokens=5, ignore_eos=True)).token_ids) == 5


# Weights that stay quantized

# Where a block has its float16 scales: the other bytes may be any.
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "TQ2_0": (64,),  # has no scheme
}
FITS_INT8 = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL")  # what int8 takes over without rounding
FLOATS = ("F32", "F16", "BF16")

TypedTensor = tuple[np.ndarray, Quant]


def random_blocks(rows: int, columns: int, kind: str, seed: int) -> TypedTensor:
    """Weights about as large as a model's, of either sign: every code occurs."""
    rng, quant = np.random.default_rng(seed), Quant[kind]
    if kind not in SCALES_AT:
        return quants.quantize(rng.normal(size=(rows, columns), scale=0.1).astype(np.float32), quant), quant
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    raw = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scale = rng.uniform(0.5, 1, raw.shape[:2]) * rng.choice([-1, 1], raw.shape[:2]) * 16.0 ** -(kind[-1] in "KS")
        raw[..., at : at + 2] = (scale / 100).astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = raw[..., 0] % 4 + 120
    return raw.reshape(rows, -1), quant


def save_blocks(path: Path, kinds: dict[str, str], default: str, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """A file whose matrices are random blocks of a type, by their short names; and what gguf makes of them."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 133}
    reference = reference_model(**(sizes | changes))
    tensors: dict[str, Any] = {}
    for seed, (name, tensor) in enumerate(gguf_tensors(reference).items()):
        kind = kinds.get(name.split(".")[-2], default)
        tensors[name] = tensor if tensor.ndim == 1 else random_blocks(*tensor.shape, kind, seed)
    floats = {name: quants.dequantize(*t).astype(np.float32) for name, t in tensors.items() if isinstance(t, tuple)}
    return write_gguf(path, gguf_metadata(reference) | byte_tokenizer_metadata(), tensors), floats


def quantised_parts(model: Any) -> dict[str, tuple[QuantizedWeight, torch.Tensor]]:
    """By GGUF name, the packed weight that a tensor has gone into, and its own rows as floats, as the file has them."""
    attn, mlp = model.layers[0].self_attn, model.layers[0].mlp
    found = {"token_embd": model.embed_tokens, "output": model.lm_head}
    found |= {"blk.0.attn_output": attn.o_proj, "blk.0.ffn_down": mlp.down_proj}
    parts = {f"{name}.weight": (module.weight, module.weight.floats()) for name, module in found.items()}
    for module, names in ((attn.qkv_proj, ("attn_q", "attn_k", "attn_v")), (mlp.gate_up_proj, ("ffn_gate", "ffn_up"))):
        rows = module.weight.floats().split(list(module.parts.values()))
        starts = itertools.accumulate(module.parts.values(), initial=0)
        for name, heads, start, part in zip(
            names, (attn.num_heads, attn.num_kv_heads, None), starts, rows, strict=False
        ):
            if name in ("attn_q", "attn_k"):
                part = torch.from_numpy(llama_cpp_order(part.numpy(), heads))
            parts[f"blk.0.{name}.weight"] = module.weight.part(start)[0], part
    return parts


def assert_taken_over(weight: QuantizedWeight, got: torch.Tensor, expected: np.ndarray, kind: str) -> None:
    """The file's own numbers, to the last bit, or those nearest to them."""
    floats = torch.from_numpy(expected)
    if weight.kind == kind or (weight.kind == "int8" and kind in FITS_INT8):
        assert torch.equal(got, floats)
    else:
        assert torch.equal(got, QuantizedWeight.of(floats, weight.kind).floats())


@pairs(
    kind=[*SCALES_AT, "F32", "F16", "BF16"],
    quantize=["int4", "int8"],
    block_weights=[1, 256 * 6, gguf_file.BLOCK_WEIGHTS],
)
def test_types_kept_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quantize: str, block_weights: int
) -> None:
    """int4 keeps blocks; floats and int8 have the weights nearest to the file's. Read in any pieces."""
    monkeypatch.setattr(gguf_file, "BLOCK_WEIGHTS", block_weights)
    path, floats = save_blocks(tmp_path / "m.gguf", {}, kind)
    model = load(path, quantize)
    for name, (weight, got) in quantised_parts(model).items():
        wide = quantize == "int8" or name in ("token_embd.weight", "output.weight")
        wide = wide or (kind in FLOATS and ".attn_" in name and "output" not in name)
        keeps = quantize == "int4" and kind in SCHEMES
        assert weight.kind == (kind if keeps else "int8" if wide else "int4")
        assert_taken_over(weight, got, floats[name], kind)


@pytest.mark.parametrize(
    ("kinds", "default", "shown"),
    [
        ({}, "Q4_1", "Q4_1"),
        ({"attn_v": "Q6_K", "token_embd": "Q6_K"}, "Q4_K", "Q4_K, Q6_K"),
        ({"attn_k": "Q8_0", "ffn_down": "Q6_K"}, "Q5_0", "Q5_0, Q6_K, Q8_0"),
        ({"attn_q": "IQ4_XS", "ffn_up": "MXFP4", "ffn_down": "Q2_K", "output": "Q3_K"}, "Q5_1", None),
        ({"attn_v": "TQ2_0"}, "Q4_0", "Q4_0, int8"),
    ],
)
def test_quantized_files_keep_their_blocks(
    tmp_path: Path, kinds: dict[str, str], default: str, shown: str | None
) -> None:
    """Without a dtype, or with quantize="auto": every tensor in its own type, if that has a scheme."""
    path, floats = save_blocks(tmp_path / "m.gguf", kinds, default)
    for quantize in (None, "auto"):
        model = load_model(path, device="cpu", quantize=quantize)[0]
        for name, (weight, got) in quantised_parts(model).items():
            kind = kinds.get(name.split(".")[-2], default)
            assert weight.kind == (kind if kind in SCHEMES else "int8")
            assert_taken_over(weight, got, floats[name], kind)
        facts = describe(str(path), device="cpu", quantize=quantize)
        assert facts["weight_bytes"] < facts["parameters"] * 1.2
        if shown is not None:
            assert facts["weights"] == shown
            assert f"in {shown}" in model.summary()
    ids = random_ids()
    with torch.inference_mode():
        expected, got = load(path)(ids), kernel_logits(model, NoCache(len(ids)), ids)
    if default != "Q4_0":  # one of its tensors is rounded
        assert (got - expected).square().mean().sqrt() < 2e-3 * expected.std()


@pytest.mark.parametrize(
    ("kinds", "default", "kept"),
    [
        ({"attn_k": "F16", "ffn_up": "BF16"}, "Q4_0", {"o", "down", "embedding", "head"}),
        ({"token_embd": "F16", "ffn_down": "BF16"}, "Q8_0", {"qkv", "o", "gate_up", "head"}),
    ],
)
def test_matrices_stacked_with_floats(tmp_path: Path, kinds: dict[str, str], default: str, kept: set[str]) -> None:
    """Are floats, as those that are floats in the file."""
    path, _ = save_blocks(tmp_path / "m.gguf", kinds, default)
    model = load_model(path, device="cpu")[0]
    attn, mlp = model.layers[0].self_attn, model.layers[0].mlp
    modules = {"qkv": attn.qkv_proj, "o": attn.o_proj, "gate_up": mlp.gate_up_proj, "down": mlp.down_proj}
    modules |= {"embedding": model.embed_tokens, "head": model.lm_head}
    assert {name for name, module in modules.items() if isinstance(module.weight, QuantizedWeight)} == kept
    for dtype in ("float32", torch.float32):
        model = load_model(path, dtype=dtype, device="cpu")[0]
        assert not any(isinstance(m, QuantizedWeight) for m in model.modules())


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    path, _ = save_blocks(tmp_path / "m.gguf", {}, "Q4_K")
    info = read_header(path)[1]["blk.0.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\x00\x7c")
    with pytest.raises(ValueError, match=r"down_proj.weight holds a NaN, an infinity, or a number too large"):
        load_model(path, device="cpu")


# Split files


def save_split(folder: Path, files: int) -> tuple[Path, list[Path]]:
    """A file, and the same in several."""
    whole, _ = save_blocks(folder / "m.gguf", {"ffn_down": "Q8_0"}, "Q4_1")
    metadata, tensors = read_header(whole)
    names, parts = list(tensors), []
    for number in range(files):
        part = folder / f"split-{number + 1:05}-of-{files:05}.gguf"
        writer = gguf.GGUFWriter(part, "llama", use_temp_file=False)
        for key, value in metadata.items() if number == 0 else ():
            if key == "general.architecture":
                continue
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_array(key, list(value))
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", files)
        writer.add_int32("split.tensors.count", len(names))
        for name in names[number::files]:
            info = tensors[name]
            raw = np.frombuffer(whole.read_bytes(), np.uint8, info.nbytes, info.offset)
            if Quant(info.type) is Quant.F32:
                writer.add_tensor(name, raw.view(np.float32).reshape(info.shape))
            else:
                writer.add_tensor(name, raw.reshape(info.shape[0], -1), raw_dtype=Quant(info.type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return whole, parts


def test_split_files(tmp_path: Path) -> None:
    """Any of them stands for the model; a missing one is named."""
    whole, parts = save_split(tmp_path, 3)
    ids = random_ids()
    with torch.inference_mode():
        expected = load_model(whole, device="cpu")[0](ids)
        for part in (parts[0], parts[2]):
            assert torch.equal(load_model(part, device="cpu")[0](ids), expected)
    assert Tokenizer(str(parts[1])).encode("abc") == Tokenizer(str(whole)).encode("abc")
    renamed = tmp_path / "single.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(ValueError, match=r"single.gguf: split.count is 3, but by its name it should be 1"):
        GGUFFile(renamed)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=r"split-00002-of-00003.gguf: split.no is 2, but by its name it should be 1"):
        GGUFFile(parts[0])
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"is one of 3 files, of which split-00002-of-00003.gguf is not beside"):
        GGUFFile(parts[0])


def test_quantized_files_become_floats_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = save_blocks(tmp_path / "m.gguf", {}, "Q4_1")
    monkeypatch.setenv("INFER_KERNELS", "0")
    assert not any(isinstance(m, QuantizedWeight) for m in load_model(path, device="cpu")[0].modules())


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "gemma3", "glm4", "gpt_neox", "gpt2"])
@pytest.mark.parametrize(("kind", "quantize"), [("Q4_1", "int4"), ("Q8_0", "int8")])
def test_families_kept_quantised(tmp_path: Path, family: str, kind: str, quantize: str) -> None:
    """Near what the dequantised file computes: only the embedding is rounded again, and by kernels the activations."""
    reference = reference_model(family, tie_word_embeddings=True)
    path = save_gguf(reference, tmp_path / "m.gguf", Quant[kind])
    model, exact = load(path, quantize), load(path)
    assert model.lm_head.weight is model.embed_tokens.weight
    ids = random_ids()
    expected = exact(ids)
    for got in (model(ids), kernel_logits(model, NoCache(len(ids)), ids)):
        off = (got - expected).square().mean().sqrt() / expected.std()
        assert off < (0.1 if quantize == "int4" else 2e-3)


# The header


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_agrees_with_reader(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    metadata, tensors = read_header(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert {name: _plain(value) for name, value in metadata.items()} == fields
    assert list(tensors) == [tensor.name for tensor in reader.tensors]
    for expected in reader.tensors:
        tensor = tensors[expected.name]
        assert tensor.shape == tuple(int(n) for n in reversed(expected.shape))
        assert (tensor.type, tensor.offset, tensor.nbytes) == (
            expected.tensor_type,
            expected.data_offset,
            expected.n_bytes,
        )


@pytest.mark.parametrize("alignment", [None, 8, 128])
def test_header_of_all_value_types(tmp_path: Path, alignment: int | None) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = gguf.GGUFValueType
    values = {
        kind.UINT8: 255,
        kind.INT8: -128,
        kind.UINT16: 65535,
        kind.INT16: -32768,
        kind.UINT32: 2**32 - 1,
        kind.INT32: -(2**31),
        kind.FLOAT32: 0.1,
        kind.BOOL: True,
        kind.STRING: "a ▁ 🦙\n\0",
        kind.UINT64: 2**64 - 1,
        kind.INT64: -(2**63),
        kind.FLOAT64: 0.1,
    }
    for value_type, value in values.items():
        writer.add_key_value(f"x.{value_type.name}", value, value_type)
        writer.add_key_value(f"x.{value_type.name}.list", [value] * 3, kind.ARRAY, value_type)
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, shape in {"one": (5,), "two": (3, 4), "three": (2, 3, 4)}.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_agrees_with_reader(tmp_path / "m.gguf")


@pytest.mark.slow
def test_header_of_a_real_file() -> None:
    assert_agrees_with_reader(pull(BUILTIN[DEFAULT_MODEL]))


def test_nested_arrays(tmp_path: Path) -> None:
    """The format allows them, but neither llama.cpp nor any model."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x"
    data += struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ2B", 0, 2, 7, 8) + struct.pack("<IQB", 0, 1, 9)
    (tmp_path / "m.gguf").write_bytes(data)
    refuse(tmp_path / "m.gguf", "nested arrays")


# Files that are refused


def refuse(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "only 0 bytes"),
        (b"GGUF", "only 4 bytes"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 "),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0), "header does not end"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(40), "header does not end"),  # a huge key
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<I", 77) + bytes(40), "header does not end"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<IIQ", 9, 4, 2**62) + bytes(40),
            "header does not end",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<IIQ", 9, 8, 2**62) + bytes(40),
            "header does not end",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture None is not supported; supported: .*llama"),
    ],
)
def test_damaged_headers(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(contents)
    refuse(path, message)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = save_gguf(reference_model(num_hidden_layers=1), tmp_path / "whole.gguf").read_bytes()
    start = min(tensor.offset for tensor in read_header(tmp_path / "whole.gguf")[1].values())
    path = tmp_path / "m.gguf"
    for size in [*range(0, start, 97), start - 33]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"damaged or cut short|only .* bytes"):
            read_header(path)
    for size in (start, start + 1, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        refuse(path, rf"cut short: its tensors end at byte [\d,]+, the file at {size:,}")


@pytest.fixture
def parts() -> tuple[dict[str, Any], dict[str, Any]]:
    model = reference_model(num_hidden_layers=2)
    return gguf_metadata(model), dict(gguf_tensors(model))


Parts = tuple[dict[str, Any], dict[str, Any]]


def test_unsupported_architecture(tmp_path: Path, parts: Parts) -> None:
    refuse(write_gguf(tmp_path / "m.gguf", *parts, arch="mamba"), "'mamba' is not supported; supported: .*llama")


def test_missing_tensors(tmp_path: Path, parts: Parts) -> None:
    del parts[1]["blk.1.ffn_up.weight"]
    refuse(write_gguf(tmp_path / "m.gguf", *parts), "lacks tensors: layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("blk.0.attn_q_norm.weight", "layers.0.self_attn.q_norm.weight"),
        ("blk.0.ssm_a.weight", "blk.0.ssm_a.weight"),
        ("blk.0.post_ffw_norm.weight", "blk.0.post_ffw_norm.weight"),
    ],
    ids=["of another family", "of none", "by the name of another family"],
)
def test_extra_tensors(tmp_path: Path, parts: Parts, stored: str, named: str) -> None:
    parts[1][stored] = np.ones(16, np.float32)
    refuse(write_gguf(tmp_path / "m.gguf", *parts), f"unknown tensors: {named}")


def test_wrong_shape(tmp_path: Path, parts: Parts) -> None:
    parts[1]["blk.0.ffn_up.weight"] = np.ones((95, 64), np.float32)
    refuse(write_gguf(tmp_path / "m.gguf", *parts), r"up_proj.weight has shape \[95, 64\].*requires \[96, 64\]")


@pytest.mark.parametrize(
    "key", ["embedding_length", "block_count", "attention.head_count", "context_length", "feed_forward_length"]
)
def test_missing_metadata(tmp_path: Path, parts: Parts, key: str) -> None:
    del parts[0][f"llama.{key}"]
    refuse(write_gguf(tmp_path / "m.gguf", *parts), f"lacks llama.{key}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "lacks llama.rope.scaling.factor"),
        ({"llama.rope.dimension_count": 8}, "RoPE over 8 of 16"),
        ({"llama.attention.head_count": 0}, "head"),
        ({"split.count": 3}, "split.count is 3, but by its name it should be 1"),
    ],
)
def test_unsupported_settings(tmp_path: Path, parts: Parts, changes: dict[str, Any], message: str) -> None:
    refuse(write_gguf(tmp_path / "m.gguf", parts[0] | changes, parts[1]), message)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"rope.scaling.type": "yarn"}, "lacks qwen3.rope.scaling.factor"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern must be"),
        (
            "gemma3",
            {"attention.sliding_window_pattern": 0},
            "pattern must be a positive integer .*, not 0",
        ),
        ("gemma3", {"attention.sliding_window_pattern": [True] * 4}, "4 layer_types for 2 layers"),
    ],
)
def test_unsupported_family_settings(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    model = reference_model(family, num_hidden_layers=2)
    metadata = gguf_metadata(model) | byte_tokenizer_metadata() | {f"{family}.{k}": v for k, v in changes.items()}
    refuse(write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(model), arch=family), rf"m\.gguf: .*{message}")


@pytest.mark.parametrize(
    ("family", "missing"), [("qwen3", "attn_q_norm"), ("gemma3", "attn_k_norm"), ("gemma3", "post_ffw_norm")]
)
def test_missing_norms(tmp_path: Path, family: str, missing: str) -> None:
    model = reference_model(family, num_hidden_layers=2)
    tensors = {name: tensor for name, tensor in gguf_tensors(model).items() if name != f"blk.1.{missing}.weight"}
    metadata = gguf_metadata(model) | byte_tokenizer_metadata()
    refuse(write_gguf(tmp_path / "m.gguf", metadata, tensors, arch=family), r"lacks tensors: layers\.1\..*norm")


def test_partial_blocks(tmp_path: Path, parts: Parts) -> None:
    path = write_gguf(tmp_path / "m.gguf", *parts)
    data = bytearray(path.read_bytes())
    info = data.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 2 * 8
    struct.pack_into("<I", data, info, Quant.Q4_K)  # rows of 96 weights, blocks of 256
    path.write_bytes(data)
    refuse(path, "rows of 96 weights cannot be cut into blocks of 256")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing\.gguf"):
        load(tmp_path / "nothing.gguf")


def test_config_without_vocab_size_counts_the_tokens(tmp_path: Path, parts: Parts) -> None:
    del parts[0]["llama.vocab_size"]
    metadata = parts[0] | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(128)]}
    assert ModelConfig.from_pretrained(str(write_gguf(tmp_path / "m.gguf", metadata, parts[1]))).vocab_size == 128


# Byte-level BPE


@pytest.fixture(scope="module")
def byte_level() -> ByteLevelBPETokenizer:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS * 3 + ["the quick brown fox " * 5, "1234567890 " * 5], 500, min_frequency=2)
    return trained


def byte_level_metadata(trained: ByteLevelBPETokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocab) + [3, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": len(vocab),
        "tokenizer.ggml.bos_token_id": len(vocab),
    }


LLAMA3_REGEX = (  # as in Llama 3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = (  # as in Qwen2's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_REGEX = (  # as in tiktoken's o200k_base
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_regex(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ),
        ("llama-bpe", _by_regex(LLAMA3_REGEX)),
        ("dbrx", _by_regex(LLAMA3_REGEX)),
        ("qwen2", _by_regex(QWEN2_REGEX)),
        ("tekken", _by_regex(TEKKEN_REGEX)),
        ("gpt-4o", _by_regex(GPT4O_REGEX)),
        ("olmo", pre_tokenizers.ByteLevel(add_prefix_space=False)),
    ],
)
def test_byte_level_by_pre_tokenizer(byte_level: ByteLevelBPETokenizer, pre: str, expected: Any) -> None:
    metadata = byte_level_metadata(byte_level, pre)
    rebuilt = build_tokenizer(metadata)
    reference = Backend.from_str(byte_level.to_str())
    reference.pre_tokenizer = expected
    composes = pre in ("qwen2", "olmo")
    if composes:
        reference.normalizer = normalizers.NFC()
    reference.add_special_tokens(["<|end|>"])
    reference.add_tokens([AddedToken("<tool>", normalized=False)])
    for text in [*TEXTS, "a<|end|>b <tool>c<tool>"]:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text).ids
        kept = unicodedata.normalize("NFC", text) if composes else text
        assert rebuilt.decode(ids, skip_special_tokens=False) == kept
    end = metadata["tokenizer.ggml.eos_token_id"]
    starts_with_bos = pre in ("llama-bpe", "tekken")
    assert (rebuilt.encode("x").ids[0] == end) == starts_with_bos
    assert rebuilt.encode("a<|end|>b<tool>", add_special_tokens=False).ids.count(end) == 1
    assert rebuilt.decode(rebuilt.encode("a<|end|>b<tool>").ids) == "ab<tool>"


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "a 12345": {
            "gpt-2 exaone4 mpt": ["a", "Ġ12345"],
            "smollm starcoder refact command-r qwen2 stablelm2 tekken": ["a", "Ġ", "1", "2", "3", "4", "5"],
            "llama-bpe falcon3 glm4 gpt-4o deepseek-v3": ["a", "Ġ", "123", "45"],
            "superbpe": ["aĠ", "12", "345"],
        },
        "helloWorld I'LL": {
            "gpt-2 refact": ["helloWorld", "ĠI", "'", "LL"],
            "llama-bpe qwen2 dbrx": ["helloWorld", "ĠI", "'LL"],
            "gpt-4o llama4": ["hello", "World", "ĠI'LL"],
            "tekken": ["hello", "World", "ĠI", "'LL"],
            "deepseek-coder": ["helloWorld", "ĠI", "'", "LL"],
            "superbpe": ["helloWorldĠI'LL"],
        },
    }.items(),
)
def test_pre_tokenizers_differ(text: str, expected: dict[str, list[str]]) -> None:
    for names, pieces in expected.items():
        for name in names.split():
            assert [piece for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == pieces, name


def test_unknown_tokenizers_are_refused(byte_level: ByteLevelBPETokenizer) -> None:
    with pytest.raises(ValueError, match=r"'kimi-k2' is not supported; supported: .*gpt-2.*qwen2"):
        build_tokenizer(byte_level_metadata(byte_level, "kimi-k2"))
    with pytest.raises(ValueError, match="'bert' is not supported"):
        build_tokenizer({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": []})


@pytest.mark.parametrize("pre", ["default", None])
def test_a_file_that_names_no_pre_tokenizer(
    byte_level: ByteLevelBPETokenizer, pre: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, except for GPT-2, whose pre-tokenizer it gets."""
    metadata = byte_level_metadata(byte_level, "default")
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    for arch, lines in (("gpt2", 0), ("llama", 1)):
        rebuilt = build_tokenizer(metadata | {"general.architecture": arch})
        assert (
            rebuilt.encode("a 12345").ids
            == build_tokenizer(byte_level_metadata(byte_level, "gpt-2")).encode("a 12345").ids
        )
        err = capsys.readouterr().err
        assert err.count("does not name its pre-tokenizer") == err.count("\n") == lines


def test_special_tokens_of_phi3_take_the_space_after_them(tmp_path: Path) -> None:
    spm = train_sentencepiece(tmp_path, control_symbols=["<|end|>"])
    for arch, taken in (("phi3", True), ("llama", False)):
        rebuilt = build_tokenizer(sentencepiece_metadata(spm) | {"general.architecture": arch})
        tight, loose = (rebuilt.encode(f"a<|end|>{space}the", add_special_tokens=False).ids for space in ("", " \n"))
        assert (tight == loose) == taken
        tight, loose = (rebuilt.encode(f"a<s>{space}the", add_special_tokens=False).ids for space in ("", " \n"))
        assert tight != loose


def test_a_file_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tokenizer"):
        Tokenizer(save_gguf(reference_model(num_hidden_layers=1), tmp_path / "m.gguf", metadata={}))


def test_chat_template_and_special_tokens(tmp_path: Path, byte_level: ByteLevelBPETokenizer) -> None:
    metadata = byte_level_metadata(byte_level, "gpt-2") | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tokenizer = Tokenizer(save_gguf(reference_model(num_hidden_layers=1), tmp_path / "m.gguf", metadata=metadata))
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.eos_token == tokenizer.bos_token == "<|end|>"
    assert tokenizer.eos_token_id == metadata["tokenizer.ggml.eos_token_id"]
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"])


# SentencePiece


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor, *, prefix: bool = True) -> dict[str, Any]:
    """What llama.cpp's converter writes for a SentencePiece model."""

    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.is_byte(i):
            return 6
        return 4 if model.id_to_piece(i) in USER_SYMBOLS else 1

    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("symbols", [[], USER_SYMBOLS], ids=["plain", "user-symbols"])
def test_sentencepiece(tmp_path: Path, prefix: bool, symbols: list[str]) -> None:
    spm = train_sentencepiece(tmp_path, add_dummy_prefix=prefix, user_defined_symbols=symbols)
    rebuilt = build_tokenizer(sentencepiece_metadata(spm, prefix=prefix))
    for text in SENTENCEPIECE_TEXTS + SYMBOL_TEXTS + random_texts(symbols):
        assert_agrees_with_sentencepiece(rebuilt, spm, text)


@pytest.mark.parametrize("prefix", [True, False])
def test_user_symbols_stored_with_spaces(tmp_path: Path, prefix: bool) -> None:
    """As Gemma's files have them, with a score that says nothing."""
    spm = train_sentencepiece(tmp_path, add_dummy_prefix=prefix, user_defined_symbols=USER_SYMBOLS)
    metadata = sentencepiece_metadata(spm, prefix=prefix)
    for symbol in USER_SYMBOLS:
        i = metadata["tokenizer.ggml.tokens"].index(symbol)
        metadata["tokenizer.ggml.tokens"][i] = symbol.replace("▁", " ")
        metadata["tokenizer.ggml.scores"][i] = -1000.0
    rebuilt = build_tokenizer(metadata)
    spaces = [f"{' ' * n}the{' ' * m}of" for n in range(8) for m in range(8)]
    for text in SENTENCEPIECE_TEXTS + SYMBOL_TEXTS + spaces + random_texts([" ", "  ", "   "]):
        if "▁" not in text:
            assert_agrees_with_sentencepiece(rebuilt, spm, text)
    if not prefix:  # transformers looks for "▁▁" before spaces turn into "▁", SentencePiece after
        ids = [*spm.encode("the "), spm.piece_to_id("▁▁"), *spm.encode(" of")]
        assert rebuilt.encode("the ▁▁ of", add_special_tokens=False).ids == ids != spm.encode("the ▁▁ of")


def test_gemma_decodes_fillers_but_not_marks() -> None:
    kinds = {"<unk>": 2, "<bos>": 3, "<unused7>": 3, "<end_of_turn>": 3, "<start_of_image>": 4, "<b>": 4, "a": 1}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*kinds],
        "tokenizer.ggml.scores": [0.0] * len(kinds),
        "tokenizer.ggml.token_type": [*kinds.values()],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    rebuilt = build_tokenizer(metadata)
    assert rebuilt.encode("".join(kinds)).ids == [*range(len(kinds))]
    assert rebuilt.decode([*range(len(kinds))]) == "<unused7><b>a"


def test_sentencepiece_without_bos(tmp_path: Path) -> None:
    spm = train_sentencepiece(tmp_path)
    rebuilt = build_tokenizer(sentencepiece_metadata(spm) | {"tokenizer.ggml.add_bos_token": False})
    assert rebuilt.encode("the").ids == spm.encode("the")


def test_sentencepiece_control_tokens_in_text(tmp_path: Path) -> None:
    """SentencePiece reads none from text; chat templates write them, so they count here."""
    spm = train_sentencepiece(tmp_path)
    rebuilt = build_tokenizer(sentencepiece_metadata(spm))
    ids = rebuilt.encode("<s>the</s>", add_special_tokens=False).ids
    assert ids == [spm.bos_id(), *spm.encode("the"), spm.eos_id()]
    assert rebuilt.decode(ids) == "the"
