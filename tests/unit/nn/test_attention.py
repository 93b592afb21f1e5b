"""Attention, with and without a cache, against explicit loops and a full softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from amount import once, pairs
from mocks import CACHES, naive_attention, sees
from torch import Tensor

from infer import SlidingCache
from infer.backend.cpu.ops import CpuAttention
from infer.cache import BaseCache, NoCache
from infer.models.common import Attention, ForwardContext
from infer.models.rows import Row, pack
from infer.nn import attention as attending
from infer.nn.rope import Rope

SCALE = 0.4
LENGTH = 9
# How 9 tokens are fed: at once, token by token, in chunks, and as prefill and decode.
SPLITS = [(9,), (1,) * 9, (4, 5), (2, 3, 4), (5, 1, 1, 2), (6, 1, 1, 1)]
WINDOWS = [None, 1, 3, 8, 9, 100]
# What computes it: plain torch, or a backend's kernel.
KERNELS = pytest.mark.parametrize("kernel", [None, CpuAttention()], ids=["torch", "kernel"])


@pytest.fixture(params=CACHES, ids=lambda cls: cls.__name__)
def cache_class(request: pytest.FixtureRequest) -> type[BaseCache]:
    return request.param


def random_qkv(heads: int, kv_heads: int, batch: int = 1, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, h, length, 8, generator=generator) for h in (heads, kv_heads, kv_heads))
    return q, k, v


def attend_in_parts(
    cache: BaseCache, qkv: tuple[Tensor, Tensor, Tensor], split: tuple[int, ...], **options: Any
) -> Tensor:
    """The outputs [B, Hq, S, D] of feeding a sequence in parts."""
    outputs = []
    for parts in zip(*(t.split(split, dim=2) for t in qkv), strict=True):
        outputs.append(cache.attend(0, *parts, scale=SCALE, **options))
        cache.advance(parts[0].shape[2])
    return torch.cat(outputs, dim=2)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


class TestVisibility:
    @pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
    def test_rule_pair_by_pair(self, window: int | None) -> None:
        q_pos = torch.tensor([0, 3, 4, 9])
        k_pos = torch.tensor([-1, 0, 1, 4, 3, -1, 9, 12])  # empty slots, and in no order
        mask = attending.visible(q_pos, k_pos, window)
        assert mask.tolist() == [[sees(q, k, window) for k in k_pos.tolist()] for q in q_pos.tolist()]

    def test_rows_of_different_lengths(self) -> None:
        q_pos = torch.tensor([[2], [5]])
        k_pos = torch.tensor([[0, 1, 2, -1], [3, 4, 5, 2]])
        mask = attending.visible(q_pos, k_pos, 3)
        assert mask.tolist() == [[[True, True, True, False]], [[True, True, True, False]]]

    @pairs(start=[0, 1, 2, 6], n=[1, 2, 4], window=[None, 1, 2, 3, 7, 100])
    def test_span_mask_is_the_rule(self, start: int, n: int, window: int | None) -> None:
        """For n queries after `start` keys: the first position does not matter."""
        keys = start + n
        mask = attending.span_mask(n, keys, window, torch.device("cpu"))
        if mask is None:
            got = [[True] * keys] * n
        elif isinstance(mask, str):
            assert n == keys  # where SDPA's own rule is ours
            got = [[j <= i for j in range(keys)] for i in range(n)]
        else:
            got = mask.tolist()
        assert got == [[sees(start + i, k, window) for k in range(keys)] for i in range(n)]


@KERNELS
class TestAttend:
    @pairs(cache_class=CACHES, split=SPLITS, window=WINDOWS)
    def test_windows_and_chunks(
        self, kernel: Any, cache_class: type[BaseCache], split: tuple[int, ...], window: int | None
    ) -> None:
        qkv = random_qkv(4, 2, batch=2)
        cache = cache_class.allocate(1, 2, 8, LENGTH, batch_size=2, dtype="float32", device="cpu")
        outputs = attend_in_parts(cache, qkv, split, window=window, kernel=kernel)
        assert_close(outputs, naive_attention(*qkv, scale=SCALE, window=window))

    @pairs(prefill_chunk=[1, 2, 4, 9], split=SPLITS, window=WINDOWS)
    def test_rings(self, kernel: Any, split: tuple[int, ...], prefill_chunk: int, window: int | None) -> None:
        """Passes narrower than the ring's chunk, as wide, and wider."""
        qkv = random_qkv(4, 2, batch=2)
        layout = {"windows": [window], "prefill_chunk": prefill_chunk, "batch_size": 2}
        cache = SlidingCache.allocate(1, 2, 8, LENGTH, dtype="float32", device="cpu", **layout)
        outputs = attend_in_parts(cache, qkv, split, window=window, kernel=kernel)
        assert_close(outputs, naive_attention(*qkv, scale=SCALE, window=window))

    @pytest.mark.parametrize("kept", [None, 5, 8])
    @pytest.mark.parametrize("split", SPLITS, ids=str)
    def test_rings_that_keep_more_than_the_window(self, kernel: Any, split: tuple[int, ...], kept: int | None) -> None:
        qkv = random_qkv(4, 2)
        layout = {"windows": [kept], "prefill_chunk": 1}
        cache = SlidingCache.allocate(1, 2, 8, LENGTH, dtype="float32", device="cpu", **layout)
        outputs = attend_in_parts(cache, qkv, split, window=3, kernel=kernel)
        assert_close(outputs, naive_attention(*qkv, scale=SCALE, window=3))

    @pytest.mark.parametrize("kv_heads", [1, 2])
    @pytest.mark.parametrize("ratio", [1, 3, 8])
    def test_grouped_heads(self, kernel: Any, cache_class: type[BaseCache], ratio: int, kv_heads: int) -> None:
        qkv = random_qkv(ratio * kv_heads, kv_heads, batch=2)
        cache = cache_class.allocate(1, kv_heads, 8, LENGTH, batch_size=2, dtype="float32", device="cpu")
        assert_close(attend_in_parts(cache, qkv, (4, 1, 1, 3), kernel=kernel), naive_attention(*qkv, scale=SCALE))

    @pytest.mark.parametrize("window", WINDOWS)
    def test_no_cache(self, kernel: Any, window: int | None) -> None:
        qkv = random_qkv(6, 2, batch=2)
        cache = NoCache(batch_size=2)
        for _ in range(2):  # it has forgotten the first
            assert_close(
                attend_in_parts(cache, qkv, (9,), window=window, kernel=kernel),
                naive_attention(*qkv, scale=SCALE, window=window),
            )

    @pytest.mark.parametrize("window", [None, 3])
    def test_after_truncate(self, kernel: Any, cache_class: type[BaseCache], window: int | None) -> None:
        q, k, v = random_qkv(4, 2)
        cache = cache_class.allocate(1, 2, 8, LENGTH, dtype="float32", device="cpu")
        attend_in_parts(cache, (q, k.flip(2), v.flip(2)), (5, 1, 3), window=window, kernel=kernel)
        cache.reset()
        attend_in_parts(cache, (q, k, v), (5, 4), window=window, kernel=kernel)
        cache.truncate(4)
        rest = attend_in_parts(cache, (q[:, :, 4:], k[:, :, 4:], v[:, :, 4:]), (3, 1, 1), window=window, kernel=kernel)
        assert_close(rest, naive_attention(q, k, v, scale=SCALE, window=window)[:, :, 4:])


