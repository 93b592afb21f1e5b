"""Tokenizers from tokenizer.json, from characters, and from GPT-2's vocab.json and merges.txt, with limits on each."""

from __future__ import annotations

import base64
import os
import re
import threading
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from infer.loader.checkpoint import TokenizerParts
from infer.loader.files import MB, is_there, parse_json, read_text

END_OF_TEXT = "<|endoftext|>"
MAX_TOKENIZER = 128 * MB  # bytes of tokenizer.json; Gemma's, the largest known, has 33 MB
MAX_VALUES = 2_500_000  # in it, all counted; Gemma's has 2.2 million
MAX_VOCABULARY, MAX_MERGES = 400_000, 600_000  # each takes up to 500 bytes while read
MAX_PIECES = 4_000_000  # characters of a Unigram vocabulary, 26 bytes each
MAX_PARTS = 2**14  # characters and values of normalizers, pre-tokenizers, post-processors and decoders together
MAX_GROWTH = 100  # factor by which they may lengthen a text


def character_tokenizer(ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """One id per character. Encoding a character without an id is an error: there is no unknown token."""
    tokenizer = tokenizers.Tokenizer(WordLevel(dict(ids), unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def gpt2_tokenizer(folder: Path) -> TokenizerParts:
    """From tokenizer.json, or vocab.json and merges.txt."""
    tokenizer_json, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if is_there(tokenizer_json):
        return TokenizerParts(read_tokenizer(tokenizer_json), None, END_OF_TEXT, END_OF_TEXT)
    if not (is_there(vocabulary) and is_there(merges)):
        raise FileNotFoundError(
            f"{folder} has no tokenizer: put GPT-2's tokenizer.json there, or its vocab.json and merges.txt"
        )
    for file in (merges, vocabulary):
        read_text(file)  # refused if it is too large, or not text
    with rust_calls(f"{folder} has a tokenizer that cannot be read"):
        tokenizer = tokenizers.Tokenizer(BPE.from_file(str(vocabulary), str(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return TokenizerParts(tokenizer, None, END_OF_TEXT, END_OF_TEXT)


def bytes_of(token: str, text: str) -> bytes:
    """The bytes of a token whose text has replacement characters, which stand for partial characters or themselves."""
    if byte := BYTE.fullmatch(token):
        return bytes.fromhex(byte[1])
    try:
        return bytes(BYTE_LEVEL[letter] for letter in token)
    except KeyError:
        return text.encode()


def _byte_level() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's name of a byte token
BYTE_LEVEL = _byte_level()


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """From tokenizer.json, refused if it could make a text many times longer."""
    text = read_text(path, MAX_TOKENIZER)
    try:
        check_growth(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer: it {error}") from None
    with rust_calls(f"{path} is not a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode(tokenizer.encode("A b1 é\n").ids)  # some parts fail only when used
    return tokenizer


def check_growth(tokenizer: str) -> None:
    """Refuse components that make a text many times longer: each multiplies the length that it gets."""
    if tokenizer.count(":") > 2 * MAX_VOCABULARY or sum(map(tokenizer.count, ",:[{")) > MAX_VALUES:
        raise ValueError(f"has more values than the limit of {MAX_VALUES:,}, or of {2 * MAX_VOCABULARY:,} with names")
    contents = parse_json(tokenizer)
    model = contents.get("model")
    if isinstance(model, dict):
        check_vocabulary(model.get("vocab") or (), model.get("merges") or ())
    size, growth = 0, 1
    unseen = [contents.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    while unseen and growth <= MAX_GROWTH and size <= MAX_PARTS:
        part = unseen.pop()
        size += len(part) + 1 if isinstance(part, str) else 1
        if isinstance(part, list):
            unseen += part
        elif isinstance(part, dict):
            growth *= _growth(part)
            # The table of a Precompiled normalizer is the only long string in real files.
            unseen += [name for name in part if name != "precompiled_charsmap"]
            unseen += [value for name, value in part.items() if name != "precompiled_charsmap"]
    if growth > MAX_GROWTH:
        raise ValueError(f"may make a text more than {MAX_GROWTH} times longer")
    if size > MAX_PARTS:
        raise ValueError("has longer normalization or splitting rules than any known tokenizer")


def check_vocabulary(vocabulary: Any, merges: Any) -> None:
    """Refuse more tokens and merges than any model has: in memory they take many times their size on disk."""
    for what, values, most in (("tokens", vocabulary, MAX_VOCABULARY), ("merges", merges, MAX_MERGES)):
        if isinstance(values, list | dict) and len(values) > most:
            raise ValueError(f"has {len(values):,} {what}: the limit is {most:,}")
    if isinstance(vocabulary, list):
        pieces = (entry[0] for entry in vocabulary if isinstance(entry, list) and entry)
        if sum(len(piece) for piece in pieces if isinstance(piece, str)) > MAX_PIECES:
            raise ValueError(f"has tokens of more than {MAX_PIECES:,} characters")


def _growth(part: Mapping[str, Any]) -> int:
    """How many times longer a component makes a text at most. Unicode normal forms do not multiply."""
    kind = part.get("type")
    if kind == "Replace" and isinstance(content := part.get("content"), str):
        return len(unicodedata.normalize("NFKD", content)) + 1  # 1: an empty pattern keeps the text
    if kind == "ByteLevel":
        return 2
    if kind == "Precompiled" and isinstance(encoded := part.get("precompiled_charsmap"), str):
        table = base64.b64decode(encoded)
        texts = table[4 + int.from_bytes(table[:4], "little") :]  # after a trie, whose size comes first
        return max(map(len, texts.split(b"\0")), default=0) + 1
    if kind == "TemplateProcessing" and isinstance(pieces := part.get("single"), list):
        return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces))
    return 1


@contextmanager
def rust_calls(problem: str) -> Iterator[None]:
    """Calls to `tokenizers`: any error becomes a ValueError.

    A Rust panic is a BaseException, and writes a report to standard error first. Commands suppress the report; in a
    server it goes to the log, since suppressing it would lose lines of other threads.
    """
    try:
        with _quiet():
            yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):  # GeneratorExit: Ctrl-C came around the call
        raise
    except BaseException as error:
        raise ValueError(f"{problem}: {error!s:.200}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Redirect file descriptor 2 to /dev/null, unless other threads may write to it."""
    try:
        stderr = os.dup(2) if threading.active_count() == 1 else None
    except OSError:  # it is closed
        stderr = None
    if stderr is None:
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
