"""Calls to `tokenizers`: panics become errors, and their reports are seen by nobody."""

from __future__ import annotations

import os
import threading
import time

import pytest
import tokenizers
from checkpoints import byte_tokenizer
from tokenizers import Regex, pre_tokenizers
from tokenizers.models import WordLevel

from infer.loader.text_tokenizers import character_tokenizer, rust_calls
from infer.loader.tokenizer import LONG, Tokenizer


def panicking() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), behavior="isolated")
    return tokenizer


def test_panics(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^x fails: Onig"), rust_calls("x fails"):
        panicking().encode("a" * 40 + "!")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_comes_through(error: type[BaseException]) -> None:
    with pytest.raises(error, match=r"^as it is$"), rust_calls("x fails"):
        raise error("as it is")


def test_threads(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever comes last gives standard error back."""
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with rust_calls("x"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with rust_calls("x"):
        leave.set()
        thread.join()
        os.write(2, b"within")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


class TestLongTexts:
    """They are encoded, and decoded, by other calls."""

    def tokenizer(self, backend: tokenizers.Tokenizer) -> Tokenizer:
        made = Tokenizer.__new__(Tokenizer)
        made._single = {}
        made._backend = backend
        return made

    @pytest.mark.parametrize("special", [False, True])
    def test_the_same(self, special: bool) -> None:
        tokenizer, backend = self.tokenizer(byte_tokenizer()), byte_tokenizer()
        text = "hello the sea " * LONG
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.decode(ids, skip_special_tokens=special) == backend.decode(ids, skip_special_tokens=special)

    def test_refused(self) -> None:
        tokenizer = self.tokenizer(character_tokenizer({"a": 0}))
        with pytest.raises(ValueError, match="its vocabulary lacks 'b'"):
            tokenizer.encode("a" * LONG + "b")
        with pytest.raises(ValueError, match="half a character"):
            tokenizer.encode("a" * LONG + "\ud800")

    def test_others_go_on(self) -> None:
        """Whoever encodes one in a thread, because it takes long, would else stop all the others too."""
        tokenizer, text = self.tokenizer(byte_tokenizer()), "hello the sea " * 20_000
        thread = threading.Thread(target=lambda: tokenizer.encode(text))
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 10
