"""What tokens look like, alone and where several make one character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a part of a character is decoded as


class Joined(NamedTuple):
    """Tokens start to end - 1, which are parts of the same characters."""

    start: int
    end: int
    text: str


def token_texts(tokenizer: Any, token_ids: Sequence[int], *, bytes_named: bool = True) -> list[str]:
    """Of a whole text, token by token. bytes_named: as for `token_text`."""
    pairs = zip([None, *token_ids], token_ids, strict=False)
    return [token_text(tokenizer, now, before, bytes_named=bytes_named) for before, now in pairs]


def token_text(tokenizer: Any, token_id: int, before: int | None = None, *, bytes_named: bool = True) -> str:
    """The text that the token adds behind the one before it; its name if it has no text of its own.

    bytes_named: those that are part of a character are shown as SentencePiece names them, <0xE2><0x82>.
    """
    alone: str = tokenizer.decode([token_id])
    if not alone:
        name = getattr(tokenizer, "id_to_token", lambda _: None)(token_id)  # only whole tokenizers know names
        return name or f"<{token_id}>"
    if INCOMPLETE in alone and bytes_named:
        return "".join(f"<0x{byte:02X}>" for byte in partial_bytes(tokenizer, token_id)) or alone
    if before is None:
        return alone
    # Some tokenizers drop the space of a first word: decode it behind another. Halves of a character stay alone.
    context: str = tokenizer.decode([before])
    joined: str = tokenizer.decode([before, token_id])
    return joined[len(context) :] if INCOMPLETE not in context + alone and joined.startswith(context) else alone


def partial_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token with part of a character; none of any other, and where the tokenizer does not know them."""
    if INCOMPLETE not in tokenizer.decode([token_id]):
        return b""
    raw: bytes = getattr(tokenizer, "bytes_of", lambda _: b"")(token_id)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw
    return b""  # a replacement character that is one


def joined(raw: Sequence[bytes]) -> list[Joined]:
    """Which tokens make characters together, given what `partial_bytes` gives of each."""
    found, start = list[Joined](), 0
    while start < len(raw):
        whole = _first_whole(raw, start) if raw[start] else None
        if whole is not None:
            found.append(whole)
        start = start + 1 if whole is None else whole.end
    return found


def _first_whole(raw: Sequence[bytes], start: int) -> Joined | None:
    """The fewest tokens from start on that end where a character does."""
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
