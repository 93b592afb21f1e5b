"""Model files with something in them changed, through the command line: never a traceback, a hang or too much memory.

INFER_FUZZ_SEED chooses other cases than 0 does; a failure names the seed and the case.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amount import amount
from harness import Server, assert_bounded
from model_files import (
    ARGS,
    GEMMA3,
    HOSTILE,
    gguf_bytes,
    metadata,
    paths_of,
    replaced,
    sentencepiece,
    weights,
    write_folder,
    write_index,
    write_nanogpt,
)

SEED = int(os.environ.get("INFER_FUZZ_SEED", "0"))
CASES = amount(2400, 40)
EXTREMES = (0, 1, 2**7 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
COMMANDS = (
    ("info",),
    ("generate", "abc cab", "--max-new-tokens", "1", "--model"),
    ("generate", "abc cab", "--max-new-tokens", "2", "--chat", "--temperature", "0", "--model"),
    ("generate", "abc", "--max-new-tokens", "1", "--quantize", "int4", "--model"),
    ("perplexity", "--text", "TEXT"),
)

Mutation = Callable[[Path, random.Random], Path]  # makes a model in a folder, and says what to open


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    write_folder(folder / "folder")
    write_index(write_folder(folder / "index"))
    write_folder(folder / "gemma3", GEMMA3)
    write_nanogpt(folder / "nanogpt")
    (folder / "gguf").mkdir()
    (folder / "gguf" / "m.gguf").write_bytes(gguf_bytes())
    (folder / "gguf" / "s.gguf").write_bytes(gguf_bytes(metadata() | sentencepiece()))
    return folder


JSON_FILES = {
    "folder": ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    "gemma3": ("config.json",),
    "index": ("model.safetensors.index.json",),
}
BINARY_FILES = {"folder": ("model.safetensors",), "gguf": ("m.gguf", "s.gguf"), "nanogpt": ("ckpt.pt", "meta.pkl")}


def other_json_value(folder: Path, rng: random.Random) -> Path:
    """Any value of any JSON file is a hostile one."""
    model = folder / rng.choice(list(JSON_FILES))
    path = model / rng.choice(JSON_FILES[model.name])
    contents = json.loads(path.read_text())
    way = rng.choice(list(paths_of(contents)))
    path.write_text(json.dumps(replaced(contents, way, rng.choice(HOSTILE))))
    return model


def other_config_value(folder: Path, rng: random.Random) -> Path:
    path = folder / rng.choice(["folder", "gemma3"]) / "config.json"
    contents = json.loads(path.read_text())
    path.write_text(json.dumps(contents | {rng.choice(list(contents)): rng.choice(HOSTILE)}))
    return path.parent


def other_part_of_tokenizer(folder: Path, rng: random.Random) -> Path:
    """Parts by name, with values that do not fit them."""
    path = folder / "folder" / "tokenizer.json"
    contents = json.loads(path.read_text())
    section = rng.choice(["normalizer", "pre_tokenizer", "post_processor", "decoder", "model"])
    part: dict[str, Any] = {"type": rng.choice(PARTS)}
    for name in rng.sample(SETTINGS, rng.randrange(6)):
        part[name] = rng.choice(
            [*HOSTILE, {"String": ""}, {"Regex": "("}, {"Regex": "(a+)+$"}, "Isolated", [part | {}]]
        )
    contents[section] = contents[section] | part if section == "model" else part
    path.write_text(json.dumps(contents))
    return path.parent


PARTS = [
    "Sequence",
    "Replace",
    "Prepend",
    "NFKC",
    "Precompiled",
    "BertNormalizer",
    "ByteLevel",
    "Metaspace",
    "Split",
    "Digits",
    "Whitespace",
    "Punctuation",
    "TemplateProcessing",
    "BertProcessing",
    "RobertaProcessing",
    "Fuse",
    "Strip",
    "ByteFallback",
    "WordPiece",
    "CTC",
    "BPE",
    "Unigram",
    "WordLevel",
]
SETTINGS = [
    "normalizers",
    "pretokenizers",
    "processors",
    "decoders",
    "pattern",
    "content",
    "prepend",
    "precompiled_charsmap",
    "replacement",
    "prepend_scheme",
    "behavior",
    "invert",
    "single",
    "pair",
    "special_tokens",
    "sep",
    "cls",
    "trim_offsets",
    "add_prefix_space",
    "vocab",
    "merges",
    "unk_token",
    "unk_id",
    "dropout",
    "byte_fallback",
    "fuse_unk",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "start",
    "stop",
]


def other_bytes(folder: Path, rng: random.Random) -> Path:
    """Bytes are others, gone, or twice there; mostly near the start, where headers are."""
    files = JSON_FILES | BINARY_FILES
    model = folder / rng.choice(list(files))
    path = model / rng.choice(files[model.name])
    data = bytearray(path.read_bytes())
    near = rng.choice([64, 512, 4096, len(data)])
    at = rng.randrange(min(near, len(data)))
    if path.suffix in (".pt", ".pkl") and rng.random() < 0.5:
        at = len(data) - 1 - at  # the directory of a zip file
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.choice([1, 1, 4, 32])):
            data[min(len(data) - 1, at + rng.randrange(32))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + rng.randrange(1, 100)]
    elif kind == 3:
        data[at:at] = rng.choice([b"\0" * 8, b"\xff" * 8, bytes(data[at : at + 100]), b"{[", rng.randbytes(9)])
    else:
        size = rng.choice([4, 8])
        data[at : at + size] = rng.choice(EXTREMES).to_bytes(8, "little")[:size]
    path.write_bytes(data)
    return path if path.suffix in (".gguf", ".pt") else model / "ckpt.pt" if path.suffix == ".pkl" else model


def other_gguf_field(folder: Path, rng: random.Random) -> Path:
    """A number of the header: a count, a length, a type, a dimension, an offset or a value."""
    fields: list[tuple[int, str]] = []
    data = bytearray(gguf_bytes(metadata() | rng.choice([{}, sentencepiece()]), fields=fields))
    for at, code in rng.sample(fields, rng.choice([1, 1, 2])):
        size = struct.calcsize(f"<{code}")
        data[at : at + size] = rng.choice([*EXTREMES, 2, 3, 8, 9, rng.getrandbits(64)]).to_bytes(8, "little")[:size]
    path = folder / "gguf" / "m.gguf"
    path.write_bytes(data)
    return path


def other_gguf_value(folder: Path, rng: random.Random) -> Path:
    """A key's value is of another type, or extreme."""
    keys = metadata() | rng.choice([{}, sentencepiece()])
    values: list[tuple[int, Any]] = [(kind, number) for kind in (0, 1, 4, 5, 10, 11) for number in (0, 1, 100)]
    values += [(10, 2**64 - 1), (11, -1), (5, -1), (4, 2**32 - 1), (7, True), (12, 1e300), (6, float("nan")), (12, 0.0)]
    values += [(8, text) for text in ("", "x", "\0", "llama", "gpt2", "$A $B", "x" * 60_000, b"\xff")]
    values += [(9, (kind, [])) for kind in (0, 4, 6, 8)] + [
        (9, (8, ["", "", "a b", " ", "$A"] * 8)),
        (9, (4, [0] * 5000)),
    ]
    values += [(9, (6, [float("inf")] * 40)), (9, (8, ["a"] * 40)), (9, (5, [rng.randrange(7) for _ in range(40)]))]
    for key in rng.sample(list(keys), rng.choice([1, 1, 3])):
        keys[key] = rng.choice(values)
    path = folder / "gguf" / "m.gguf"
    path.write_bytes(gguf_bytes(keys))
    return path


