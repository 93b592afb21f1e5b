"""Tokenizers of folders without tokenizer.json: SentencePiece's tokenizer.model and Mistral's tekken.json.

Both are read as the metadata that a GGUF file would have, so one builder makes them.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from infer.loader.checkpoint import TokenizerParts
from infer.loader.files import MB, is_there, parse_json, read_text
from infer.loader.gguf_tokenizer import CONTROL, NORMAL, PRE_TOKENIZERS, UNKNOWN, build_tokenizer
from infer.loader.text_tokenizers import BYTE_LEVEL, MAX_VALUES, MAX_VOCABULARY
from infer.values import short_repr

MAX_TEKKEN, MAX_SENTENCEPIECE = 64 * MB, 16 * MB  # the largest known have 19 and 5 MB
BPE, UNIGRAM = 2, 1  # SentencePiece's kinds of models
# Special tokens of tekken.json where the file does not list them, before <SPECIAL_20> and so on.
_TEKKEN_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_TEKKEN_SPECIAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"]
_TEKKEN_SPECIAL += ["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]


def read_tekken(path: Path) -> tuple[TokenizerParts, str]:
    """The tokenizer without a chat template, and the name of the template that the file's version stands for."""
    text = read_text(path, MAX_TEKKEN)
    if sum(map(text.count, ",:[{")) > MAX_VALUES:
        raise ValueError(f"{path} has more values than the limit of {MAX_VALUES:,}")
    try:
        metadata, version = _tekken_metadata(parse_json(text))
        backend = build_tokenizer(metadata)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a tekken tokenizer: {type(error).__name__} {error!s:.100}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return TokenizerParts(backend, None, "<s>", "</s>"), "mistral" if version in ("v1", "v2", "v3") else "ministral3"


def _tekken_metadata(contents: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    config = contents["config"]
    if (config["pattern"],) != PRE_TOKENIZERS["tekken"].splits:
        raise ValueError(f"the pattern {short_repr(config['pattern'])} is not supported")
    num_special = config["default_num_special_tokens"]
    if not 0 <= num_special < config["default_vocab_size"] <= MAX_VOCABULARY:
        raise ValueError(f"it has {num_special} special tokens of {config['default_vocab_size']}")
    special = [f"<SPECIAL_{i}>" for i in range(num_special)]
    listed = contents.get("special_tokens") or [{"rank": i, "token_str": t} for i, t in enumerate(_TEKKEN_SPECIAL)]
    for token in listed:
        special[token["rank"]] = token["token_str"]
    letters = {byte: letter for letter, byte in BYTE_LEVEL.items()}
    vocabulary = contents["vocab"][: config["default_vocab_size"] - num_special]
    words = [
        "".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"]))
        for entry in sorted(vocabulary, key=lambda entry: entry["rank"])
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": special + words,
        "tokenizer.ggml.token_type": [CONTROL] * num_special + [NORMAL] * len(words),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges_from_ranks(words)],
        "tokenizer.ggml.bos_token_id": special.index("<s>"),
    }, str(config["version"])


def merges_from_ranks(words: list[str]) -> Iterator[tuple[str, str]]:
    """tiktoken merges the pair whose union has the lowest rank: every split of each word in two, in this order."""
    ranks = {word: rank for rank, word in enumerate(words)}
    for word in words:
        cuts = ((word[:i], word[i:]) for i in range(1, len(word)))
        pairs = [(ranks[left], ranks[right]) for left, right in cuts if left in ranks and right in ranks]
        yield from ((words[left], words[right]) for left, right in sorted(pairs))


def read_sentencepiece(path: Path, added: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """added: `added_tokens_decoder` of tokenizer_config.json, by id; tokens beyond the model's are added."""
    if not is_there(path):
        raise FileNotFoundError(f"there is no file {path}")
    if (size := path.stat().st_size) > MAX_SENTENCEPIECE:
        raise ValueError(f"{path} has {size:,} bytes: the limit is {MAX_SENTENCEPIECE:,}")
    try:
        backend = build_tokenizer(_sentencepiece_metadata(path.read_bytes()))
    except (LookupError, TypeError, AttributeError, struct.error, UnicodeDecodeError):
        raise ValueError(f"{path} is not a SentencePiece model, or damaged") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for i, token in sorted((int(i), token) for i, token in added.items()):
        if i >= backend.get_vocab_size():
            flags = {name: token.get(name, False) for name in ("lstrip", "rstrip", "single_word", "special")}
            backend.add_tokens([AddedToken(token["content"], normalized=False, **flags)])
            if backend.token_to_id(token["content"]) != i:
                raise ValueError(f"{path.with_name('tokenizer_config.json')}: the ids of added tokens have gaps at {i}")
    return backend


def _sentencepiece_metadata(model: bytes) -> dict[str, Any]:
    pieces = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(model):
        if number == 1:
            pieces.append({2: 0.0, 3: NORMAL} | dict(_fields(value)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if trainer.get(3, UNIGRAM) != BPE:
        raise ValueError("only BPE models are supported, not Unigram")
    if normalizer.get(2) or normalizer.get(4, True):
        name = normalizer.get(1, b"").decode()
        raise ValueError(f"the normalization {short_repr(name)}, or without repeated spaces, is not supported")
    bos = trainer.get(41, 1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece[1].decode() for piece in pieces],
        "tokenizer.ggml.scores": [piece[2] for piece in pieces],
        "tokenizer.ggml.token_type": [piece[3] for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, True)),
        "tokenizer.ggml.unknown_token_id": next((i for i, p in enumerate(pieces) if p[3] == UNKNOWN), None),
        "tokenizer.ggml.bos_token_id": bos if bos < len(pieces) else None,
    }


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message: int, float or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise IndexError

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        elif kind == 2:
            size = varint()
            if at + size > len(message):
                raise IndexError
            yield number, message[at : at + size]
            at += size
        elif kind == 5:
            yield number, struct.unpack_from("<f", message, at)[0]
            at += 4
        else:
            yield number, message[at : at + 8]
            at += 8
