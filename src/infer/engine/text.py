"""From token ids to text that can be shown while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WAITING = 16  # tokens that wait for the rest of a character: longer than any tokenizer needs
UNCERTAIN = 4  # the last ones, which may yet become one character: it has at most as many bytes


class Decodes(Protocol):
    def decode(self, token_ids: list[int], /) -> str: ...


class Encodes(Protocol):
    def encode(self, text: str, /) -> list[int]: ...


def encode_readable(tokenizer: Encodes, text: str) -> list[int]:
    """The text without those characters that the vocabulary lacks, as a model trained on other ones may do."""
    try:
        return tokenizer.encode(text)
    except ValueError:
        return [i for character in text for i in _encode_character(tokenizer, character)]


def _encode_character(tokenizer: Encodes, character: str) -> list[int]:
    try:
        return tokenizer.encode(character)
    except ValueError:
        return []


def whole_text(tokenizer: Decodes, token_ids: list[int]) -> str:
    """What a `TextStream` gives of all these tokens, at once where that is the same."""
    text = tokenizer.decode(token_ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    stream = TextStream(tokenizer)  # it may be shown before it is whole, and stay what it was shown as
    return "".join(map(stream.push, token_ids)) + stream.finish()


class TextStream:
    """Decodes tokens one by one, never showing half a character, nor any part of a stop string."""

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        # Ids before _shown are out as text. Decoding starts at _context, some ids earlier, because what an id looks
        # like can depend on its neighbour (SentencePiece drops the space of a first word).
        self._context = 0
        self._shown = 0
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is now certain."""
        self._ids.append(token_id)
        text = self._decode_new()
        # Wait for the rest of a character, and for text to follow a token without any: decoding that alone as context
        # would make the next one look like the first.
        waiting = len(self._ids) - self._shown
        if not text:
            if waiting > WAITING:  # of those that never had text, a few are context enough
                del self._ids[self._shown + UNCERTAIN]
            return ""
        end = len(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            if waiting < WAITING:
                return ""
            end, text = self._certain(text)
        self._context, self._shown = self._shown, end
        return self._release(self._held + text)

    def finish(self) -> str:
        """What is left when generation ends: held text, and bytes that never became a character."""
        if self.stopped:
            return ""
        text = self._held + self._decode_new()
        self._context, self._shown, self._held = self._shown, len(self._ids), ""
        released = self._release(text)
        return released + ("" if self.stopped else self._held)

    def _decode_new(self, end: int | None = None) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context : end])[len(known) :]

    def _certain(self, text: str) -> tuple[int, str]:
        """Up to which token bytes that never become a character are certain to stay that, and their text.

        Waiting for ever would decode all of them again with each token.
        """
        last = len(self._ids) - UNCERTAIN
        for end in range(last, last - UNCERTAIN, -1):  # not within a character that a later token ends
            if text.startswith(certain := self._decode_new(end)):
                return end, certain
        return len(self._ids), text

    def _release(self, text: str) -> str:
        """Split text into what can be shown, and a tail that may yet grow into a stop string."""
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of text begin the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
