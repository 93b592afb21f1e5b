"""From token ids to text that can be shown while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WAITING = 16  # tokens held back until a character is complete: more than any tokenizer needs
UNCERTAIN = 4  # the last tokens that may still form one character: it has at most 4 bytes


class SupportsDecode(Protocol):
    def decode(self, token_ids: list[int], /) -> str: ...


class SupportsEncode(Protocol):
    def encode(self, text: str, /) -> list[int]: ...


def encode_readable(tokenizer: SupportsEncode, text: str) -> list[int]:
    """Encode the text without the characters that the vocabulary lacks."""
    try:
        return tokenizer.encode(text)
    except ValueError:
        characters = text if len(text) > 1 else ""
        return [i for character in characters for i in encode_readable(tokenizer, character)]


def decode_all(tokenizer: SupportsDecode, token_ids: list[int], stop: Sequence[str] = ()) -> str:
    """The text that a `Detokenizer` gives for all these tokens; decoded at once where that gives the same text."""
    if not stop and "\N{REPLACEMENT CHARACTER}" not in (text := tokenizer.decode(token_ids)):
        return text
    stream = Detokenizer(tokenizer, stop)  # bytes that it has shown as � stay �
    return "".join(map(stream.push, token_ids)) + stream.finish()


class Detokenizer:
    """Decodes tokens one by one. It never shows half a character, nor any part of a stop string."""

    def __init__(self, tokenizer: SupportsDecode, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        # The text of the ids before _shown has been returned. Decoding starts at _context, some ids earlier, because
        # the text of an id can depend on its neighbor (SentencePiece drops the space of a first word).
        self._context = 0
        self._shown = 0
        self._held = ""  # text that may be the beginning of a stop string
        self._length = 0  # of the text of the ids before _shown
        self.stopped = False

    def offset(self, token_id: int) -> int:
        """Where the next token begins in the text. A token within a character has the character's offset."""
        before, after = self._decode_new(), self._decode_new(more=[token_id])
        same = common_prefix(before, after)
        if not after[same:].strip("\N{REPLACEMENT CHARACTER}"):  # the last character is still incomplete
            same = len(before[:same].rstrip("\N{REPLACEMENT CHARACTER}"))
        return self._length + same

    def push(self, token_id: int, finish_reason: str | None = None) -> str:
        """Append a token; return the text that is now certain, all of it if the token is the last."""
        if finish_reason is None:
            return self._push(token_id)
        return ("" if finish_reason == "eos" else self._push(token_id)) + self.finish()

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode_new()
        # Wait for the rest of a character. Wait also after a token without text: decoded alone as context, it would
        # make the next token look like the first of a text.
        waiting = len(self._ids) - self._shown
        if not text:
            if waiting > WAITING:  # a few tokens without text are context enough
                del self._ids[self._shown + UNCERTAIN]
            return ""
        end = len(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            if waiting < WAITING:
                return ""
            end, text = self._certain(text)
        self._context, self._shown, self._length = self._shown, end, self._length + len(text)
        return self._release(self._held + text)

    def finish(self) -> str:
        """The rest when generation ends: text held back, and bytes that never became a character."""
        if self.stopped:
            return ""
        text = self._held + self._decode_new()
        self._context, self._shown, self._held = self._shown, len(self._ids), ""
        released = self._release(text)
        return released + ("" if self.stopped else self._held)

    def _decode_new(self, end: int | None = None, more: Sequence[int] = ()) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode([*self._ids[self._context : end], *more])[len(known) :]

    def _certain(self, text: str) -> tuple[int, str]:
        """The end of the tokens whose bytes can no longer become a character, and their text.

        Waiting for longer would decode all of them again with each token.
        """
        last = len(self._ids) - UNCERTAIN
        for end in range(last, last - UNCERTAIN, -1):  # not within a character that a later token ends
            if text.startswith(certain := self._decode_new(end)):
                return end, certain
        return len(self._ids), text

    def _release(self, text: str) -> str:
        """Return the text that can be shown; hold back a tail that may grow into a stop string."""
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many elements at the beginning are equal."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of text begin the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
