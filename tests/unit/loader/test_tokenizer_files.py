"""tokenizer.model and tekken.json, in folders without tokenizer.json."""

from __future__ import annotations

import base64
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from checkpoints import reference_model
from texts import (
    SENTENCEPIECE_TEXTS,
    SYMBOL_TEXTS,
    TEKKEN_REGEX,
    USER_SYMBOLS,
    assert_agrees_with_sentencepiece,
    random_texts,
    train_sentencepiece,
)
from tokenizers import ByteLevelBPETokenizer, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

from infer import Tokenizer
from infer.loader.text_tokenizers import BYTE_LEVEL
from infer.loader.tokenizer_files import read_sentencepiece, read_tekken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model, without a tokenizer."""
    reference_model(num_hidden_layers=1).save_pretrained(tmp_path)
    return tmp_path


# SentencePiece


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("symbols", [[], USER_SYMBOLS], ids=["plain", "user-symbols"])
def test_sentencepiece(tmp_path: Path, prefix: bool, symbols: list[str]) -> None:
    spm = train_sentencepiece(tmp_path, add_dummy_prefix=prefix, user_defined_symbols=symbols)
    backend = read_sentencepiece(tmp_path / "spm.model", {})
    for text in SENTENCEPIECE_TEXTS + SYMBOL_TEXTS + random_texts(symbols):
        assert_agrees_with_sentencepiece(backend, spm, text)


def save_sentencepiece(folder: Path, **settings: Any) -> sentencepiece.SentencePieceProcessor:
    spm = train_sentencepiece(folder)
    (folder / "spm.model").rename(folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **settings}))
    return spm


def test_a_folder_with_tokenizer_model(folder: Path) -> None:
    """Tokens beyond the model's are in tokenizer_config.json."""
    count = train_sentencepiece(folder).get_piece_size()
    added = {
        "1": {"content": "<s>", "special": True},
        f"{count + 1}": {"content": "<tool>"},
        f"{count}": {"content": "<|end|>", "special": True, "rstrip": True},
    }
    spm = save_sentencepiece(folder, added_tokens_decoder=added, chat_template="{{ messages[0].content }}")
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, count + 2)
    assert tokenizer.encode("the<|end|>  of<tool>") == [1, *spm.encode("the"), count, *spm.encode("of"), count + 1]
    assert tokenizer.decode([count, count + 1]) == "<tool>"
    assert tokenizer.encode_chat([{"role": "user", "content": "a</s>"}]) == spm.encode("a</s>")


def test_added_tokens_with_a_gap(folder: Path) -> None:
    save_sentencepiece(folder, added_tokens_decoder={"9999": {"content": "<|end|>"}})
    with pytest.raises(ValueError, match=r"tokenizer_config.json: the ids of added tokens have gaps at 9999"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "unigram"}, "only BPE models are supported, not Unigram"),
        ({"normalization_rule_name": "nmt_nfkc"}, "the normalization 'nmt_nfkc'.* is not supported"),
        ({"remove_extra_whitespaces": True}, "the normalization 'identity', or without repeated spaces, is not"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    train_sentencepiece(tmp_path, **settings)
    with pytest.raises(ValueError, match=f"spm.model: {message}"):
        read_sentencepiece(tmp_path / "spm.model", {})


def test_damaged_sentencepiece(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path)
    path = tmp_path / "spm.model"
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole[: rng.randrange(len(whole))])
        for _ in range(rng.randrange(4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with suppress(ValueError):
            read_sentencepiece(path, {})
    for contents in (b"", b"\xff" * 100, b"PK\x03\x04", b"{}"):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match=r"spm\.model"):
            read_sentencepiece(path, {})


# tekken.json


@pytest.fixture(scope="module")
def trained() -> ByteLevelBPETokenizer:
    texts = [*SENTENCEPIECE_TEXTS, "the quick brown fox " * 5]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts * 3, 600, min_frequency=2)
    return trained


def tekken(trained: ByteLevelBPETokenizer, **changes: Any) -> dict[str, Any]:
    """The words of a tokenizer as a tekken.json: one rank for each, bytes first."""
    words = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    encoded = [base64.b64encode(bytes(BYTE_LEVEL[letter] for letter in word)).decode() for word in words]
    vocabulary = [{"rank": rank, "token_bytes": word, "token_str": None} for rank, word in enumerate(encoded)]
    config = {"pattern": TEKKEN_REGEX, "default_vocab_size": len(words) + 20, "default_num_special_tokens": 30}
    return {"config": config | {"version": "v3"} | changes, "vocab": vocabulary}


