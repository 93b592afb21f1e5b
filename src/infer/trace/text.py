"""The text of tokens, alone and where several form one character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a part of a character decodes to this


class Joined(NamedTuple):
    """Tokens start to end - 1, which together form characters."""

    start: int
    end: int
    text: str


def token_texts(tokenizer: Any, token_ids: Sequence[int], *, bytes_named: bool = True) -> list[str]:
    """Of each token of a sequence. bytes_named: as for `token_text`."""
    pairs = zip([None, *token_ids], token_ids, strict=False)
    return [token_text(tokenizer, now, before, bytes_named=bytes_named) for before, now in pairs]


def token_text(tokenizer: Any, token_id: int, before: int | None = None, *, bytes_named: bool = True) -> str:
    """The text that the token adds after the one before it; its name if it has no text.

    bytes_named: show bytes that are part of a character as SentencePiece does, <0xE2><0x82>.
    """
    alone: str = tokenizer.decode([token_id])
    if not alone:
        name = getattr(tokenizer, "id_to_token", lambda _: None)(token_id)  # minimal tokenizers have no names
        return name or f"<{token_id}>"
    if INCOMPLETE in alone and bytes_named:
        return "".join(f"<0x{byte:02X}>" for byte in partial_bytes(tokenizer, token_id)) or alone
    if before is None:
        return alone
    # Some tokenizers drop the space of a first word: decode the token after another one, unless either is part of a
    # character.
    context: str = tokenizer.decode([before])
    joined: str = tokenizer.decode([before, token_id])
    return joined[len(context) :] if INCOMPLETE not in context + alone and joined.startswith(context) else alone


def partial_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token that is part of a character; empty for others, or if the tokenizer has no bytes."""
    if INCOMPLETE not in tokenizer.decode([token_id]):
        return b""
    raw: bytes = getattr(tokenizer, "bytes_of", lambda _: b"")(token_id)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw
    return b""  # it is the replacement character itself


def joined(raw: Sequence[bytes]) -> list[Joined]:
    """The tokens that form characters together. raw: the `partial_bytes` of each token."""
    found, start = list[Joined](), 0
    while start < len(raw):
        complete = _first_complete(raw, start) if raw[start] else None
        if complete is not None:
            found.append(complete)
        start = start + 1 if complete is None else complete.end
    return found


def _first_complete(raw: Sequence[bytes], start: int) -> Joined | None:
    """The fewest tokens from start on that end at the end of a character."""
    decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
    for end in range(start, len(raw)):
        if not raw[end]:
            return None
        try:
            text += decoder.decode(raw[end])
        except UnicodeDecodeError:
            return None
        if not decoder.getstate()[0]:
            return Joined(start, end + 1, text)
    return None
