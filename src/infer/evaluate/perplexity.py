"""Perplexity of a model on a text, and KL divergence of two models: measures the quality of quantization.

The text is read in windows, because it may be longer than the context. Windows overlap, so that every token is scored
with some text before it; each token is scored once, in the first window that contains it. All tokens pass through the
cache in chunks, as a prompt does: weights and caches are measured as they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from infer.config import ModelConfig
from infer.engine.model import Model, all_logits, check_mode, make_cache, model_device, step
from infer.engine.sequence import token_ids as as_token_ids
from infer.values import MODEL, TOKENS, takes

CONTEXT = 1024  # tokens per window, if the model's context is as long
CHUNK = 128  # tokens per pass, which bounds the memory for logits: 134 MB with Gemma's vocabulary


@dataclass(frozen=True)
class Perplexity:
    perplexity: float  # exp(nats per token): the number of equally likely tokens with the same uncertainty
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
class Comparison:
    kl_divergence: float  # mean nats per token, of the second from the first
    largest_kl_divergence: float  # at any token
    same_top_token: float  # share of tokens at which both have the same most likely token
    perplexity: float  # of the first
    other_perplexity: float
    tokens: int


@dataclass(frozen=True)
class Plan:
    """The windows of a text."""

    length: int  # of the text, in tokens
    prefix: int  # tokens before every window
    context: int
    stride: int

    @property
    def tokens(self) -> int:
        """The number of scored tokens: without a prefix, nothing predicts the first."""
        return self.length if self.prefix else self.length - 1

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """For each window: its positions in the text, [start, end), and the first scored token."""
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
    """Check the arguments of `perplexity`, before the weights are read."""
    wrong = next((i for i in (*prefix, *token_ids) if not 0 <= i < config.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} in the text is outside the vocabulary 0..{config.vocab_size - 1}")
    before = max(1, len(prefix))  # a token is scored only if something precedes it
    if not token_ids or len(prefix) + len(token_ids) < 2:
        raise ValueError(f"the text is too short: {len(token_ids)} token(s), and the first token is not scored")
    most = config.max_position_embeddings
    if context is None:
        context = min(CONTEXT, most)
    _check_range("context", context, before + 1, most, "model")
    if stride is None:
        stride = min(max(1, context // 2), context - before)
    _check_range("stride", stride, 1, context - before, "window")
    return Plan(len(token_ids), len(prefix), context, stride)


def _check_range(name: str, value: int, least: int, most: int, whose: str) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to the {whose}'s {most}, not {value}")


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

    context: tokens per window; None: the model's context, but at most 1,024.
    stride: tokens from the start of one window to the start of the next; None: half a window.
    prefix: tokens before every window, which are not scored: BOS, for a model that was trained with it
    (`tokenizer.encode("")`). The text itself is then encoded without it.
    progress: called after each window with the number of scored tokens and their perplexity.
    """
    nats, tokens, windows = 0.0, 0, 0
    for chunk in scored_chunks(model, token_ids, cache_dtype, context=context, stride=stride, prefix=prefix):
        nats += negative_log_likelihood(chunk.logits, chunk.targets)
        _check_nan(nats, chunk)
        tokens += len(chunk.targets)
        windows += chunk.is_last
        if chunk.is_last and progress is not None:
            progress(tokens, exponential(nats / tokens))
    mean = nats / tokens
    return Perplexity(exponential(mean), mean, tokens, windows, chunk.plan.context, chunk.plan.stride)


@torch.inference_mode()
@takes(model=MODEL, other=MODEL)
def compare(
    model: Model,
    other: Model,
    token_ids: Sequence[int],
    *,
    context: int | None = None,
    progress: Callable[[int, float], None] | None = None,
    **windows: Any,
) -> Comparison:
    """Compare the predictions of two models with one vocabulary for a text, in the windows of `perplexity`.

    progress: called after each window with the number of compared tokens and their mean divergence.
    windows: stride and prefix.
    """
    if model.config.vocab_size != other.config.vocab_size:
        raise ValueError(
            f"the models have {model.config.vocab_size:,} and {other.config.vocab_size:,} tokens: "
            "only models of one vocabulary can be compared"
        )
    context = min(model.config.max_position_embeddings, other.config.max_position_embeddings, context or CONTEXT)
    nats, other_nats, divergence, largest, same, tokens = 0.0, 0.0, 0.0, 0.0, 0, 0
    both = (scored_chunks(each, token_ids, context=context, **windows) for each in (model, other))
    for first, second in zip(*both, strict=True):
        nats += negative_log_likelihood(first.logits, first.targets)
        other_nats += negative_log_likelihood(second.logits, second.targets)
        expected = torch.log_softmax(first.logits, -1).cpu().double()
        apart = (expected.exp() * (expected - torch.log_softmax(second.logits, -1).cpu().double())).sum(-1)
        divergence += apart.sum().item()
        _check_nan(divergence, first)
        largest = max(largest, apart.max().item())
        same += int((first.logits.argmax(-1).cpu() == second.logits.argmax(-1).cpu()).sum())
        tokens += len(first.targets)
        if first.is_last and progress is not None:
            progress(tokens, divergence / tokens)
    return Comparison(
        max(0.0, divergence / tokens),
        max(0.0, largest),
        same / tokens,
        exponential(nats / tokens),
        exponential(other_nats / tokens),
        tokens,
    )


class Chunk(NamedTuple):
    """Scored tokens of one window: the logits [n, V] that predict the tokens [n]."""

    plan: Plan
    scored: tuple[int, int]  # of the window, from the first scored token to its end
    is_last: bool  # of the window
    logits: Tensor
    targets: Tensor


def scored_chunks(
    model: Model, token_ids: Sequence[int], cache_dtype: str = "auto", *, prefix: Sequence[int] = (), **windows: Any
) -> Iterator[Chunk]:
    """The scored tokens of a text, window after window. windows: context and stride."""
    token_ids, prefix = as_token_ids(token_ids), as_token_ids(prefix)
    layout = plan(model.config, token_ids, prefix=prefix, **windows)
    check_mode(model)
    device = model_device(model)
    longest = min(layout.context, len(prefix) + len(token_ids))
    cache = make_cache(model, longest, device, prefill_chunk=CHUNK, cache_dtype=cache_dtype)
    for start, end, scored in layout.windows():
        window = torch.tensor([[*prefix, *token_ids[start:end]]], device=device)
        first = len(prefix) + scored - start  # scored token of the window
        inputs, targets = window[:, :-1], window[0, 1:]
        cache.reset()
        if first > 1:  # no logits for the tokens before
            step(model, cache, inputs[:, : first - 1], CHUNK)
        for at in range(first - 1, len(targets), CHUNK):
            logits = all_logits(model, cache, inputs[:, at : at + CHUNK])[0].float()
            yield Chunk(layout, (scored, end), at + CHUNK >= len(targets), logits, targets[at : at + CHUNK])


def _check_nan(value: float, chunk: Chunk) -> None:
    if math.isnan(value):
        first, end = chunk.scored
        raise ValueError(f"the logits contain a NaN between tokens {first:,} and {end:,} of the text")


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """The sum over tokens [n], in nats, from logits [n, V]."""
    return cross_entropy(logits, targets, reduction="none").cpu().double().sum().item()  # some devices have no float64


def exponential(value: float) -> float:
    """Infinity instead of an overflow error."""
    return torch.tensor(value, dtype=torch.float64).exp().item()
