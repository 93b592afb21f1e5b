"""How well a model predicts a text: what quantised weights and caches are judged by.

The text is read in windows, because it may be longer than the context. They overlap, so that a token is judged with
some text in front of it; each is judged once, in the first window that holds it. Everything goes through the cache, in
chunks, as a prompt does: weights and caches are measured as they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from infer.config import ModelConfig
from infer.engine.caches import make_cache
from infer.engine.model import Model, all_logits, check_mode, model_device, step
from infer.engine.request import token_ids as as_token_ids
from infer.values import MODEL, TOKENS, takes

CONTEXT = 1024  # tokens of a window, where the model has as many
CHUNK = 128  # tokens of a pass, which bounds the memory for logits: 134 MB with Gemma's vocabulary


@dataclass(frozen=True)
class Perplexity:
    perplexity: float  # e to the nats per token: as unsure as between so many equally likely ones
    nats_per_token: float
    tokens: int  # that were scored
    windows: int
    context: int
    stride: int

    @property
    def bits(self) -> float:
        """Of all tokens together."""
        return self.nats_per_token * self.tokens / math.log(2)


@dataclass(frozen=True)
class Plan:
    """Which windows a text is read in."""

    length: int  # of the text, in tokens
    prefix: int  # tokens in front of every window
    context: int
    stride: int

    @property
    def tokens(self) -> int:
        """That will be scored: without a prefix, nothing predicts the first."""
        return self.length if self.prefix else self.length - 1

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Of each window, its place in the text, [start, end), and the first token there that is scored."""
        start, scored = 0, 0 if self.prefix else 1
        while scored < self.length:
            end = min(start + self.context - self.prefix, self.length)
            yield start, end, scored
            start, scored = start + self.stride, end


def plan(
    config: ModelConfig,
    token_ids: Sequence[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix: Sequence[int] = (),
) -> Plan:
    """Refuse what cannot be scored, as `perplexity` would: for asking before the weights are read."""
    wrong = next((i for i in (*prefix, *token_ids) if not 0 <= i < config.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} in the text is outside the vocabulary 0..{config.vocab_size - 1}")
    before = max(1, len(prefix))  # a token is only scored with something in front of it
    if not token_ids or len(prefix) + len(token_ids) < 2:
        raise ValueError(f"the text is too short: {len(token_ids)} token(s), and the first has nothing to predict it")
    most = config.max_position_embeddings
    if context is None:
        context = min(CONTEXT, most)
    _check_range("context", context, before + 1, most, "the model's ")
    if stride is None:
        stride = min(max(1, context // 2), context - before)
    _check_range("stride", stride, 1, context - before, "the window's ")
    return Plan(len(token_ids), len(prefix), context, stride)


def _check_range(name: str, value: int, least: int, most: int, whose: str) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {whose}{most}, not {value}")


@torch.inference_mode()
@takes(model=MODEL, token_ids=TOKENS)
def perplexity(
    model: Model,
    token_ids: Sequence[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix: Sequence[int] = (),
    cache_dtype: str = "auto",
    progress: Callable[[int, float], None] | None = None,
) -> Perplexity:
    """Score a text: the exponential of the mean negative log-likelihood of its tokens.

    context: tokens of a window; None: the model's context, but at most 1,024.
    stride: by how many tokens a window is further on than the one before; None: half a window.
    prefix: what every window begins with, and is not scored: BOS, for a model that has been trained with it
    (`tokenizer.encode("")`). The text itself is then encoded without it.
    progress: hears after each window how many tokens have been scored, and their perplexity.
    """
    nats, tokens, windows = 0.0, 0, 0
    for window in scored_windows(
        model, token_ids, context=context, stride=stride, prefix=prefix, cache_dtype=cache_dtype
    ):
        nats += sum(negative_log_likelihood(logits, targets) for logits, targets in window.logits())
        if math.isnan(nats):
            raise ValueError(
                f"the model's logits hold a NaN between tokens {window.scored:,} and {window.end:,} of the text"
            )
        tokens, windows = tokens + window.end - window.scored, windows + 1
        if progress is not None:
            progress(tokens, exponential(nats / tokens))
    mean = nats / tokens
    return Perplexity(exponential(mean), mean, tokens, windows, window.plan.context, window.plan.stride)


@dataclass(frozen=True)
class Window:
    """A part of a text, of which the tokens from `scored` to `end` are scored."""

    plan: Plan
    scored: int
    end: int
    logits: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # [n, V] and the tokens [n] that they predict, in chunks


def scored_windows(
    model: Model,
    token_ids: Sequence[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix: Sequence[int] = (),
    cache_dtype: str = "auto",
) -> Iterator[Window]:
    """The windows of a text, as `perplexity` describes them. All share one cache: go through one before the next."""
    token_ids, prefix = as_token_ids(token_ids), as_token_ids(prefix)
    layout = plan(model.config, token_ids, context=context, stride=stride, prefix=prefix)
    check_mode(model)
    device = model_device(model)
    longest = min(layout.context, len(prefix) + len(token_ids))
    cache = make_cache(model, longest, device, prefill_chunk=CHUNK, cache_dtype=cache_dtype)

    def logits(start: int, end: int, scored: int) -> Iterator[tuple[Tensor, Tensor]]:
        window = torch.tensor([[*prefix, *token_ids[start:end]]], device=device)
        first = len(prefix) + scored - start  # of the scored ones, in the window
        fed, targets = window[:, :-1], window[0, 1:]
        cache.reset()
        if first > 1:  # logits of what comes before are not needed
            step(model, cache, fed[:, : first - 1], CHUNK)
        for at in range(first - 1, len(targets), CHUNK):
            yield all_logits(model, cache, fed[:, at : at + CHUNK])[0].float(), targets[at : at + CHUNK]

    for start, end, scored in layout.windows():
        yield Window(layout, scored, end, partial(logits, start, end, scored))


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Of tokens [n], in nats, by logits [n, V]."""
    return cross_entropy(logits, targets, reduction="none").cpu().double().sum().item()  # some devices have no float64


def exponential(value: float) -> float:
    """Infinity where it is beyond what a float holds."""
    return torch.tensor(value, dtype=torch.float64).exp().item()
