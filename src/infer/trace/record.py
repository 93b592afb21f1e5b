"""Records a run: pass a `Trace` to `generate` or `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.cache.base import Cache, unwrap
from infer.cache.paged import PagedCache
from infer.cache.traced import TracedCache
from infer.config import ModelConfig
from infer.machine import available_memory
from infer.trace.data import AttentionRows, Token, TraceData, TraceStep
from infer.trace.page import in_notebook
from infer.trace.predictions import PROMPT_ROWS, first_query, predictions, row_weights
from infer.trace.save import as_frame, save
from infer.trace.text import partial_bytes, token_text, token_texts
from infer.values import value_or_type

BLOCK = 32  # positions whose probabilities are computed at once


class Trace(TraceData):
    """Pass one to `generate` or `stream`, and read `steps` during or after the run.

    Each step records 2 bytes for every traced layer, head and visible position: for long runs, trace only some. The
    output is computed from the recorded rows, with a softmax in float32; in 16 bits that rounds differently than a run
    without a trace, and near-ties may be decided differently. The last `prompt_rows` tokens
    of the prompt are recorded, too, or fewer if they would have more than 16 million weights.
    """

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        top_k: int = 10,
        prompt_rows: int = PROMPT_ROWS,
    ) -> None:
        """layers, heads: to record, -1 is the last; None: all. top_k: number of alternatives.

        prompt_rows: how many of the prompt's last tokens to record; 0: none.
        """
        if type(top_k) is not int or top_k < 1:
            raise ValueError(f"top_k must be an integer, 1 or more, not {top_k!r}")
        if type(prompt_rows) is not int or prompt_rows < 0:
            raise ValueError(f"prompt_rows must be an integer, 0 or more, not {prompt_rows!r}")
        for name, chosen in (("layers", layers), ("heads", heads)):
            if chosen is not None and (isinstance(chosen, str) or not isinstance(chosen, Sequence)):
                raise TypeError(f"{name} must be a list of numbers, or None for all, not {value_or_type(chosen)}")
        if heads is not None and not heads:
            raise ValueError("heads is empty: leave it out for all heads, or give layers=[] for no rows")
        super().__init__()
        self._layers, self._heads, self.top_k, self.prompt_rows = layers, heads, top_k, prompt_rows
        self._model_type = ""

    def __repr__(self) -> str:
        if not self.steps:
            return "<Trace of no run yet: give it to generate>"
        text = "".join(step.text for step in self.steps)
        kept = f"{len(self.layers)} layers x {len(self.heads)} heads"
        return (
            f"<Trace of {self.title or 'a model'}: {len(self.prompt)} prompt tokens, {len(self.steps)} generated, "
            f"{kept}: {text if len(text) <= 40 else text[:39] + '…'!r}>"
        )

    def _repr_html_(self) -> str | None:
        """The page, in a notebook."""
        return in_notebook(self) if self.steps else None

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each token of the prompt, then for each generated token.

        The index is the position. Columns: step (from 0; missing for the prompt), token_id, text, probability,
        surprisal and entropy (in nats, before temperature, filters and penalties), rank (1 is the most likely),
        top_token and top_probability (of rank 1), cache_positions, cache_bytes, time_s and drafted of the step. Values
        that were not recorded are missing.
        """
        return as_frame(self)

    def check(self, config: ModelConfig, prompt_len: int, max_new_tokens: int) -> None:
        """Resolve layers and heads; refuse layers and heads that do not exist, and more rows than fit into memory."""
        self.layers = _indices("layer", self._layers, config.num_hidden_layers)
        self.heads = _indices("head", self._heads, config.num_attention_heads)
        lengths = range(prompt_len, prompt_len + max_new_tokens)
        queries = [min(length, config.max_position_embeddings) - 1 for length in lengths]
        queries += range(self._first_query(config, prompt_len), prompt_len - 1)
        needed = 2 * sum(row_weights(config, self.layers, len(self.heads), query) for query in queries)
        free = available_memory(torch.device("cpu"))
        if free is not None and needed > free:
            raise ValueError(
                f"the attention rows of {max_new_tokens} steps, {len(self.layers)} layers and {len(self.heads)} heads "
                f"may take {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free: trace fewer layers or heads"
            )

    def start(
        self,
        config: ModelConfig,
        tokenizer: Any,
        prompt: Sequence[int],
        num_cached_tokens: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a run that passed `check`; earlier records are dropped.

        num_cached_tokens: prompt tokens that the cache holds. settings: of the run, to repeat it with.
        """
        if self.title == self._model_type:  # the user has set no title
            self.title = config.model_type
        self._model_type = config.model_type
        self._tokenizer, self._windows = tokenizer, config.windows
        texts, raw = token_texts(tokenizer, prompt), [partial_bytes(tokenizer, token) for token in prompt]
        self.prompt = list(map(Token, prompt, texts, raw))
        self.steps = []
        self.cache_capacity = self.cache_page = 0
        self.num_cached_tokens = num_cached_tokens
        self.settings = {**(settings or {}), "top_k": self.top_k, "prompt_rows": self.prompt_rows}
        self._queries = range(self._first_query(config, len(prompt)), len(prompt) - 1)
        self._rows: dict[int, dict[int, AttentionRows]] = {query: {} for query in self._queries}  # and by layer

    def wrap(self, cache: Cache) -> TracedCache:
        """The cache to run with."""
        return TracedCache(cache, self.layers, prompt=self)

    def num_recorded(self, start: int, stop: int) -> int:
        """How many of the last positions of a pass are recorded."""
        begin = max(start, self._queries.start)
        return stop - begin if not self.steps and begin < min(stop, self._queries.stop) else 0

    def add_rows(self, layer_idx: int, start: int, weights: Tensor) -> None:
        """weights: [Hq, n, keys] of the prompt's queries from start on; the last query sees all keys."""
        queries, keys = weights.shape[1:]
        kept = weights[self.heads].half().cpu().numpy()
        first_key = start + queries - keys
        window = self._windows[layer_idx]
        for query in range(start, min(start + queries, self._queries.stop)):
            first = max(first_key, 0 if window is None else query + 1 - window)
            row = kept[:, query - start, first - first_key : query + 1 - first_key]
            self._rows[query][layer_idx] = AttentionRows(first, row.copy())

    def add_logits(self, start: int, logits: Tensor) -> None:
        """logits: [n, V] of the prompt's queries from start on, after their rows."""
        stop = 0 if self.steps else min(start + len(logits), self._queries.stop)
        for at in range(max(start, self._queries.start), stop, BLOCK):
            block = range(at, min(at + BLOCK, stop))
            tokens = [token.token_id for token in self.prompt[at : block.stop + 1]]
            found = predictions(
                logits[at - start : block.stop - start], tokens[1:], tokens[:-1], self._tokenizer, self.top_k
            )
            for query, prediction in zip(block, found, strict=True):
                prediction = replace(prediction, attention=self._rows[query])
                self.prompt[query + 1] = self.prompt[query + 1]._replace(prediction=prediction)

    def record(
        self,
        tokens: Sequence[int],
        logits: Tensor,
        cache: TracedCache,
        time_s: float,
        query: int = 0,
        drafted: bool = False,
    ) -> None:
        """tokens: of the sequence, up to one just chosen. logits: [V], which it was chosen from.

        query: the index of its row among the queries that the cache keeps. drafted: whether it was an accepted draft.
        """
        *_, before, token = tokens
        [prediction] = predictions(logits[None], [token], [before], self._tokenizer, self.top_k)
        if cache.memory_bytes:
            self.cache_capacity = cache.capacity
            inner = unwrap(cache)
            self.cache_page = inner.pool.page_size if isinstance(inner, PagedCache) else 0
        fed, attention = len(tokens) - 1, {}
        for layer, rows in cache.rows.items():  # of a window layer, without the zeros before its window
            seen = rows.shape[3] - (rows.shape[2] - 1 - query)  # the keys after it are of later queries
            window = min(seen, self._windows[layer] or fed)
            weights = rows[0, self.heads, query, seen - window : seen].half().cpu().numpy()
            attention[layer] = AttentionRows(fed - window, weights)
        self.steps.append(
            TraceStep(
                **vars(prediction) | {"attention": attention},
                token_id=token,
                text=token_text(self._tokenizer, token, before),
                raw=partial_bytes(self._tokenizer, token),
                cache_positions=min(cache.seq_len, fed),  # without those of tokens that the same step chose after it
                cache_bytes=cache.memory_bytes,
                time_s=time_s,
                drafted=drafted,
            )
        )

    def save(self, path: str | Path) -> None:
        """As JSON lines (.jsonl), as arrays (.npz), or as a page for a browser (.html)."""
        save(self, Path(path))

    def _first_query(self, config: ModelConfig, prompt_len: int) -> int:
        return first_query(config, self.layers, len(self.heads), prompt_len, self.prompt_rows)


def _indices(what: str, chosen: Sequence[int] | None, count: int) -> list[int]:
    if chosen is None:
        return list(range(count))
    wrong = [i for i in chosen if type(i) is not int or not -count <= i < count]
    if wrong:
        raise ValueError(f"there is no {what} {wrong[0]!r} to trace: the model has {what}s 0 to {count - 1}")
    return sorted({i % count for i in chosen})
