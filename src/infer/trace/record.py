"""Recording a run: give a `Trace` to `generate` or `stream`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.cache.paged import PagedCache
from infer.cache.traced import TracedCache
from infer.cache.wrapped import innermost
from infer.config import ModelConfig
from infer.machine import available_memory
from infer.trace.data import Alternative, AttentionRows, Token, TraceData, TraceStep
from infer.trace.save import save
from infer.trace.text import token_text, token_texts


class Trace(TraceData):
    """Give one to `generate` or `stream`, and read `steps` while or after it runs.

    Each step keeps 2 bytes for every traced layer, head and visible position: for long runs choose some. The rows are
    those that made the output, from a softmax in float32; in 16 bits that rounds otherwise than a run without a trace,
    and near-ties may fall differently.
    """

    def __init__(
        self, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None, top_k: int = 10
    ) -> None:
        """layers, heads: which to keep rows of, -1 being the last; None: all. top_k: alternatives to keep."""
        if type(top_k) is not int or top_k < 1:
            raise ValueError(f"top_k must be a whole number, 1 or more, not {top_k!r}")
        for name, asked in (("layers", layers), ("heads", heads)):
            if asked is not None and (isinstance(asked, str) or not isinstance(asked, Sequence)):
                raise TypeError(f"{name} must be a list of numbers, or None for all, not {asked!r}")
        if heads is not None and not heads:
            raise ValueError("no heads are chosen: leave heads out for all of them, or give layers=[] for no rows")
        super().__init__()
        self._asked_layers, self._asked_heads, self.top_k = layers, heads, top_k
        self._model_type = ""

    def check(self, config: ModelConfig, prompt_len: int, max_new_tokens: int) -> None:
        """Settle layers and heads; refuse those that the model does not have, and more rows than memory would hold."""
        self.layers = _chosen("layer", self._asked_layers, config.num_hidden_layers)
        self.heads = _chosen("head", self._asked_heads, config.num_attention_heads)
        self._check_memory(config, prompt_len, max_new_tokens)

    def start(self, config: ModelConfig, tokenizer: Any, prompt: Sequence[int], known: int = 0) -> None:
        """Forget what was recorded before: a run that passed `check` begins. known: tokens that the cache holds."""
        if self.title == self._model_type:  # nobody gave it another
            self.title = config.model_type
        self._model_type = config.model_type
        self._tokenizer = tokenizer
        self.prompt = list(map(Token, prompt, token_texts(tokenizer, prompt)))
        self.steps = []
        self.cache_capacity = self.cache_page = 0
        self.known = known
        self._windows = [config.window(layer) for layer in range(config.num_hidden_layers)]

    def record(self, tokens: Sequence[int], logits: Tensor, cache: TracedCache, time_s: float) -> None:
        """tokens: all, the one just chosen last. logits: [V], what it was chosen from."""
        *_, before, token = tokens
        fed = len(tokens) - 1
        probabilities, entropy, best = choice(logits, self.top_k)
        if cache.memory_bytes:
            self.cache_capacity = cache.capacity
            inner = innermost(cache)
            self.cache_page = inner.pool.page if isinstance(inner, PagedCache) else 0
        self.steps.append(
            TraceStep(
                token_id=token,
                text=token_text(self._tokenizer, token, before),
                probability=probabilities[token].item(),
                entropy=entropy,
                alternatives=tuple(Alternative(i, token_text(self._tokenizer, i, before), p) for i, p in best),
                attention={layer: self._rows(layer, rows, fed) for layer, rows in cache.rows.items()},
                cache_positions=cache.seq_len,
                cache_bytes=cache.memory_bytes,
                time_s=time_s,
            )
        )

    def _rows(self, layer: int, rows: Tensor, fed: int) -> AttentionRows:
        """Of the chosen heads; a window layer's without the zeros in front of its window, if the cache keeps those."""
        window = min(rows.shape[-1], self._windows[layer] or fed)
        return AttentionRows(fed - window, rows[0, self.heads, -window:].half().cpu().numpy())

    def save(self, path: str | Path) -> None:
        """As JSON lines (.jsonl), as arrays (.npz), or as a page to look at (.html)."""
        save(self, Path(path))

    def _check_memory(self, config: ModelConfig, prompt_len: int, max_new_tokens: int) -> None:
        """Of the rows to come, before any is kept."""
        lengths = [min(n, config.max_position_embeddings) for n in range(prompt_len, prompt_len + max_new_tokens)]
        keys = sum(sum(min(n, config.window(layer) or n) for n in lengths) for layer in self.layers)
        needed, free = 2 * len(self.heads) * keys, available_memory(torch.device("cpu"))
        if free is not None and needed > free:
            raise ValueError(
                f"the attention rows of {max_new_tokens} steps, {len(self.layers)} layers and {len(self.heads)} heads "
                f"may take {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free: trace fewer layers or heads"
            )


def choice(logits: Tensor, top_k: int) -> tuple[Tensor, float, list[tuple[int, float]]]:
    """What a token is chosen from, logits [V]: all probabilities, their entropy in nats, and the likeliest ids."""
    probabilities = logits.float().softmax(-1)
    best = probabilities.topk(min(top_k, len(probabilities)))
    entropy = torch.special.entr(probabilities).sum().item()
    return probabilities, entropy, list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _chosen(what: str, asked: Sequence[int] | None, count: int) -> list[int]:
    if asked is None:
        return list(range(count))
    wrong = [i for i in asked if type(i) is not int or not -count <= i < count]
    if wrong:
        raise ValueError(f"there is no {what} {wrong[0]!r} to trace: the model has {what}s 0 to {count - 1}")
    return sorted({i % count for i in asked})
