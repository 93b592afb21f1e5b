"""`text_offset`: where each token begins in the text."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from infer.engine.text import Detokenizer
from infer.server.wire import text_offsets


def byte_level() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ã", "©"), ("a", "Ã")]  # "aÃ" ends within a character
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "<s>"]
    vocab = {token: i for i, token in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    replaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(replaced)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


LETTERS = set(pre_tokenizers.ByteLevel.alphabet())
BACKENDS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}
any_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def offsets_of(backend: Any, ids: list[int]) -> list[int]:
    return text_offsets(Detokenizer(backend), ids, 0)


@any_backend
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=" aabé東🦙", min_size=1, max_size=20))
def test_offsets_cut_the_text(backend: Any, text: str) -> None:
    ids = backend.encode(text).ids
    data, starts = backend.decode(ids).encode(), []
    at = len(data) - sum(sizes := [size_of(backend.id_to_token(i)) for i in ids])  # negative: a first blank is dropped
    for size in sizes:
        starts.append(len(data[: max(at, 0)].decode(errors="ignore")))
        at += size
    assert offsets_of(backend, ids) == starts


def size_of(token: str) -> int:
    """Bytes of a token."""
    if token.startswith("<0x"):
        return 1
    return len(token) if set(token) <= LETTERS else len(token.replace("▁", " ").encode())


@any_backend
def test_tokens_without_text(backend: Any) -> None:
    special, a = backend.token_to_id("<s>"), backend.token_to_id("a")
    assert offsets_of(backend, [special, a, special, special, a, a]) == [0, 0, 1, 1, 1, 2]


@any_backend
def test_bytes_that_never_become_a_character(backend: Any) -> None:
    stray, a = backend.encode("東").ids[-1], backend.token_to_id("a")
    assert offsets_of(backend, [a, stray, a, a]) == [0, 1, 2, 3]


def test_a_token_that_ends_within_a_character() -> None:
    backend = byte_level()
    ids = [backend.token_to_id(token) for token in ("aÃ", "©", "Ġa", "a")]
    assert backend.decode(ids) == "aé aa"
    assert offsets_of(backend, ids) == [0, 1, 2, 4]
