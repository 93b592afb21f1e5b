"""Tokenizers: from tokenizer.json, and made from plain vocabularies (one id per character, GPT-2's byte-level BPE)."""

from __future__ import annotations

import base64
import os
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
MAX_PARTS = 100  # normalizers, pre-tokenizers, post-processors and decoders
MAX_GROWTH = 100  # how many times longer they may make a text


def character_tokenizer(ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """A character without an id is refused when text is encoded: there is no unknown token to stand for it."""
    tokenizer = tokenizers.Tokenizer(WordLevel(dict(ids), unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def gpt2_tokenizer(folder: Path) -> TokenizerParts:
    """From tokenizer.json, or vocab.json and merges.txt."""
    whole, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if not is_there(whole) and not (is_there(vocabulary) and is_there(merges)):
        raise FileNotFoundError(
            f"{folder} has no tokenizer: put GPT-2's tokenizer.json there, or its vocab.json and merges.txt"
        )
    if is_there(whole):
        return TokenizerParts(read_tokenizer(whole), None, END_OF_TEXT, END_OF_TEXT)
    read_text(merges, MAX_TOKENIZER)
    read_text(vocabulary, MAX_TOKENIZER)
    with rust_calls(f"{folder} has a tokenizer that cannot be read"):
        tokenizer = tokenizers.Tokenizer(BPE.from_file(str(vocabulary), str(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return TokenizerParts(tokenizer, None, END_OF_TEXT, END_OF_TEXT)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """From tokenizer.json, once it is clear that it does not blow a text up."""
    text = read_text(path, MAX_TOKENIZER)
    try:
        check_growth(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer: it {error}") from None
    with rust_calls(f"{path} is not a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode(tokenizer.encode("A b1 é\n").ids)  # some parts fail only when they are used
    return tokenizer


def check_growth(tokenizer: str) -> None:
    """Refuse parts that make a text many times longer: each multiplies what those before it have made."""
    if sum(map(tokenizer.count, ",:[{")) > MAX_VALUES:
        raise ValueError(f"holds more than {MAX_VALUES:,} values")
    contents = parse_json(tokenizer)
    parts = 0
    growth = 1
    unseen = [contents.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    while unseen and growth <= MAX_GROWTH and parts <= MAX_PARTS:
        part = unseen.pop()
        if isinstance(part, list):
            unseen += part
        elif isinstance(part, dict):
            parts += "type" in part
            growth *= _growth(part)
            # The pieces of a template are no parts.
            unseen += [value for name, value in part.items() if name not in ("single", "pair", "special_tokens")]
    if growth > MAX_GROWTH:
        raise ValueError(f"may make a text more than {MAX_GROWTH} times longer")
    if parts > MAX_PARTS:
        raise ValueError(f"has more than {MAX_PARTS} normalizers, pre-tokenizers and the like")


def _growth(part: Mapping[str, Any]) -> int:
    """How many times longer a part makes a text at most. Normal forms are left out: the second changes nothing."""
    kind = part.get("type")
    if kind == "Replace" and isinstance(content := part.get("content"), str):
        return len(unicodedata.normalize("NFKD", content)) + 1  # 1: an empty pattern keeps what it stands between
    if kind == "ByteLevel":
        return 2
    if kind == "Precompiled" and isinstance(encoded := part.get("precompiled_charsmap"), str):
        table = base64.b64decode(encoded)
        texts = table[4 + int.from_bytes(table[:4], "little") :]  # behind a trie, whose size comes first
        return max(map(len, texts.split(b"\0")), default=0) + 1
    if kind == "TemplateProcessing" and isinstance(pieces := part.get("single"), list):
        return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces))
    return 1


@contextmanager
def rust_calls(problem: str) -> Iterator[None]:
    """Calls to `tokenizers`: what they raise becomes a ValueError, if it is none.

    A panic is no Exception, and writes a report to standard error first, which nobody is to see.
    """
    try:
        with _quiet:
            yield
    except (KeyboardInterrupt, SystemExit, ValueError):
        raise
    except BaseException as error:
        raise ValueError(f"{problem}: {error!s:.200}") from None


class _Quiet:
    """Standard error, as file descriptor 2, goes nowhere while any thread is within."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self._stderr: int | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._within += 1
            if self._within == 1:
                try:
                    self._stderr = os.dup(2)
                except OSError:  # it is closed
                    self._stderr = None
                    return
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 2)
                os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0 and self._stderr is not None:
                os.dup2(self._stderr, 2)
                os.close(self._stderr)


_quiet = _Quiet()
