"""The items of a response, as they grow, and the events that tell of it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from infer.server.parser import Content, Delta, Reasoning, ToolCall

Event = tuple[str, dict[str, Any]]  # its name and its fields


class Item(ABC):
    prefix: ClassVar[str]  # of its id
    grows: ClassVar[str]  # the events of its text
    whole: ClassVar[str]  # the field of the text, at its end

    def __init__(self, index: int) -> None:
        self.index, self.id = index, f"{self.prefix}_{secrets.token_hex(24)}"
        self.status = "in_progress"
        self._pieces: list[str] = []

    @abstractmethod
    def goes_on_with(self, delta: Delta) -> bool:
        """Whether it is this item that grows by it."""

    @abstractmethod
    def value(self) -> dict[str, Any]: ...

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> list[Event]:
        return [("response.output_item.added", {"output_index": self.index, "item": self.value()})]

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._pieces.append(text)
        return [(f"{self.grows}.delta", {**self._place(), "delta": text, **self._details(logprobs)})]

    def end(self, status: str) -> list[Event]:
        """status: completed or incomplete."""
        self.status = status
        return [
            (f"{self.grows}.done", {**self._place(), self.whole: self.text, **self._details()}),
            ("response.output_item.done", {"output_index": self.index, "item": self.value()}),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def _details(self, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """More of what the events of its text say. logprobs: of a delta; None: of the whole."""
        return {}


class ItemOfParts(Item):
    """One whose text is a part of its content, the only one."""

    whole = "text"

    @abstractmethod
    def part(self) -> dict[str, Any]: ...

    def begin(self) -> list[Event]:
        return [*super().begin(), ("response.content_part.added", {**self._place(), "part": self.part()})]

    def end(self, status: str) -> list[Event]:
        text, item = super().end(status)
        return [text, ("response.content_part.done", {**self._place(), "part": self.part()}), item]

    def _content(self) -> list[dict[str, Any]]:
        """Parts are added by events of their own."""
        return [] if self.status == "in_progress" else [self.part()]

    def _place(self) -> dict[str, Any]:
        return {**super()._place(), "content_index": 0}


class Message(ItemOfParts):
    prefix, grows = "msg", "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[dict[str, Any]] = []

    def goes_on_with(self, delta: Delta) -> bool:
        return isinstance(delta, Content)

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._logprobs += logprobs
        return super().grow(text, logprobs)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def value(self) -> dict[str, Any]:
        content = self._content()
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def _details(self, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {"logprobs": list(self._logprobs) if logprobs is None else logprobs}


class Thought(ItemOfParts):
    prefix, grows = "rs", "response.reasoning_text"

    def goes_on_with(self, delta: Delta) -> bool:
        return isinstance(delta, Reasoning)

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def value(self) -> dict[str, Any]:
        content = self._content()
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}


class FunctionCall(Item):
    prefix, grows, whole = "fc", "response.function_call_arguments", "arguments"

    def __init__(self, index: int, call: ToolCall) -> None:
        super().__init__(index)
        self._head = {"id": self.id, "type": "function_call", "call_id": call.id, "name": call.name}

    def goes_on_with(self, delta: Delta) -> bool:
        return isinstance(delta, ToolCall) and delta.id is None

    def value(self) -> dict[str, Any]:
        return {**self._head, "status": self.status, "arguments": self.text}


def item_for(index: int, delta: Delta) -> Item:
    """The one that begins with it."""
    if isinstance(delta, ToolCall):
        return FunctionCall(index, delta)
    return Thought(index) if isinstance(delta, Reasoning) else Message(index)
