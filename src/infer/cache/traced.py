"""A cache that records attention weights and changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Unpack

from torch import Tensor

from infer.cache.base import AttendOptions, AttentionKernel, Cache, CacheWrapper, ScoreOptions
from infer.nn.attention import softmax_attention


class PromptRows(Protocol):
    """Receives the attention weights of a prompt layer by layer, as they are computed."""

    def num_recorded(self, start: int, stop: int) -> int: ...  # how many of the last positions of this pass to record
    def add_rows(self, layer_idx: int, start: int, weights: Tensor) -> None: ...  # [Hq, n, keys], from start on


class TracedCache(CacheWrapper):
    """Keeps the attention weights that the kernel computed: of the same scores, maximum and sum.

    rows: of the last pass, by traced layer, [B, Hq, n, keys] of its last n queries. The keys are those of the last
    positions: a window layer may have fewer keys than positions.
    """

    def __init__(
        self, cache: Cache, layers: Collection[int], *, queries: int | None = 1, prompt: PromptRows | None = None
    ) -> None:
        """queries: of each pass, the number of queries whose rows are kept, the last ones; None: all.

        prompt: receives the rows of a prompt's other queries. They are not kept: all layers' together, in float32,
        would take many times the memory of what `prompt` keeps of them.
        """
        super().__init__(cache)
        self.layers = frozenset(layers)
        self.queries = queries
        self.prompt = prompt
        self.rows: dict[int, Tensor] = {}

    def positions(self, n: int) -> Tensor:
        self.rows = {}
        return super().positions(n)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        if layer_idx not in self.layers:
            return super().attend(layer_idx, q, k, v, **options)
        stop = self.seq_len + q.shape[2]
        handed_over = 0 if self.prompt is None else self.prompt.num_recorded(self.seq_len, stop)
        kept = q.shape[2] if self.queries is None else self.queries
        recording = _RecordingKernel(options.get("kernel"), max(kept, handed_over))
        options["kernel"] = recording
        out = super().attend(layer_idx, q, k, v, **options)
        if self.prompt is not None and handed_over:
            self.prompt.add_rows(layer_idx, stop - handed_over, recording.rows[0, :, -handed_over:])
        last = recording.rows[:, :, -kept:]
        self.rows[layer_idx] = last.clone() if handed_over else last
        return out


class _RecordingKernel:
    """An attention kernel that keeps the weights of its last `count` queries. kernel: None for plain torch."""

    rows: Tensor  # [B, Hq, count, S]

    def __init__(self, kernel: AttentionKernel | None, count: int) -> None:
        self.kernel, self.count = kernel, count
        self.takes_int8 = kernel is not None and kernel.takes_int8

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, end: int, **options: Unpack[ScoreOptions]) -> Tensor:
        if self.kernel is None:
            out, self.rows = softmax_attention(q, k, v, rows=self.count, **options)
            return out
        self.rows = self.weights(q[:, :, -self.count :], k, v, end=end, **options)
        return self.kernel(q, k, v, end=end, **options)

    def weights(self, q: Tensor, k: Tensor, v: Tensor, *, end: int, **options: Unpack[ScoreOptions]) -> Tensor:
        if self.kernel is None:
            return softmax_attention(q, k, v, rows=q.shape[2], **options)[1]
        return self.kernel.weights(q, k, v, end=end, **options)
