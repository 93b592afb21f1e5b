"""What a single token looks like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Of a whole text, token by token."""
    return [token_text(tokenizer, now, before) for before, now in zip([None, *token_ids], token_ids, strict=False)]


def token_text(tokenizer: Any, token_id: int, before: int | None = None) -> str:
    """The text that the token adds behind the one before it; its name if it has no text of its own."""
    alone: str = tokenizer.decode([token_id])
    if not alone:
        name = getattr(tokenizer, "id_to_token", lambda _: None)(token_id)  # only whole tokenizers know names
        return name or f"<{token_id}>"
    if before is None:
        return alone
    # Some tokenizers drop the space of a first word: decode it behind another. Halves of a character stay alone.
    context: str = tokenizer.decode([before])
    joined: str = tokenizer.decode([before, token_id])
    whole = "\N{REPLACEMENT CHARACTER}" not in context + alone
    return joined[len(context) :] if whole and joined.startswith(context) else alone