def other_safetensors_header(folder: Path, rng: random.Random) -> Path:
    path = folder / "folder" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    way = rng.choice(list(paths_of(header)))
    other = rng.choice([*HOSTILE, *EXTREMES, "F16", "BF16", "I64", "BOOL", "F8_E4M3", [0], [4096, 0], [2**63, 2**63]])
    text = json.dumps(replaced(header, way, other)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return path.parent


def other_model_args(folder: Path, rng: random.Random) -> Path:
    args = ARGS | {rng.choice([*ARGS, "dropout", "model_type"]): rng.choice([v for v in HOSTILE if v != "\ud800"])}
    return write_nanogpt(folder / "nanogpt", model_args=args)


def other_meta(folder: Path, rng: random.Random) -> Path:
    path = folder / "nanogpt" / "meta.pkl"
    meta = pickle.loads(path.read_bytes())
    way = rng.choice(list(paths_of(meta)))
    path.write_bytes(pickle.dumps(replaced(meta, way, rng.choice(HOSTILE)), rng.randrange(6)))
    return folder / "nanogpt" / "ckpt.pt"


def other_config_of_index(folder: Path, rng: random.Random) -> Path:
    model = folder / "index"
    index = {"weight_map": dict.fromkeys(weights(), "model-1.safetensors")}
    names = index["weight_map"]
    names[rng.choice([*names, "x"])] = rng.choice(["config.json", "none", *[v for v in HOSTILE if isinstance(v, str)]])
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


MUTATIONS: tuple[Mutation, ...] = (
    other_json_value,
    other_config_value,
    other_part_of_tokenizer,
    other_bytes,
    other_bytes,
    other_gguf_field,
    other_gguf_field,
    other_gguf_value,
    other_safetensors_header,
    other_model_args,
    other_meta,
    other_config_of_index,
)


@pytest.mark.parametrize("case", range(CASES))
def test_changed_files(server: Server, originals: Path, tmp_path: Path, case: int) -> None:
    rng = random.Random(f"{SEED} {case}")
    folder = tmp_path / "models"
    shutil.copytree(originals, folder)
    mutate = MUTATIONS[case % len(MUTATIONS)]
    path = mutate(folder, rng)
    text = tmp_path / "text"
    text.write_text("abc cab")
    command = [str(text) if word == "TEXT" else word for word in rng.choice(COMMANDS)]
    outcome = server.run(*command, path)
    try:
        assert_bounded(outcome, path.stat().st_size if path.is_file() else 0)
        lines = outcome.err.decode().splitlines()
        assert outcome.status == 0 or sum(line.startswith("error: ") for line in lines) == 1, outcome
        assert len(outcome.err) < 2000, outcome
        assert b"INFER_TRACEBACK" not in outcome.err, outcome  # the last resort: somebody should have foreseen it
        assert b"panicked" not in outcome.err, outcome
    except AssertionError as error:
        raise AssertionError(f"INFER_FUZZ_SEED={SEED}, case {case}, {mutate.__name__}, {command}: {error}") from None
