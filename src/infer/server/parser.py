"""From the text that a model generates to the parts of an OpenAI message, while it is generated."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from infer.engine.text import overlap
from infer.server.calls import Call, JsonText, read_calls
from infer.server.formats import Format

PIECE = 4096  # characters that are read at once: what is left of a piece is copied for each marker in it
SEPARATORS = " \t\r\n;"  # between calls within one pair of markers


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A piece of a call: the first has an id, a name and no arguments, later ones only arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = Reasoning | Content | ToolCall


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Parser:
    """Splits an answer at the markers of its format. Any way of cutting the text into pieces gives the same parts.

    Reasoning may stand at the beginning only. White space around its markers belongs to them, and so does that
    before a tool call and behind the last one. What turns out not to be a call is content, unchanged.

    Each state is a method: it reads a piece of text, and returns what of it is left for the next state.
    """

    def __init__(
        self,
        format: Format,
        *,
        tools: bool,
        thinking: bool,
        starts_thinking: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """tools, thinking: whether to look for calls and reasoning. starts_thinking: the prompt has opened it."""
        self._tools = format.tools if tools else None
        self._think = format.reasoning if thinking else None
        self._starts_thinking = starts_thinking
        self._new_id = new_id
        self._pieces: list[str] = []  # text to read, the next piece last
        self._tail = ""  # may be the beginning of a marker, which is read again with what follows
        self._space: list[str] = []  # white space that belongs to a marker if one follows
        self._held: list[str] = []  # what may be calls: their opening marker, and all behind it
        self._value = JsonText()  # the one that is being read; not in _held before its end
        self._calls: list[Call] = []  # in _held
        self._num_calls = 0
        self._out: list[Delta] = []
        self._last: Delta | None = None
        self._read: Callable[[str], str] = self._begin if self._think else self._answer

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the parts that are now certain."""
        self._pieces += reversed([text[at : at + PIECE] for at in range(0, len(text), PIECE)])
        self._read_pieces()
        return self._take_out()

    def finish(self) -> list[Delta]:
        """The answer has ended; return what is left of it."""
        while self._read == self._in_value:  # half a call; there may be a whole one in it
            self._undo("")
            self._read_pieces()
        if self._read == self._behind_value:  # nothing but the closing marker is missing
            self._commit()
        thinks = self._read == self._reason or (self._read == self._begin and self._starts_thinking)
        kind = Reasoning if thinks else Content
        self._say(kind, self._tail)
        if any(self._space) and not isinstance(self._last, ToolCall):
            self._emit(kind("".join(self._space)))
        return self._take_out()

    def _read_pieces(self) -> None:
        while self._pieces:
            text = self._tail + self._pieces.pop()
            self._tail = ""
            if rest := self._read(text):
                self._pieces.append(rest)

    def _take_out(self) -> list[Delta]:
        out, self._out = self._out, []
        return _joined(out)

    # The states.

    def _begin(self, text: str) -> str:
        """At the very beginning, where the marker that opens reasoning may stand."""
        assert self._think is not None
        opening = self._think[0]
        text = self._skip_space(text)
        if text.startswith(opening):  # some write it though the prompt has done so
            self._drop_space_then(self._reason)
            return text[len(opening) :]
        if opening.startswith(text):
            self._tail = text
            return ""
        if self._starts_thinking:
            self._drop_space_then(self._reason)
        else:
            self._read = self._answer
        return text

    def _reason(self, text: str) -> str:
        assert self._think is not None
        return self._until(self._think[1], text, Reasoning, lambda: self._drop_space_then(self._answer))

    def _answer(self, text: str) -> str:
        """Where the answer begins, and calls that are the whole of it."""
        if self._tools is None or self._tools.closing:
            self._read = self._content
            return text
        text = self._skip_space(text)
        opening = self._tools.opening
        if text.startswith("{"):
            self._open("")
            return text
        if text.startswith(opening):
            self._open(opening)
            return text[len(opening) :]
        if opening.startswith(text):
            self._tail = text
            return ""
        self._tools = None
        self._read = self._content
        return text

    def _content(self, text: str) -> str:
        if self._tools is None:
            self._say(Content, text)
            return ""
        opening = self._tools.opening
        return self._until(opening, text, Content, lambda: self._open(opening))

    def _in_value(self, text: str) -> str:
        """Within the JSON of a call."""
        rest = self._value.feed(text)
        if rest is None:
            return self._undo(text)
        if self._value.done:
            calls = read_calls("".join(self._value.pieces))
            if not calls:
                return self._undo(rest)
            self._calls += calls
            self._held += self._value.pieces
            self._value = JsonText()
            self._read = self._behind_value
        return rest

    def _behind_value(self, text: str) -> str:
        """Behind the JSON of a call, where another or the closing marker follows."""
        assert self._tools is not None
        closing = self._tools.closing
        rest = text.lstrip(SEPARATORS)
        self._held.append(text[: len(text) - len(rest)])
        if rest.startswith(("{", "[")):
            self._read = self._in_value
            return rest
        if closing and rest.startswith(closing):
            self._commit()
            return rest[len(closing) :]
        if closing.startswith(rest):
            self._tail = rest
            return ""
        return self._undo(rest)

    # What states have in common.

    def _until(self, marker: str, text: str, kind: type[Reasoning | Content], found: Callable[[], None]) -> str:
        """Say the text before the marker. Where it is not there yet, keep what may be its beginning."""
        at = text.find(marker)
        if at < 0:
            end = len(text) - overlap(text, marker)
            self._tail = text[end:]
            self._say(kind, text[:end])
            return ""
        self._say(kind, text[:at])
        found()
        return text[at + len(marker) :]

    def _skip_space(self, text: str) -> str:
        rest = text.lstrip()
        self._space.append(text[: len(text) - len(rest)])
        return rest

    def _drop_space_then(self, state: Callable[[str], str]) -> None:
        """At a marker: drop the white space before it, and behind it, where the state begins."""

        def skip(text: str) -> str:
            text = text.lstrip()
            if text:
                self._read = state
            return text

        self._space.clear()
        self._read = skip

    def _open(self, marker: str) -> None:
        self._held = [marker]
        self._value = JsonText()
        self._read = self._in_value

    def _undo(self, rest: str) -> str:
        """These are no calls: their marker is content. What is behind it is read again, for there may be calls in it.

        That stays linear. A text that survives up to a further marker has it within a string, and whatever begins
        there takes this string's end for a beginning: of two that overlap, the next marker ends one.
        """
        assert self._tools is not None
        marker, *pieces = self._held + self._value.pieces
        if not self._tools.closing:  # calls would have been the whole answer
            self._tools = None
        self._calls = []
        self._say(Content, marker)
        self._read = self._content
        self._pieces.append(rest)
        self._pieces += reversed(pieces)
        return ""

    def _commit(self) -> None:
        """What is held are calls."""
        self._space.clear()
        for call in self._calls:
            self._emit(ToolCall(self._num_calls, self._new_id(), call.name, ""))
            self._emit(ToolCall(self._num_calls, None, None, call.arguments))
            self._num_calls += 1
        self._calls = []
        self._tail = ""
        self._read = self._content

    def _say(self, kind: type[Reasoning | Content], text: str) -> None:
        """Text that is no marker; white space at its end waits for what follows."""
        said = text.rstrip()
        if said:
            self._emit(kind("".join(self._space) + said))
            self._space.clear()
        self._space.append(text[len(said) :])

    def _emit(self, delta: Delta) -> None:
        self._last = delta
        self._out.append(delta)


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    joined: list[Delta] = []
    texts: list[str] = []
    for i, delta in enumerate(deltas):
        if isinstance(delta, ToolCall):
            joined.append(delta)
            continue
        texts.append(delta.text)
        if i + 1 == len(deltas) or type(deltas[i + 1]) is not type(delta):
            joined.append(type(delta)("".join(texts)))
            texts.clear()
    return joined