def reference(trained: ByteLevelBPETokenizer, num_words: int) -> Backend:
    """By the merges of the training, in which a word's rank is that of its merge."""
    model = json.loads(trained.to_str())["model"]
    kept = {word for word, rank in model["vocab"].items() if rank < num_words}
    merges = [merge for merge in model["merges"] if "".join(merge) in kept]
    backend = Backend.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": {**model, "merges": merges}}))
    split = pre_tokenizers.Split(Regex(TEKKEN_REGEX), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def test_tekken(folder: Path, trained: ByteLevelBPETokenizer) -> None:
    contents = tekken(trained)
    (folder / "tekken.json").write_text(json.dumps(contents))
    tokenizer = Tokenizer(folder)
    num_words = len(contents["vocab"]) - 10  # the file has more than the vocabulary takes
    assert tokenizer.vocab_size == 30 + num_words
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert [tokenizer.token_to_id(token) for token in ("[INST]", "[/INST]", "<SPECIAL_29>")] == [3, 4, 29]
    expected = reference(trained, num_words)
    for text in [*SENTENCEPIECE_TEXTS, *random_texts([])]:
        ids = tokenizer.encode(text)
        assert ids == [1, *(30 + i for i in expected.encode(text).ids)], text
        assert tokenizer.decode(ids) == text


def test_the_version_chooses_the_template(folder: Path, trained: ByteLevelBPETokenizer) -> None:
    chat = [{"role": "system", "content": "the"}, {"role": "user", "content": "of </s>"}]
    for version, expected in (
        ("v3", "<s>[INST]the\n\nof </s>[/INST]"),
        ("v11", "<s>[SYSTEM_PROMPT]the[/SYSTEM_PROMPT][INST]of </s>[/INST]"),
    ):
        (folder / "tekken.json").write_text(json.dumps(tekken(trained, version=version)))
        ids = Tokenizer(folder).encode_chat(chat)
        assert Tokenizer(folder).decode(ids, skip_special_tokens=False) == expected
        assert (ids.count(1), ids.count(3), ids.count(4)) == (1, 1, 1)  # <s>, [INST], [/INST]
        assert ids.count(2) == 0  # what looks like a special token is text


def test_listed_special_tokens(folder: Path, trained: ByteLevelBPETokenizer) -> None:
    special = [{"rank": 0, "token_str": "<unk>", "is_control": True}, {"rank": 7, "token_str": "<s>"}]
    (folder / "tekken.json").write_text(json.dumps(tekken(trained) | {"special_tokens": special}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.bos_token_id == tokenizer.encode("x")[0] == 7
    assert tokenizer.token_to_id("[INST]") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": r"\w+"}, r"the pattern '\\\\w\+' is not supported"),
        ({"pattern": None}, "the pattern None is not supported"),
        ({"default_num_special_tokens": 10**9}, "it has 1000000000 special tokens of"),
        ({"default_vocab_size": 10**9}, "it has 30 special tokens of 1000000000"),
        ({"default_vocab_size": "many"}, "is not a tekken tokenizer: TypeError"),
        ({"default_num_special_tokens": 5}, "is not a tekken tokenizer: IndexError"),
    ],
)
def test_unusable_tekken(tmp_path: Path, trained: ByteLevelBPETokenizer, changes: Any, message: str) -> None:
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(tekken(trained, **changes)))
    with pytest.raises(ValueError, match=rf"tekken\.json:? {message}") as error:
        read_tekken(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("contents", ["", "[]", "{}", '{"config": 1}', '{"config": {}, "vocab": []}'])
def test_not_a_tekken(tmp_path: Path, contents: str) -> None:
    path = tmp_path / "tekken.json"
    path.write_text(contents)
    with pytest.raises(ValueError, match=r"tekken\.json"):
        read_tekken(path)


def test_tokenizer_json_comes_first(folder: Path, trained: ByteLevelBPETokenizer) -> None:
    (folder / "tekken.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"")
    trained.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).vocab_size == trained.get_vocab_size()


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json, tekken\.json or tokenizer\.model"):
        Tokenizer(folder)
