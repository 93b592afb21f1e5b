"""Recording a run: give a `Trace` to `generate` or `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.cache.base import Cache
from infer.cache.paged import PagedCache
from infer.cache.traced import PromptTracedCache, TracedCache
from infer.cache.wrapped import innermost
from infer.config import ModelConfig
from infer.machine import available_memory
from infer.trace.data import AttentionRows, Token, TraceData, TraceStep
from infer.trace.frame import as_frame
from infer.trace.page import in_notebook
from infer.trace.predictions import predictions
from infer.trace.prompt import PROMPT_ROWS, PromptRecorder, first_query, row_weights
from infer.trace.save import save
from infer.trace.text import partial_bytes, token_text, token_texts
from infer.values import named


class Trace(TraceData):
    """Give one to `generate` or `stream`, and read `steps` while or after it runs.

    Each step keeps 2 bytes for every traced layer, head and visible position: for long runs choose some. The rows are
    those that made the output, from a softmax in float32; in 16 bits that rounds otherwise than a run without a trace,
    and near-ties may fall differently. Of the prompt, the last tokens are kept likewise, `prompt_rows` at most, and
    fewer where their weights would be more than 16 million.
    """

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        top_k: int = 10,
        prompt_rows: int = PROMPT_ROWS,
    ) -> None:
        """layers, heads: which to keep rows of, -1 being the last; None: all. top_k: alternatives to keep.

        prompt_rows: tokens of the prompt, the last ones, to keep predictions and rows of; 0: none.
        """
        if type(top_k) is not int or top_k < 1:
            raise ValueError(f"top_k must be a whole number, 1 or more, not {top_k!r}")
        if type(prompt_rows) is not int or prompt_rows < 0:
            raise ValueError(f"prompt_rows must be a whole number, 0 or more, not {prompt_rows!r}")
        for name, asked in (("layers", layers), ("heads", heads)):
            if asked is not None and (isinstance(asked, str) or not isinstance(asked, Sequence)):
                raise TypeError(f"{name} must be a list of numbers, or None for all, not {named(asked)}")
        if heads is not None and not heads:
            raise ValueError("no heads are chosen: leave heads out for all of them, or give layers=[] for no rows")
        super().__init__()
        self._asked_layers, self._asked_heads, self.top_k, self.prompt_rows = layers, heads, top_k, prompt_rows
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
        """A pandas DataFrame with a row for each token; see `infer.trace.frame` for its columns."""
        return as_frame(self)

    def check(self, config: ModelConfig, prompt_len: int, max_new_tokens: int) -> None:
        """Settle layers and heads; refuse those that the model does not have, and more rows than memory would hold."""
        self.layers = _chosen("layer", self._asked_layers, config.num_hidden_layers)
        self.heads = _chosen("head", self._asked_heads, config.num_attention_heads)
        self._check_memory(config, prompt_len, max_new_tokens)

    def start(
        self,
        config: ModelConfig,
        tokenizer: Any,
        prompt: Sequence[int],
        known: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Forget what was recorded before: a run that passed `check` begins.

        known: tokens that the cache holds. settings: of the run, to be kept with it.
        """
        if self.title == self._model_type:  # nobody gave it another
            self.title = config.model_type
        self._model_type = config.model_type
        self._tokenizer = tokenizer
        texts, raw = token_texts(tokenizer, prompt), [partial_bytes(tokenizer, token) for token in prompt]
        self.prompt = list(map(Token, prompt, texts, raw))
        self.steps = []
        self.cache_capacity = self.cache_page = 0
        self.known = known
        self.settings = {**(settings or {}), "top_k": self.top_k, "prompt_rows": self.prompt_rows}
        first = first_query(config, self.layers, len(self.heads), len(prompt), self.prompt_rows)
        self._recorder = PromptRecorder(config, tokenizer, list(prompt), first, self.heads, self.top_k)
        self._windows = [config.window(layer) for layer in range(config.num_hidden_layers)]

    def watch(self, cache: Cache) -> TracedCache:
        """The cache to run with."""
        return PromptTracedCache(cache, self.layers, self)

    def wanted(self, start: int, stop: int) -> int:
        """Of the positions that a pass feeds, of how many of the last rows and logits are recorded."""
        return 0 if self.steps else self._recorder.wanted(start, stop)

    def add_rows(self, layer_idx: int, start: int, weights: Tensor) -> None:
        self._recorder.add_rows(layer_idx, start, weights)

    def add_logits(self, start: int, logits: Tensor) -> None:
        if not self.steps:
            self._recorder.add_logits(start, logits)

    def record(self, tokens: Sequence[int], logits: Tensor, cache: TracedCache, time_s: float) -> None:
        """tokens: all, the one just chosen last. logits: [V], what it was chosen from."""
        *_, before, token = tokens
        if not self.steps:
            self._keep_prompt()
        [prediction] = predictions(logits[None], [token], [before], self._tokenizer, self.top_k)
        if cache.memory_bytes:
            self.cache_capacity = cache.capacity
            inner = innermost(cache)
            self.cache_page = inner.pool.page if isinstance(inner, PagedCache) else 0
        fed = len(tokens) - 1
        attention = {layer: self._rows(layer, rows, fed) for layer, rows in cache.rows.items()}
        self.steps.append(
            TraceStep(
                **vars(prediction) | {"attention": attention},
                token_id=token,
                text=token_text(self._tokenizer, token, before),
                raw=partial_bytes(self._tokenizer, token),
                cache_positions=cache.seq_len,
                cache_bytes=cache.memory_bytes,
                time_s=time_s,
            )
        )

    def _keep_prompt(self) -> None:
        found = self._recorder.all()
        self.prompt = [token._replace(prediction=found.get(i)) for i, token in enumerate(self.prompt)]

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
        first = first_query(config, self.layers, len(self.heads), prompt_len, self.prompt_rows)
        queries = [*range(first, prompt_len - 1), *(length - 1 for length in lengths)]
        needed = 2 * sum(row_weights(config, self.layers, len(self.heads), query) for query in queries)
        free = available_memory(torch.device("cpu"))
        if free is not None and needed > free:
            raise ValueError(
                f"the attention rows of {max_new_tokens} steps, {len(self.layers)} layers and {len(self.heads)} heads "
                f"may take {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free: trace fewer layers or heads"
            )


def _chosen(what: str, asked: Sequence[int] | None, count: int) -> list[int]:
    if asked is None:
        return list(range(count))
    wrong = [i for i in asked if type(i) is not int or not -count <= i < count]
    if wrong:
        raise ValueError(f"there is no {what} {wrong[0]!r} to trace: the model has {what}s 0 to {count - 1}")
    return sorted({i % count for i in asked})
