"""Results as a notebook shows them: a few lines of HTML, in the notebook's own colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

UNLIKELY = -10.0  # the log-probability from which on a token has the full shade
TEXT = "white-space: pre-wrap; overflow-wrap: anywhere"


def shown(text: str, about: Sequence[str]) -> str:
    """A text, and below it what there is to say about it."""
    return _block(escape(text), about)


def shaded(texts: Sequence[str], logprobs: Sequence[float | None], about: Sequence[str]) -> str:
    """A text whose tokens have the more colour, the less likely they are; the pointer on one shows its figures."""
    return _block("".join(map(_token, texts, logprobs)), about)


def _token(text: str, logprob: float | None) -> str:
    visible = escape(text.replace("\n", "↵\n"))
    if logprob is None:
        return f'<span title="nothing comes before it">{visible}</span>'
    shade = 0.6 * max(0.0, min(1.0, logprob / UNLIKELY))
    title = f"log-probability {logprob:.4f}, probability {math.exp(logprob):.2%}"
    return f'<span title="{title}" style="background: rgba(220, 60, 40, {shade:.2f})">{visible}</span>'


def _block(content: str, about: Sequence[str]) -> str:
    below = f'<div style="opacity: 0.7; font-size: smaller">{escape(" · ".join(about))}</div>'
    return f'<div style="{TEXT}">{content}</div>{below}'
