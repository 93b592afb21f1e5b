"""Control tokens in the messages of a chat become plain text, so that no content can end its turn or begin another."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import tokenizers
from tokenizers import AddedToken

# Some files do not mark their control tokens as special, e.g. DeepSeek's User, between full-width bars.
BETWEEN_BARS = re.compile("<([|\N{FULLWIDTH VERTICAL LINE}]).*\\1>", re.DOTALL)
# Characters that filters of a template neither change nor escape. A conversation's mark is one that it does not have.
MARKS = range(0x20000, 0x2A6E0)  # rare CJK
PLAIN_TAG = r"[<\[][/|]?\w+\|?[>\]]"  # templates look for some, e.g. </think>


class ControlTokens:
    """Tells the control tokens that a template writes from those in the values that it is given.

    The values are rendered with a mark after each character that can begin a control token, because a template may join
    values or delete parts of them. Control tokens that the rendered text has without a mark are the template's: they
    get a private name. `backend` matches private names alone. The text is encoded at once, since BPE merges across the
    borders of values.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        unknown = getattr(tokenizer.model, "unk_token", None)  # stands for text
        self._ids = {
            token.content: i
            for i, token in sorted(tokenizer.get_added_tokens_decoder().items())
            if (token.special or BETWEEN_BARS.fullmatch(token.content)) and token.content not in ("", unknown)
        }
        secret = secrets.token_hex(16)
        self._names = {token: f"<{secret}:{i}>" for token, i in self._ids.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # The first character of each match, also of overlapping ones. Grouped: a search skips to the first characters.
        groups = groupby(sorted(self._ids), key=lambda token: token[0])
        rests = ((first, "|".join(re.escape(token[1:]) for token in tokens)) for first, tokens in groups)
        complete = [f"(?i:{re.escape(first)}(?={rest}))" for first, rest in rests]  # templates may change the case
        # Letters and blanks begin ordinary words: templates compare those.
        firsts = sorted({re.escape(token[0]) for token in self._ids if not (token[0].isalnum() or token[0].isspace())})
        parts = [f"(?!{PLAIN_TAG})[{''.join(firsts)}]"] if firsts else []
        self._first = re.compile("|".join(complete + parts) or "(?!)")

    def mark(self, *values: Any) -> str:
        """A mark for JSON values."""
        used = set("".join(strings(values)))
        for mark in map(chr, MARKS):
            if mark not in used:
                return mark
        raise ValueError(f"the messages have all characters U+{MARKS[0]:X} to U+{MARKS[-1]:X}: remove one")

    def marked(self, value: Any, mark: str) -> Any:
        """A JSON value with marks in its strings."""
        if isinstance(value, str):
            return _substitute(self._first, lambda token: token + mark, value)
        if isinstance(value, Mapping):
            return {self.marked(key, mark): self.marked(each, mark) for key, each in value.items()}
        return [self.marked(each, mark) for each in value] if isinstance(value, Sequence) else value

    def renamed(self, text: str) -> str:
        """A rendered text for `backend`."""
        return _substitute(self._any, self._names.__getitem__, text)

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer, but only private names are control tokens."""
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        backend = tokenizers.Tokenizer(self._tokenizer.model)
        backend.normalizer, backend.pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        # In the order of their ids, so that each gets its id again.
        backend.add_tokens([_copy(token, token.content, special=token.content in self._ids) for _, token in added])
        control = [token for _, token in added if token.content in self._ids]
        backend.add_tokens([_copy(token, self._names[token.content]) for token in control])
        backend.encode_special_tokens = True  # as text
        return backend

    def unrenamed(self, ids: list[int]) -> list[int]:
        """The ids of `backend` as those of the tokenizer."""
        own = {self.backend.token_to_id(name): self._ids[token] for token, name in self._names.items()}
        control = {i: token for token, i in self._ids.items()}
        if as_text := control.keys() & set(ids):
            token = control[min(as_text)]
            raise ValueError(f"this tokenizer cannot encode {token!r} as text: remove it from the messages")
        return [own.get(i, i) for i in ids]


def _substitute(pattern: re.Pattern[str], replacement: Callable[[str], str], text: str) -> str:
    """Like `pattern.sub`, but other threads can run between two matches."""
    parts: list[str] = []
    end = 0
    for found in pattern.finditer(text):
        parts += text[end : found.start()], replacement(found[0])
        end = found.end()
    return "".join([*parts, text[end:]])


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for each in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
            yield from strings(each)


def _copy(token: AddedToken, content: str, *, special: bool = False) -> AddedToken:
    return AddedToken(**token.__getstate__() | {"content": content, "special": special})
