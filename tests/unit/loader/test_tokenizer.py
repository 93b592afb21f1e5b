"""Limits on the length of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import folder  # noqa: F401

from infer.loader.tokenizer import SLICE, Tokenizer, TooManyTokens


class TestMaxTokens:
    """A text that is far too long is refused after a part of it; one that fits gets the same ids."""

    @pytest.fixture
    def tokenizer(self, folder: Path) -> Tokenizer:  # noqa: F811
        return Tokenizer(folder)

    def test_refused(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        lengths: list[int] = []
        encode = Tokenizer._encode

        def counted(self: Tokenizer, backend: Any, text: str, *others: Any) -> list[int]:
            lengths.append(len(text))
            return encode(self, backend, text, *others)

        monkeypatch.setattr(Tokenizer, "_encode", counted)
        with pytest.raises(TooManyTokens, match="more than 1000 tokens"):
            tokenizer.encode("1" * 10**6, max_tokens=1000)
        assert sum(lengths[1:]) == SLICE
        with pytest.raises(TooManyTokens):
            tokenizer.encode_chat([{"role": "user", "content": "1" * 10**5}], max_tokens=1000)

    @pytest.mark.parametrize("length", [10, SLICE + 1, 3 * SLICE])
    def test_the_same_ids(self, length: int, tokenizer: Tokenizer) -> None:
        text = ("hello the sea " * length)[:length]
        expected = tokenizer.encode(text)
        for most in (len(expected), len(expected) // 2 + 1):
            assert tokenizer.encode(text, max_tokens=most) == expected
