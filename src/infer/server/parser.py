"""Splits the text that a model generates into reasoning, content and tool calls, while it is generated."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, NoReturn, TypeVar

from infer.engine.text import overlap

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields to wait for more text
MAX_DEPTH = 100  # of brackets: deep enough for any call, and far from the limit of Python's decoder

_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[ \t\r\n;]*")  # between calls within one pair of markers
# JSON: before it, outside and within its strings, and between the values of a list or an object.
_BEFORE = re.compile(r"[ \t\r\n]*")
_OUTSIDE_STRINGS = re.compile(r"[ \t\r\na-zA-Z0-9+\-.,:]*")
_WITHIN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*+', re.DOTALL)
_BETWEEN = re.compile(r"[ \t\r\n,:]*")


@dataclass(frozen=True)
class ToolMarkers:
    """The markers around tool calls. Each call is a JSON object with a "name" and its arguments."""

    opening: str
    closing: str  # "" if the calls are all of the answer; the opening marker may then be missing
    arguments: str  # the key of the arguments


@dataclass(frozen=True)
class Format:
    """How a model writes tool calls and reasoning; None for what its template does not have."""

    tools: ToolMarkers | None
    reasoning: tuple[str, str] | None  # the markers around it

    def starts_thinking(self, prompt: str) -> bool:
        """Whether the prompt ends with the marker that opens reasoning, so that the answer starts within it."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