class TestBlocks:
    """In plain torch a window layer's queries attend in blocks, each to its own window's keys."""

    @staticmethod
    def check(n: int, cached: int, window: int, masks: attending.Masks) -> None:
        q, k, v = random_qkv(2, 1, length=cached + n)
        got = attending.span_attention(q[:, :, cached:], k, v, scale=SCALE, window=window, masks=masks)
        assert_close(got, naive_attention(q, k, v, scale=SCALE, window=window)[:, :, cached:])

    @once(window=[1, 2, 3, 4, 5, 9, 18, 99], cached=[0, 1, 3, 17])
    def test_small_blocks(self, monkeypatch: pytest.MonkeyPatch, window: int, cached: int) -> None:
        monkeypatch.setattr(attending, "BLOCK", 4)
        for n in range(1, 3 * 4 + 6):
            self.check(n, cached, window, {})

    @pairs(
        n=[attending.BLOCK + 1, 3 * attending.BLOCK + 5],
        window=[1, 2, attending.BLOCK - 1, attending.BLOCK, attending.BLOCK + 1, 4 * attending.BLOCK],
        cached=[0, 50],
    )
    def test_blocks(self, n: int, window: int, cached: int) -> None:
        masks: attending.Masks = {}
        self.check(n, cached, window, masks)
        assert len(masks) <= 3  # the first block, those between, the last
        assert all(queries <= max(window, attending.BLOCK) for queries, _, _ in masks)
        assert all(keys < queries + window for queries, keys, _ in masks)

    @pytest.mark.parametrize("n", [4 * attending.BLOCK, 4 * attending.BLOCK + 5])
    @pytest.mark.parametrize("window", [3, attending.BLOCK + 1])
    def test_a_mask_is_shared_by_blocks_and_layers(
        self, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable, n: int, window: int
    ) -> None:
        seen: list[Any] = []  # every mask that attention was given, kept alive: an id stands for one object
        attention = attending.attention

        def spy(q: Tensor, k: Tensor, v: Tensor, *, mask: attending.Mask, **settings: Any) -> Tensor:
            seen.append(mask)
            return attention(q, k, v, mask=mask, **settings)

        monkeypatch.setattr(attending, "attention", spy)
        kinds = {"layer_types": ("sliding_attention",) * 4, "sliding_window": window}
        model = tiny_model(num_hidden_layers=4, max_position_embeddings=1024, **kinds)
        model.run([Row(NoCache(1), torch.zeros(1, n, dtype=torch.long))])
        blocks = -(-n // max(window, attending.BLOCK))
        assert blocks >= 4
        assert len(seen) == 4 * blocks
        assert len({id(mask) for mask in seen}) <= 3
        for layer in range(1, 4):
            later = seen[layer * blocks : (layer + 1) * blocks]
            assert all(a is b for a, b in zip(seen[:blocks], later, strict=True))


class TestRing:
    @pytest.mark.parametrize("slots", [1, 2, 5])
    def test_span(self, slots: int) -> None:
        for end in range(1, 3 * slots + 2):
            ring = torch.full((2, 3, slots, 2), -1.0)
            for position in range(end):
                ring[:, :, position % slots] = position
            for first in range(max(0, end - slots), end + 1):
                span = attending.ring_span(ring, first, end)
                assert span.shape == (2, 3, end - first, 2)
                assert span[1, 2, :, 1].tolist() == list(range(first, end))

    def test_span_without_a_wrap_is_a_view(self) -> None:
        ring = torch.randn(1, 2, 6, 4)
        assert attending.ring_span(ring, 8, 12).data_ptr() == ring[:, :, 2:].data_ptr()


class TestAttentionLayer:
    """One layer of a model: hidden size 32, 4 heads on 2 KV heads of 8."""

    @pytest.fixture
    def layer(self, tiny_model: Callable) -> Attention:
        return tiny_model().layers[0].self_attn

    @pytest.fixture
    def cache(self, cache_class: type[BaseCache]) -> BaseCache:
        return cache_class.allocate(1, 2, 8, 8, dtype="float32", device="cpu")

    @staticmethod
    def feed(layer: Attention, x: Tensor, cache: BaseCache, tiny_config: Callable) -> Tensor:
        """x [1, n, C] -> [1, n, C], without the residual."""
        n = x.shape[1]
        rows = pack([Row(cache, [0] * n)], x.device)
        out = layer(
            x[0],
            torch.zeros(n, 32),
            ForwardContext(rows, {"full_attention": Rope(tiny_config().rope, 8)(rows.positions)}),
        )
        rows.advance()
        return out[None]

    def test_prefill_then_decode(self, layer: Attention, cache: BaseCache, tiny_config: Callable) -> None:
        x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
        assert self.feed(layer, x[:, :4], cache, tiny_config).shape == (1, 4, 32)
        assert cache.seq_len == 4
        last = self.feed(layer, x[:, 4:], cache, tiny_config)
        assert last.shape == (1, 1, 32)
        assert cache.seq_len == 5
        assert_close(last, self.feed(layer, x, NoCache(), tiny_config)[:, 4:])

    def test_several_decode_steps(self, layer: Attention, cache: BaseCache, tiny_config: Callable) -> None:
        x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
        self.feed(layer, x[:, :2], cache, tiny_config)
        for i in range(2, 5):
            out = self.feed(layer, x[:, i : i + 1], cache, tiny_config)
            assert_close(out[:, 0], self.feed(layer, x[:, : i + 1], NoCache(), tiny_config)[:, i])


class TestMaskIsBuiltRarely:
    KINDS = {  # noqa: RUF012
        "full": {},
        "sliding": {"layer_types": ("sliding_attention",) * 4, "sliding_window": 3},
        "both": {"layer_types": ("sliding_attention", "full_attention") * 2, "sliding_window": 3},
    }

    @pytest.fixture
    def built(self, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
        """The windows that masks were built for."""
        built: list[int | None] = []
        visible = attending.visible

        def counted(q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
            built.append(window)
            return visible(q_pos, k_pos, window)

        monkeypatch.setattr(attending, "visible", counted)
        return built

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [  # windows of the masks for: a full prefill, a chunk, a decode step, another chunk
            ("full", [set(), {None}, set(), {None}]),
            ("sliding", [{3}, {3}, set(), {3}]),
            ("both", [{3}, {3, None}, set(), {3, None}]),
        ],
    )
    def test_once_per_window_and_forward(
        self, cache_class: type[BaseCache], tiny_model: Callable, built: list, kind: str, expected: list[set]
    ) -> None:
        model = tiny_model(num_hidden_layers=4, **self.KINDS[kind])
        cache = cache_class.from_model_config(model.config, 32, dtype="float32", device="cpu")
        for n, windows in zip((6, 4, 1, 4), expected, strict=True):
            built.clear()
            model.run([Row(cache, torch.zeros(1, n, dtype=torch.long))])
            assert len(built) == len(windows)
            assert set(built) == windows

    @pytest.mark.parametrize(("kind", "count"), [("full", 0), ("sliding", 1), ("both", 1)])
    def test_without_a_cache(self, tiny_model: Callable, built: list, kind: str, count: int) -> None:
        model = tiny_model(num_hidden_layers=4, **self.KINDS[kind])
        model.run([Row(NoCache(2), torch.zeros(2, 6, dtype=torch.long))])
        assert len(built) == count
