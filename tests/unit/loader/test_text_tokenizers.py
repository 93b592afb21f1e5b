"""Calls to `tokenizers`: panics become errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import tokenizers
from checkpoints import byte_tokenizer

from infer.loader.text_tokenizers import character_tokenizer, rust_calls
from infer.loader.tokenizer import LONG, Tokenizer

PANIC = """
import os, threading, tokenizers
from infer.loader.text_tokenizers import rust_calls

tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({{"a": 0}}, unk_token="a"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), behavior="isolated")
if {others}:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    with rust_calls("x fails"):
        os.write(2, b"within")
        tokenizer.encode("a" * 40 + "!")
except ValueError as error:
    print(error)
os.write(2, b"after")
"""


@pytest.mark.parametrize("others", [False, True])
def test_panics(others: bool) -> None:
    """Their reports are held back, unless lines of other threads would get lost with them."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PANIC.format(others=others)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("x fails: Onig")
    assert done.stderr.startswith("within" if others else "after")
    assert ("panicked" in done.stderr) == others
    assert done.stderr.endswith("after")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_comes_through(error: type[BaseException]) -> None:
    with pytest.raises(error, match=r"^as it is$"), rust_calls("x fails"):
        raise error("as it is")


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
        with pytest.raises(ValueError, match="the vocabulary lacks characters of the text: 'b'"):
            tokenizer.encode("a" * LONG + "b")
        with pytest.raises(ValueError, match="half a surrogate pair"):
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
        assert turns > 2  # else the first of them lasts until the end


def test_ctrl_c_around_a_call() -> None:
    """It is then abandoned inside the block, and closed by the garbage collector."""
    calls: Any = rust_calls("x fails")
    calls.__enter__()
    calls.gen.close()
