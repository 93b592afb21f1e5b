"""Model files of each hostile class, in each format: refused in one line, within bounds."""

from __future__ import annotations

import base64
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import ALL, amount
from harness import MB, Server, assert_bounded, assert_refused
from model_files import (
    ARGS,
    ARRAY,
    BOOL,
    CONFIG,
    FLOAT32,
    I32,
    INT32,
    Q4_0,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    gguf_bytes,
    gguf_tensors,
    gpt_weights,
    metadata,
    random_floats,
    sentencepiece,
    tokenizer_json,
    weights,
    write_folder,
    write_index,
    write_nanogpt,
)
from safetensors.torch import save_file


def some(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """All cases in the full run, else a few from all over."""
    everything = list(cases)
    return amount(everything, everything[:: -(-len(everything) // count)])


GENERATE = ("generate", "abc", "--max-new-tokens", "1", "--model")


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def refuse(server: Server, path: Path, *, says: str = "") -> None:
    outcome = server.run(*GENERATE, path)
    assert_refused(outcome, size_of(path))
    assert says in outcome.err.decode(), outcome
    assert len(outcome.err) < 1000, outcome


def write_gguf(path: Path, **contents: Any) -> Path:
    path.write_bytes(gguf_bytes(**contents))
    return path


def test_they_run(server: Server, tmp_path: Path) -> None:
    """As they are: else the tests below would show nothing."""
    text = tmp_path / "text"
    text.write_text("abc cab")
    for path in (
        write_folder(tmp_path / "folder"),
        write_index(write_folder(tmp_path / "index")),
        write_nanogpt(tmp_path / "nanogpt"),
        write_gguf(tmp_path / "m.gguf"),
        write_gguf(tmp_path / "s.gguf", keys=metadata() | sentencepiece()),
    ):
        for command in some([GENERATE, ("info",), ("perplexity", "--text", str(text))]):
            outcome = server.run(*command, path)
            assert outcome.status == 0, outcome


# Types and ranges


@pytest.mark.parametrize(
    ("name", "value"),
    some(
        [
            ("vocab_size", True),
            ("hidden_size", 10**18),
            ("hidden_size", 10**400),
            ("num_hidden_layers", 10**6),
            ("num_hidden_layers", True),
            ("head_dim", 2**40),
            ("max_position_embeddings", 1e18),
            ("rms_norm_eps", float("nan")),
            ("rms_norm_eps", True),
            ("rope_theta", 1e-300),
            ("rope_theta", 10**400),
            ("rope_theta", False),
            ("rope_scaling", ["llama3"]),
            ("rope_scaling", {"rope_type": ["llama3"]}),
            ("rope_scaling", CONFIG["rope_scaling"] | {"high_freq_factor": 1.0}),
            ("rope_scaling", {"rope_type": "linear", "factor": 1e-300}),
            ("hidden_act", ["silu"]),
            ("model_type", ["llama"]),
            ("model_type", "x" * 100_000),
            ("layer_types", [["full_attention"]]),
            ("layer_types", "full_attention"),
            ("tie_word_embeddings", "yes"),
            ("attention_bias", 1),
            ("eos_token_id", [[1]]),
            ("eos_token_id", -1),
            ("bos_token_id", 1.5),
            ("quantization_config", "int4"),
            ("text_config", [1]),
        ]
    ),
    ids=lambda value: f"{value!s:.30}",
)
def test_config(server: Server, tmp_path: Path, name: str, value: Any) -> None:
    refuse(server, write_folder(tmp_path / "m", {name: value}), says="config.json: " if name[:4] != "rope" else "")


@pytest.mark.parametrize(
    ("key", "value"),
    some(
        [
            ("general.architecture", (ARRAY, (STRING, ["llama"]))),
            ("general.alignment", (UINT32, 0)),
            ("general.alignment", (STRING, "32")),
            ("split.count", (STRING, "x" * 10_000)),
            ("llama.block_count", (BOOL, True)),
            ("llama.block_count", (UINT64, 10**18)),
            ("llama.embedding_length", (FLOAT32, 32.0)),
            ("llama.attention.head_count", (ARRAY, (UINT32, [2]))),
            ("llama.attention.layer_norm_rms_epsilon", (FLOAT32, float("nan"))),
            ("llama.attention.layer_norm_rms_epsilon", (BOOL, True)),
            ("llama.rope.freq_base", (FLOAT32, 0.0)),
            ("llama.rope.scaling.type", (ARRAY, (STRING, ["linear"]))),
            ("llama.rope.scaling.factor", (FLOAT32, float("nan"))),
            ("tokenizer.ggml.tokens", (STRING, "abc")),
            ("tokenizer.ggml.tokens", (ARRAY, (UINT32, [1, 2]))),
            ("tokenizer.ggml.merges", (ARRAY, (UINT8, [1, 2]))),
            ("tokenizer.ggml.merges", (ARRAY, (STRING, ["ab"]))),
            ("tokenizer.ggml.token_type", (STRING, "x")),
            ("tokenizer.ggml.bos_token_id", (STRING, "x")),
            ("tokenizer.ggml.bos_token_id", (INT32, -1)),
            ("tokenizer.ggml.bos_token_id", (UINT32, 10_000)),
            ("tokenizer.ggml.eos_token_id", (ARRAY, (STRING, ["x"]))),
            ("tokenizer.ggml.add_bos_token", (STRING, "no")),
            ("tokenizer.ggml.model", (ARRAY, (STRING, ["gpt2"]))),
            ("tokenizer.ggml.pre", (UINT32, 1)),
            ("tokenizer.chat_template", (UINT32, 1)),
        ]
    ),
    ids=lambda value: f"{value!s:.30}",
)
def test_metadata(server: Server, tmp_path: Path, key: str, value: tuple[int, Any]) -> None:
    refuse(server, write_gguf(tmp_path / "m.gguf", keys=metadata() | {key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    some(
        [
            ("scores", (ARRAY, (FLOAT32, [1.0]))),
            ("scores", (ARRAY, (FLOAT32, [float("nan")] * 40))),
            ("scores", (ARRAY, (STRING, ["x"] * 40))),
            ("unknown_token_id", (UINT32, 10_000)),
            ("add_space_prefix", (STRING, "x")),
        ]
    ),
)
def test_sentencepiece_metadata(server: Server, tmp_path: Path, key: str, value: tuple[int, Any]) -> None:
    keys = metadata() | sentencepiece() | {f"tokenizer.ggml.{key}": value}
    refuse(server, write_gguf(tmp_path / "m.gguf", keys=keys))


@pytest.mark.parametrize(
    "args",
    some(
        [
            {"n_layer": True},
            {"n_layer": 10**6},
            {"n_embd": 2**70},
            {"n_embd": [[[]]]},
            {"bias": "yes"},
            {"dropout": float("nan")},
            {"model_type": {}},
            {"vocab_size": 10**5000},
            {"block_size": torch.tensor(64)},
        ]
    ),
    ids=lambda args: next(iter(args)),
)
def test_model_args(server: Server, tmp_path: Path, args: dict[str, Any]) -> None:
    refuse(server, write_nanogpt(tmp_path, model_args=ARGS | args), says="ckpt.pt")


def test_model_args_that_refer_to_themselves(server: Server, tmp_path: Path) -> None:
    """Printed in full, 2**60 entries."""
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    refuse(server, write_nanogpt(tmp_path, model_args=ARGS | {"n_layer": value}))


@pytest.mark.parametrize(
    "name", some(["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
)
@pytest.mark.parametrize(
    "text", some(['{"a":' + "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a": 1, "a": 2}', "\0", "9" * 9999])
)
def test_json(server: Server, tmp_path: Path, name: str, text: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).write_text(text)
    refuse(server, folder, says=name)


@pytest.mark.parametrize("name", some(["bos_token", "eos_token", "chat_template"]))
@pytest.mark.parametrize(
    "value", some([1, ["x"], {"content": 1}, {"content": ["x"]}, "\ud800", [{"name": "default", "template": 1}]])
)
def test_tokenizer_config(server: Server, tmp_path: Path, name: str, value: Any) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({name: value}))
    assert_bounded(server.run(*GENERATE, folder, "--chat"))


@pytest.mark.parametrize(
    "file",
    some(
        [
            "../m/model-1.safetensors",
            "{folder}/model-1.safetensors",
            "x/../model-1.safetensors",
            "\0",
            "",
            ".",
            1,
            None,
            ["x"],
            "x" * 999,
        ]
    ),
    ids=lambda file: f"{file!s:.20}",
)
def test_index_names_files_elsewhere(server: Server, tmp_path: Path, file: Any) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "x").mkdir()
    name = file.format(folder=folder) if isinstance(file, str) else file
    refuse(server, write_index(folder, name), says="weight_map")


@pytest.mark.parametrize("names", some([1, ["a"], "x", None]))
def test_index_of_something_else(server: Server, tmp_path: Path, names: Any) -> None:
    folder = write_index(write_folder(tmp_path / "m"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refuse(server, folder)


# Weights


def with_weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = weights()
    return tensors | {name: change(tensors[name])}


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    "dtype", some([torch.bool, torch.int64, torch.int8, torch.uint8, torch.complex64, torch.float8_e5m2])
)
def test_weights_that_are_no_floats(server: Server, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = with_weight("model.norm.weight", lambda tensor: tensor.to(dtype))
    refuse(server, write_folder(tmp_path / "m", tensors=tensors), says="model.norm.weight is in")
    model = gpt_weights()
    model["transformer.ln_f.weight"] = model["transformer.ln_f.weight"].to(dtype)
    refuse(server, write_nanogpt(tmp_path / "n", model=model), says="ln_f.weight")


def test_integers_in_gguf(server: Server, tmp_path: Path) -> None:
    tensors = gguf_tensors()
    dimensions, _, data = tensors["output_norm.weight"]
    refuse(server, write_gguf(tmp_path / "m.gguf", tensors=tensors | {"output_norm.weight": (dimensions, I32, data)}))


def test_two_names_for_a_weight(server: Server, tmp_path: Path) -> None:
    extra = {"language_model.model.norm.weight": torch.ones(32)}
    refuse(server, write_folder(tmp_path / "m", tensors=weights() | extra), says="same weight")
    keys = [*gguf_tensors().items()]
    data = gguf_bytes(tensors=dict(keys), tensor_count=len(keys))
    first, second = b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"
    (tmp_path / "m.gguf").write_bytes(data.replace(second, first))
    refuse(server, tmp_path / "m.gguf", says="twice")
    same = metadata()
    value = same.pop("llama.vocab_size")
    (tmp_path / "k.gguf").write_bytes(
        gguf_bytes(same | {"llama.vocab_sizf": value, "llama.vocab_sizg": value}).replace(b"sizg", b"sizf")
    )
    refuse(server, tmp_path / "k.gguf", says="twice")


@pytest.mark.parametrize("divisor", some([0.0, -1.0, float("nan"), float("inf"), 1e-45]))
def test_rope_divisors(server: Server, tmp_path: Path, divisor: float) -> None:
    tensors = gguf_tensors() | {"rope_freqs.weight": ((8,), 0, struct.pack("<8f", *[1.0] * 7, divisor))}
    refuse(server, write_gguf(tmp_path / "m.gguf", tensors=tensors), says="RoPE")


@pytest.mark.parametrize("shape", some([(4,), (4, 2), (0,), (10**6,)]))
def test_rope_divisors_of_another_number(server: Server, tmp_path: Path, shape: tuple[int, ...]) -> None:
    count = 1
    for n in shape:
        count *= n
    tensors = gguf_tensors() | {"rope_freqs.weight": (shape, 0, struct.pack("<f", 1.0) * count)}
    refuse(server, write_gguf(tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize("value", some([float("nan"), float("inf"), -float("inf")]))
@pytest.mark.parametrize("name", some(["embed_tokens", "norm", "layers.0.mlp.up_proj", "layers.0.self_attn.k_proj"]))
@pytest.mark.parametrize("form", some(["float32", "bfloat16", "float16", "int4", "int8"]))
def test_weights_that_are_not_finite(server: Server, tmp_path: Path, name: str, value: float, form: str) -> None:
    stored = f"model.{name}.weight"
    folder = write_folder(tmp_path / "m", tensors=with_weight(stored, set_first(value)))
    option = ("--quantize", form) if form.startswith("int") else ("--dtype", form)
    for sampling in (("--temperature", "0"), ("--temperature", "1")):
        outcome = server.run(*GENERATE, folder, *option, *sampling)
        assert outcome.status == 2, outcome
        assert outcome.out == b"", outcome
        assert f"{name}.weight holds a NaN" in outcome.err.decode() or b"not finite" in outcome.err, outcome


@pytest.mark.parametrize("quantize", some([(), ("--quantize", "int4")]))
def test_blocks_that_are_not_finite(server: Server, tmp_path: Path, quantize: tuple[str, ...]) -> None:
    """The scale of a quantized block."""
    tensors, block = gguf_tensors(), struct.pack("<e", float("nan")) + bytes(16)
    tensors["blk.0.ffn_up.weight"] = ((32, 32), Q4_0, block * 32)
    outcome = server.run(*GENERATE, write_gguf(tmp_path / "m.gguf", tensors=tensors), *quantize)
    assert outcome.status == 2, outcome
    assert b"holds a NaN" in outcome.err


def test_weights_too_large_for_the_dtype(server: Server, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors=with_weight("model.norm.weight", set_first(1e6)))
    assert_refused(server.run(*GENERATE, folder, "--dtype", "float16"))


@pytest.mark.parametrize(
    "command",
    some(
        [
            GENERATE,
            ("perplexity", "--text"),
            ("bench", "--trials", "1", "--warmup", "0", "--prompt-tokens", "4", "--new-tokens", "4", "--model"),
        ]
    ),
)
def test_sums_that_overflow(server: Server, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Weights are finite, logits are not."""
    tensors = weights()
    tensors["model.norm.weight"] = torch.full((32,), 3e38)
    tensors["model.embed_tokens.weight"] *= 1e3
    text = tmp_path / "text"
    text.write_text("abc cab")
    words = (*command, text) if command[-1] == "--text" else command
    outcome = server.run(*words, write_folder(tmp_path / "m", tensors=tensors))
    assert outcome.status == 2, outcome
    assert b"NaN" in outcome.err


# Bombs


def test_compressed_checkpoint(server: Server, tmp_path: Path) -> None:
    """2 MB that inflate to 1.5 GB, or less of both."""
    bomb, length = tmp_path / "ckpt.pt", amount(150, 30) * 10 * MB
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("archive/version", b"3\n")
        with target.open("archive/data.pkl", "w", force_zip64=True) as data:
            data.write(b"\x80\x02X" + struct.pack("<I", length))
            for _ in range(length // (10 * MB)):
                data.write(bytes(10 * MB))
            data.write(b".")
    assert bomb.stat().st_size < 2 * MB
    for command in (("info",), GENERATE):
        assert_refused(server.run(*command, bomb), bomb.stat().st_size, 5)


@pytest.mark.skipif(not ALL, reason="takes seconds to write")
def test_checkpoint_of_many_parts(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    with zipfile.ZipFile(path, "w") as target:
        for i in range(100_000):
            target.writestr(f"archive/{i}", b"")
    refuse(server, path)


def test_checkpoint_of_a_long_pickle(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("archive/data.pkl", b"\x80\x02(" + b"]" * 20_000_000 + b"l.")
        target.writestr("archive/version", b"3\n")
    refuse(server, path)


def test_meta_of_a_long_pickle(server: Server, tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x02(" + b"}" * 10_000_000 + b"l.")
    refuse(server, path, says="meta.pkl")
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04(" + b"}\x94" * 1_000_000 + b"l.")
    refuse(server, path, says="meta.pkl")


def test_tensors_that_repeat_a_number(server: Server, tmp_path: Path) -> None:
    """A kilobyte that says it is a gigabyte."""
    model = {name: torch.ones(1).expand(tensor.shape) for name, tensor in gpt_weights().items()}
    model["transformer.wte.weight"] = torch.ones(1).expand(2**23, 32)
    refuse(
        server,
        write_nanogpt(tmp_path, model=model, model_args=ARGS | {"vocab_size": 2**23}),
        says="larger than the file",
    )


def test_tensors_that_overlap(server: Server, tmp_path: Path) -> None:
    data = gguf_bytes(metadata() | {"llama.vocab_size": (UINT32, 40)})
    tensors = {name: (dimensions, kind, b"") for name, (dimensions, kind, _) in gguf_tensors().items()}
    tensors["token_embd.weight"] = (32, 40), 0, random_floats(32 * 40)
    overlapping = gguf_bytes(tensors=dict(reversed(tensors.items())))
    assert len(overlapping) < len(data)
    (tmp_path / "m.gguf").write_bytes(overlapping)
    refuse(server, tmp_path / "m.gguf")


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
PARTS: dict[str, tuple[str, Any]] = {
    "replace": ("normalizer", {"type": "Sequence", "normalizers": [REPLACE] * 5}),
    "regex": (
        "normalizer",
        {"type": "Sequence", "normalizers": [REPLACE | {"pattern": {"Regex": "."}, "content": "aa"}] * 40},
    ),
    "empty pattern": (
        "normalizer",
        {"type": "Sequence", "normalizers": [REPLACE | {"pattern": {"String": ""}, "content": "a"}] * 40},
    ),
    "nested": (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [REPLACE] * 3}] * 2},
    ),
    "bytes": (
        "pre_tokenizer",
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            ]
            * 40,
        },
    ),
    "decoder": ("decoder", {"type": "Sequence", "decoders": [REPLACE] * 5}),
    "template": (
        "post_processor",
        {
            "type": "Sequence",
            "processors": [
                {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                    "pair": [],
                    "special_tokens": {},
                }
            ]
            * 40,
        },
    ),
    "charsmap": (
        "normalizer",
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"x" * 10**6).decode()},
    ),
    "long text": ("normalizer", {"type": "Prepend", "prepend": "a" * 10**7}),
    "long pattern": ("pre_tokenizer", split(r"[\\p{L}\\p{N}]" * 50_000)),
    "long template": (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 2000 + [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [1] * 20_000, "tokens": ["x"] * 20_000}},
        },
    ),
    "many": ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 100_000}),
}


@pytest.mark.parametrize("name", some(PARTS))
@pytest.mark.parametrize("added", some([False, True]))
def test_tokenizers_that_multiply(server: Server, tmp_path: Path, name: str, added: bool) -> None:
    """added: a token that is normalized as soon as the file is read."""
    folder, contents = write_folder(tmp_path / "m"), tokenizer_json()
    part, value = PARTS[name]
    contents[part] = value
    if added:
        contents["added_tokens"][0] |= {"normalized": True, "content": "a" * 50}
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    refuse(server, folder, says="tokenizer.json")


def test_tokenizer_that_tries_for_ever(server: Server, tmp_path: Path) -> None:
    folder, contents = write_folder(tmp_path / "m"), tokenizer_json()
    contents["pre_tokenizer"] = split("(a+)+$")
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    assert_refused(server.run("generate", "a" * 60 + "!", "--model", folder))


@pytest.mark.parametrize(
    "model",
    some(
        [
            {"vocab": {f"t{i}": i for i in range(450_000)}},
            {"vocab": {f"t{i}": i for i in range(900_000)}},
            {"merges": [["a", "b"]] * 700_000},
            {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 50_000 + str(i), 0.0] for i in range(400)]},
        ]
    ),
    ids=lambda model: f"{model!s:.20}",
)
def test_large_vocabularies(server: Server, tmp_path: Path, model: dict[str, Any]) -> None:
    folder, contents = write_folder(tmp_path / "m"), tokenizer_json()
    contents["model"] |= model
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    refuse(server, folder, says="tokenizer.json")


@pytest.mark.parametrize("kind", some(["tokens", "merges", "pairs"]))
def test_large_vocabularies_in_gguf(server: Server, tmp_path: Path, kind: str) -> None:
    keys = metadata()
    if kind == "tokens":
        keys |= {"tokenizer.ggml.tokens": (ARRAY, (STRING, [f"{i}" for i in range(500_000)]))}
    elif kind == "merges":
        keys |= {"tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"] * 700_000))}
    else:  # each can be cut in every way
        tokens = ["<unk>", "<s>", "</s>", *("a" * n for n in range(1, 1300))]
        keys |= sentencepiece()
        keys |= {
            "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
            "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0] * len(tokens))),
        }
    refuse(server, write_gguf(tmp_path / "m.gguf", keys=keys))


@pytest.mark.parametrize("values", some(['"a",', '{"a":1},', "[],", '"éé",']))
def test_large_tokenizer_json(server: Server, tmp_path: Path, values: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"added_tokens": [' + values * (20 * MB // len(values.encode())) + "0]}")
    refuse(server, folder)


@pytest.mark.parametrize(
    "name", some(["config.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"])
)
def test_large_settings(server: Server, tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).write_text('{"x": [' + "{}," * (50 * MB // 3) + "0]}")
    refuse(server, folder, says=name)


@pytest.mark.parametrize(
    "token", some(["$A $B", "$A", "a:b", "$0:1", "", " ", "a b", "\0", "x" * 50_000]), ids=lambda t: f"{t!r:.10}"
)
@pytest.mark.parametrize("kind", some(["gpt2", "llama"]))
def test_bos_of_any_text(server: Server, tmp_path: Path, token: str, kind: str) -> None:
    keys = metadata() | (sentencepiece() if kind == "llama" else {})
    tokens = list(keys["tokenizer.ggml.tokens"][1][1])
    tokens[0] = token
    keys |= {"tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)), "tokenizer.ggml.bos_token_id": (UINT32, 0)}
    outcome = server.run(*GENERATE, write_gguf(tmp_path / "m.gguf", keys=keys))
    assert_bounded(outcome)
    if token in ("$A $B", "a:b"):
        assert outcome.status == 0, outcome


def test_long_tokens(server: Server, tmp_path: Path) -> None:
    keys = metadata() | sentencepiece()
    tokens = list(keys["tokenizer.ggml.tokens"][1][1])
    tokens[4:] = [chr(97 + i % 26) * 50_000 for i in range(len(tokens) - 4)]
    keys |= {"tokenizer.ggml.tokens": (ARRAY, (STRING, tokens))}
    for types in (1, 4):
        keys |= {"tokenizer.ggml.token_type": (ARRAY, (INT32, [2, 3, 3] + [types] * (len(tokens) - 3)))}
        refuse(server, write_gguf(tmp_path / "m.gguf", keys=keys))


def empty_arrays(count: int, depth: int = 1) -> bytes:
    """One key that holds so many empty arrays, or one so deep."""
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x" + struct.pack("<I", ARRAY)
    if depth > 1:
        return start + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", UINT8, 0)
    return start + struct.pack("<IQ", ARRAY, count) + struct.pack("<IQ", UINT8, 0) * count


HEADERS: dict[str, Callable[[], bytes]] = {
    "empty arrays": lambda: empty_arrays(5_000_000),
    "nested arrays": lambda: empty_arrays(1, 900),
    "deep arrays": lambda: empty_arrays(1, 100_000),
    "empty strings": lambda: (
        gguf_bytes({"x": (ARRAY, (UINT8, b""))})[:0]
        + b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"x"
        + struct.pack("<IIQ", ARRAY, STRING, 5_000_000)
        + bytes(40_000_000)
    ),
    "short strings": lambda: (
        b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"x"
        + struct.pack("<IIQ", ARRAY, STRING, 5_000_000)
        + (struct.pack("<Q", 2) + b"ab") * 5_000_000
    ),
    "keys": lambda: (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1_000_000)
        + b"".join(struct.pack("<QIIB", 4, i, UINT8, 0) for i in range(1_000_000))
    ),
    "tensors": lambda: (
        b"GGUF"
        + struct.pack("<IQQ", 3, 1_000_000, 0)
        + b"".join(struct.pack("<QIIQIQ", 4, i, 1, 32, 0, 0) for i in range(1_000_000))
    ),
    "dimensions": lambda: (
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcI", 1, b"x", 5_000_000) + bytes(40_000_000)
    ),
    "bytes": lambda: (
        b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"x"
        + struct.pack("<IIQ", ARRAY, UINT8, 100 * MB)
        + bytes(100 * MB)
    ),
    "wide string": lambda: (
        b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"x"
        + struct.pack("<IQ", STRING, 100 * MB + 4)
        + "🦙".encode()
        + b"a" * (100 * MB)
    ),
}


@pytest.mark.parametrize("name", some(HEADERS))
def test_gguf_headers(server: Server, tmp_path: Path, name: str) -> None:
    (tmp_path / "m.gguf").write_bytes(HEADERS[name]())
    refuse(server, tmp_path / "m.gguf")


@pytest.mark.parametrize("shape", some([(2**32, 2**32), (2**63, 2), (0,), (2**64 - 1, 2**64 - 1, 1, 1)]))
def test_gguf_shapes(server: Server, tmp_path: Path, shape: tuple[int, ...]) -> None:
    refuse(server, write_gguf(tmp_path / "m.gguf", tensors=gguf_tensors() | {"output_norm.weight": (shape, 0, b"")}))


def test_safetensors_headers(server: Server, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    headers = [
        b" " * (20 * MB),
        b"[" * 100_000,
        b"{" * 100_000,
        json.dumps({f"x{i}": entry for i in range(200_000)}).encode(),
        json.dumps({"a": entry | {"shape": [2**40, 2**40]}}).encode(),
        json.dumps({"a": entry | {"shape": [2**62, 0], "data_offsets": [0, 0]}}).encode(),
        json.dumps({"a": entry | {"data_offsets": [2**60, 4]}}).encode(),
    ]
    for header in some(headers, 3):
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        refuse(server, folder)
    for length in some([2**64 - 1, 2**63, 2**40, 10 * MB]):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        refuse(server, folder)


def test_an_empty_weight(server: Server, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    save_file(weights() | {"model.norm.weight": torch.ones(0)}, folder / "model.safetensors")
    refuse(server, folder)


# Files that are none


@pytest.mark.parametrize(
    "name",
    some(
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ]
    ),
)
@pytest.mark.parametrize("kind", some(["fifo", "device", "folder"]))
def test_no_plain_files(server: Server, tmp_path: Path, name: str, kind: str) -> None:
    folder = write_folder(tmp_path / "m")
    put(folder / name, kind)
    assert_refused(server.run(*GENERATE, folder, "--chat", seconds=5))


@pytest.mark.parametrize("name", some(["ckpt.pt", "m.gguf", "m.pth", "m.bin", "m"]))
@pytest.mark.parametrize("kind", some(["fifo", "device"]))
@pytest.mark.parametrize("command", some([("info",), GENERATE]))
def test_no_plain_model(server: Server, tmp_path: Path, command: tuple[str, ...], name: str, kind: str) -> None:
    put(tmp_path / name, kind)
    assert_refused(server.run(*command, tmp_path / name, seconds=5))
    if name == "ckpt.pt":
        assert_refused(server.run(*command, tmp_path, seconds=5))


def test_devices(server: Server) -> None:
    for path in some(["/dev/zero", "/dev/random", "/dev/null", "/dev/stdin", "/proc/self/mem", "/proc/kmsg"], 2):
        assert_refused(server.run("info", path, seconds=5))


def test_meta_that_is_no_file(server: Server, tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path)
    put(tmp_path / "meta.pkl", "fifo")
    assert_refused(server.run(*GENERATE, path, seconds=5))


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def test_links(server: Server, tmp_path: Path) -> None:
    """The hub's own folders are made of links to elsewhere: these work, whatever their names."""
    folder = write_folder(tmp_path / "m")
    for path in list(folder.iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert server.run(*GENERATE, folder).status == 0
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert_refused(server.run(*GENERATE, folder))


def test_meta(server: Server, tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path)
    metas = [
        {"stoi": {"a": 10**5000}},
        {"stoi": {"a": True}},
        {"stoi": {"ab": 0}},
        {"stoi": {"\ud800": 0}},
        {"stoi": [("a", 0)]},
        {"stoi": {}},
        [],
    ]
    for meta in some(metas, 2):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
        refuse(server, path)
