"""Calls to `tokenizers`: panics become errors, and their reports are seen by nobody."""

from __future__ import annotations

import os
import threading

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers
from tokenizers.models import WordLevel

from infer.loader.text_tokenizers import rust_calls


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