HERMES = ToolMarkers("<tool_call>", "</tool_call>", "arguments")  # Qwen, SmolLM, Hermes and models after them
LLAMA = ToolMarkers("<|python_tag|>", "", "parameters")  # Llama 3.1 and later
THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A part of a call: the first has an id, a name and no arguments; later ones have only arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = Reasoning | Content | ToolCall


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Parser:
    """Splits an answer at the markers of its format. The result does not depend on how the text is cut into pieces.

    Reasoning comes first, if there is any. White space around its markers, before a tool call and after the last one
    is dropped. Text after an opening marker that is not a call is content, unchanged.
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
        """tools, thinking: whether to look for calls and reasoning. starts_thinking: the prompt opens the reasoning."""
        self._tools = format.tools if tools else None
        self._think = format.reasoning if thinking else None
        self._starts_thinking = starts_thinking
        self._new_id = new_id
        self._text, self._at = "", 0  # the text is read up to there
        self._ended = False
        self._space: list[str] = []  # white space that is dropped if a marker follows
        self._num_calls = 0
        self._out: list[Delta] = []
        self._last: Delta | None = None
        self._reading = self._read()

    def feed(self, text: str) -> list[Delta]:
        """Read more text; return the deltas that are certain by now."""
        self._text += text
        next(self._reading, None)
        out, self._out = self._out, []
        return out if len(out) < 2 else [delta for delta, _ in join_deltas([(delta, []) for delta in out])]

    def finish(self) -> list[Delta]:
        """The answer has ended: return the remaining deltas."""
        self._ended = True
        return self.feed("")

    def _read(self) -> Reading[None]:
        """The complete answer."""
        if self._think is not None:
            opening, closing = self._think
            yield from self._read_space()
            opened = yield from self._starts_with(opening, self._at)  # some models repeat the prompt's marker
            if opened or self._starts_thinking:
                self._at += len(opening) if opened else 0
                yield from self._drop_space()
                if not (yield from self._emit_until(closing, Reasoning)):
                    return
                yield from self._drop_space()
        if self._tools is not None and not self._tools.closing:
            yield from self._read_space()
            if self._text.startswith("{", self._at):
                yield from self._read_calls("")
            elif not (yield from self._starts_with(self._tools.opening, self._at)):
                self._tools = None
        while (yield from self._emit_until(self._tools.opening if self._tools else None, Content)):
            assert self._tools is not None
            yield from self._read_calls(self._tools.opening)

    def _read_calls(self, marker: str) -> Reading[None]:
        """Emit the calls after the marker. If they are not calls, the marker is content, and the text after it is read
        again, since it may contain calls.

        This stays linear. Text that is held up to a further marker has that marker within a string, and the text
        after the marker takes the string's end for a start: of two overlapping ones, the next marker ends one.
        """
        assert self._tools is not None
        closing, calls, at = self._tools.closing, list[Call](), self._at
        while True:
            end = yield from self._end_of_json(at)
            found = [] if end is None else read_calls(self._text[at:end])
            if end is None or not found:
                break
            calls += found
            at = yield from self._skip(_SEPARATORS, end)
            if self._text.startswith(("{", "["), at):
                continue
            closed = closing and (yield from self._starts_with(closing, at))
            if closed or (self._ended and closing.startswith(self._text[at : at + len(closing) + 1])):
                self._emit_calls(calls)
                self._at = at + len(closing)
                return
            break
        self._emit_text(Content, marker)
        if not closing:  # the answer cannot be calls any more
            self._tools = None

    def _end_of_json(self, at: int) -> Reading[int | None]:
        """Where the JSON object or list ends that begins here; None at the first character that JSON does not allow, so
        that text which only starts like a call is not held back. `read_calls` checks whether the JSON is valid.
        """
        depth, in_string = 0, False
        while True:
            at = _end_of(_WITHIN_STRING if in_string else _OUTSIDE_STRINGS if depth else _BEFORE, self._text, at)
            character = self._text[at : at + 1]
            if not character or (in_string and character == "\\"):
                if self._ended:
                    return None
                yield
                continue
            at += 1
            if character == '"' and depth:
                in_string = not in_string
            elif character in "{[" and not in_string and depth < MAX_DEPTH:
                depth += 1
            elif character in "}]" and not in_string and depth:
                depth -= 1
                if not depth:
                    return at
            else:
                return None

    def _skip(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """Past all characters of the pattern."""
        while (at := _end_of(pattern, self._text, at)) == len(self._text) and not self._ended:
            yield
        return at

    def _starts_with(self, marker: str, at: int) -> Reading[bool]:
        while not self._ended and len(self._text) - at < len(marker) and marker.startswith(self._text[at:]):
            yield
        return self._text.startswith(marker, at)

    def _read_space(self) -> Reading[None]:
        start = self._at
        self._at = yield from self._skip(_SPACE, start)
        self._space.append(self._text[start : self._at])

    def _drop_space(self) -> Reading[None]:
        """At a marker: drop the white space around it."""
        yield from self._read_space()
        self._space.clear()

    def _emit_until(self, marker: str | None, kind: type[Reasoning | Content]) -> Reading[bool]:
        """Emit the text up to the marker, which is skipped, or all text. Returns whether the marker was found."""
        while marker is None or (end := self._text.find(marker, self._at)) < 0:
            unread = self._text[self._at :]
            held = 0 if marker is None or self._ended else overlap(unread, marker)
            self._emit_text(kind, unread[: len(unread) - held])
            self._text, self._at = unread[len(unread) - held :], 0
            if self._ended:
                if any(self._space) and not isinstance(self._last, ToolCall):
                    self._emit(kind("".join(self._space)))
                return False
            yield
        self._emit_text(kind, self._text[self._at : end])
        self._at = end + len(marker)
        return True

    def _emit_text(self, kind: type[Reasoning | Content], text: str) -> None:
        """Text without markers; white space at its end is held until more text follows."""
        visible = text.rstrip()
        if visible:
            self._emit(kind("".join(self._space) + visible))
            self._space.clear()
        self._space.append(text[len(visible) :])

    def _emit_calls(self, calls: list[Call]) -> None:
        self._space.clear()
        for call in calls:
            self._emit(ToolCall(self._num_calls, self._new_id(), call.name, ""))
            self._emit(ToolCall(self._num_calls, None, None, call.arguments))
            self._num_calls += 1

    def _emit(self, delta: Delta) -> None:
        self._last = delta
        self._out.append(delta)


def join_deltas(deltas: list[tuple[Delta, list[T]]]) -> list[tuple[Delta, list[T]]]:
    """Join neighbors of one kind, and the lists that belong to them."""
    if len(deltas) < 2:  # almost always
        return deltas
    joined: list[tuple[Delta, list[T]]] = []
    for kind, group in groupby(deltas, lambda pair: type(pair[0])):
        same = list(group)
        if kind is ToolCall:
            joined += same
        else:
            text = "".join(delta.text for delta, _ in same if not isinstance(delta, ToolCall))
            joined.append((kind(text), [each for _, own in same for each in own]))
    return joined


class Call(NamedTuple):
    name: str
    arguments: str  # a JSON object, as the model wrote it


def read_calls(text: str) -> list[Call]:
    """The calls in a JSON object, or in a list of them; none if any part of it is not a call."""
    try:
        value, _ = _DECODER.raw_decode(text, start := _end_of(_BEFORE, text, 0))
    except ValueError:
        return []
    starts = [at for _, at, _ in _parts(text, start)] if isinstance(value, list) else [start]
    calls = [_call(text, at) for at in starts]
    return [] if None in calls else [call for call in calls if call is not None]


def _call(text: str, at: int) -> Call | None:
    if text[at] != "{":
        return None
    parts = list(_parts(text, at))
    members = {key: part for (key, _, _), part in zip(parts[::2], parts[1::2], strict=True)}
    name = members.get("name", (None,))[0]
    arguments, start, end = members.get("arguments") or members.get("parameters") or (None, 0, 0)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(name, text[start:end])


def _parts(text: str, at: int) -> Iterator[tuple[Any, int, int]]:
    """The values of a list, or keys and values of an object in turn, each with its start and end."""
    at = _end_of(_BETWEEN, text, at + 1)
    while text[at] not in "]}":
        value, end = _DECODER.raw_decode(text, at)
        yield value, at, end
        at = _end_of(_BETWEEN, text, end)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # Python's default accepts NaN and Infinity
