"""Tokens as clients see them: their texts, bytes and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from infer.engine.logprobs import TokenLogprobs
from infer.engine.result import GenerationResult
from infer.loader.text_tokenizers import bytes_of
from infer.loader.tokenizer import INCOMPLETE

LEAST = -9999.0  # what OpenAI writes for a probability of 0: JSON has no infinity


class TokenTexts:
    """The text of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def bytes(self, token: int) -> list[int]:
        """A token may be a part of a character, which has no text of its own."""
        text = self(token)
        return list(
            text.encode() if INCOMPLETE not in text else bytes_of(self._tokenizer.id_to_token(token) or "", text)
        )


def chat_logprobs(found: Iterable[TokenLogprobs], text_of: TokenTexts) -> list[dict[str, Any]]:
    """As in the choices of a chat completion."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text_of(token), "logprob": max(logprob, LEAST), "bytes": text_of.bytes(token)}

    return [
        {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*other) for other in each.top]} for each in found
    ]


def completion_logprobs(
    found: Sequence[TokenLogprobs | None], tokens: Sequence[int], text_of: TokenTexts, offset: int
) -> dict[str, Any]:
    """As in the choices of a completion. offset: of the first token in the text. None: of a prompt's first token."""
    texts = [text_of(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [None if each is None else _by_text(each.top, text_of) for each in found]
    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in found],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _by_text(top: Iterable[tuple[int, float]], text_of: TokenTexts) -> dict[str, float]:
    """Of tokens with the same text, as parts of characters are, the likeliest: it comes first."""
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(text_of(token), max(logprob, LEAST))
    return found


def finish_reason(reason: str | None) -> str | None:
    """By OpenAI's names."""
    return {"eos": "stop", "interrupted": "stop"}.get(reason, reason) if reason is not None else None


def response_usage(result: GenerationResult, reasoning: int) -> dict[str, Any]:
    """As in a response."""
    return {
        "input_tokens": result.prompt_tokens,
        # What is written to the cache is not charged for, and so not counted.
        "input_tokens_details": {"cached_tokens": result.known_tokens, "cache_write_tokens": 0},
        "output_tokens": result.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": result.prompt_tokens + result.generated_tokens,
    }


def usage_of(
    results: Sequence[GenerationResult], prompts: Sequence[int] = (0,), reasoning: int | None = None
) -> dict[str, Any]:
    """prompts: of each prompt, the number of its first text."""
    prompt = sum(results[i].prompt_tokens for i in prompts)
    known = sum(results[i].known_tokens for i in prompts)
    generated = sum(result.generated_tokens for result in results)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": known},
    }
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage
