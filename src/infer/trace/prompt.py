"""What is recorded of a prompt while it is computed: how likely each token was, and where its query looked."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.config import ModelConfig
from infer.trace.data import AttentionRows, Prediction
from infer.trace.predictions import predictions

PROMPT_ROWS = 256  # tokens of a prompt that are recorded, the last ones
# Weights kept of all of them: 32 MB in memory, and less than 16 MB of a page. A long prompt has fewer rows then.
PROMPT_WEIGHTS = 2**24
BLOCK = 32  # positions whose probabilities are worked out at once


class PromptRecorder:
    """Collects rows and logits of the queries first, first + 1, ... of a prompt, in whichever passes they come.

    Each query predicts the token behind it. The last one's is the first token generated, and no part of this.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: object,
        prompt: Sequence[int],
        first: int,
        heads: Sequence[int],
        top_k: int,
    ) -> None:
        self.first, self.end = first, len(prompt) - 1
        self._config, self._tokenizer, self._prompt, self._heads, self._top_k = config, tokenizer, prompt, heads, top_k
        self._rows: dict[int, dict[int, AttentionRows]] = {}  # by query and layer
        self._predictions: dict[int, Prediction] = {}  # by query, without their rows

    def wanted(self, start: int, stop: int) -> int:
        """Of the positions that a pass feeds, how many of the last."""
        begin = max(start, self.first)
        return stop - begin if begin < min(stop, self.end) else 0

    def add_rows(self, layer_idx: int, start: int, weights: Tensor) -> None:
        """weights: [Hq, n, keys] of the queries from start on; the last one sees all the keys."""
        queries, keys = weights.shape[1:]
        kept = weights[self._heads].half().cpu().numpy()
        first_key = start + queries - keys
        window = self._config.window(layer_idx)
        for query in range(start, min(start + queries, self.end)):
            first = max(first_key, 0 if window is None else query + 1 - window)
            row = kept[:, query - start, first - first_key : query + 1 - first_key]
            self._rows.setdefault(query, {})[layer_idx] = AttentionRows(first, row.copy())

    def add_logits(self, start: int, logits: Tensor) -> None:
        """logits: [n, V] of the queries from start on."""
        begin, end = max(start, self.first), min(start + len(logits), self.end)
        for at in range(begin, end, BLOCK):
            stop = min(at + BLOCK, end)
            expected, before = self._prompt[at + 1 : stop + 1], self._prompt[at:stop]
            found = predictions(logits[at - start : stop - start], expected, before, self._tokenizer, self._top_k)
            self._predictions.update(zip(range(at, stop), found, strict=True))

    def all(self) -> dict[int, Prediction]:
        """What is there, by the position of the token that was predicted."""
        return {
            query + 1: Prediction(**vars(found) | {"attention": self._rows.get(query, {})})
            for query, found in self._predictions.items()
        }


def first_query(config: ModelConfig, layers: Sequence[int], heads: int, prompt_len: int, most: int) -> int:
    """The first query of a prompt to record: of the last `most`, as many as PROMPT_WEIGHTS allows."""
    if prompt_len > config.max_position_embeddings:
        return prompt_len - 1  # it is fed anew for each token, at other positions
    first, weights = prompt_len - 1, 0
    while first > max(0, prompt_len - 1 - most):
        weights += row_weights(config, layers, heads, first - 1)
        if weights > PROMPT_WEIGHTS:
            break
        first -= 1
    return first


def row_weights(config: ModelConfig, layers: Sequence[int], heads: int, query: int) -> int:
    """How many weights the rows of a query have."""
    return heads * sum(min(query + 1, config.window(layer) or query + 1) for layer in layers)
