"""The contract of every cache, then what is peculiar to one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from amount import pairs
from mocks import CACHES, LAYOUTS, STORED, as_stored
from torch import Tensor, nn

from infer import GrowingCache, KVCache, ModelConfig, SlidingCache, machine
from infer.backend.cpu import kernels
from infer.backend.cpu.ops import CpuAttention
from infer.cache import BaseCache, Cache, NoCache, PagedCache, TracedCache
from infer.cache.debug import DebugCache
from infer.cache.int8 import GROUP, decode, encode, values_in
from infer.cache.int8 import width as stored_width
from infer.cache.ring import layer_slots
from infer.cache.table import BITS, FILLED, SLOTS, STRIDE, K, V
from infer.engine.model import all_logits
from infer.models.common import Decoder

SIZES = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "max_seq_len": 16}
MakeCache = Callable[..., BaseCache]
# Every kind as `allocate` makes it; and rings: longer than the cache, and of 10 slots, which 16 positions wrap around.
MADE: dict[str, tuple[Any, dict[str, Any]]] = {
    **{cls.__name__: (cls, {}) for cls in CACHES},
    "long rings": (SlidingCache, {"windows": (30, 30), "prefill_chunk": 3}),
    "rings": (SlidingCache, {"windows": (None, 8), "prefill_chunk": 2}),
    "pages": (PagedCache, {"page_size": 4}),
    "windows in pages": (PagedCache, {"windows": (None, 8), "page_size": 3}),
}


@pytest.fixture(params=MADE.values(), ids=MADE.keys())
def layout(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return request.param


@pytest.fixture(params=STORED)
def make(layout: tuple[Any, dict[str, Any]], request: pytest.FixtureRequest) -> MakeCache:
    cls, own = layout

    def make(**changes: Any) -> BaseCache:
        options = {"dtype": request.param, "device": "cpu"} | SIZES | own | changes
        if "windows" in options:
            options["windows"] = options["windows"][-options["num_layers"] :]
        return cls.allocate(**options)

    return make


def random_kv(cache: BaseCache, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if cache.quantized else cache.dtype
    shape = (cache.shape.batch_size, cache.shape.num_kv_heads, n, cache.shape.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape, generator=generator).to(dtype),
    )


def fill(cache: BaseCache, n: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """One forward pass over n tokens, with different values in each layer; returns what was written."""
    written = [random_kv(cache, n, seed * 100 + layer) for layer in range(cache.shape.num_layers)]
    for layer, (k, v) in enumerate(written):
        cache.update(layer, k, v)
    cache.advance(n)
    return written


def stored(cache: BaseCache) -> list[Tensor]:
    """A copy of everything in memory, filled or not, layer by layer."""
    return [t.clone() for t in (*cache.k, *cache.v)]


def whole_pages(cache: PagedCache, positions: int) -> int:
    return -(-positions // cache.pool.page_size) * cache.pool.page_size


def assert_holds(cache: BaseCache, *passes: list[tuple[Tensor, Tensor]]) -> None:
    """The cache returns exactly these passes, rounded if it does that, in order, in front of one more token.

    Of a ring, that token's window.
    """
    for layer in range(cache.shape.num_layers):
        last = random_kv(cache, 1, seed=999)
        got = cache.update(layer, *last)
        window = cache.windows[layer]
        for i in range(2):
            expected = torch.cat([written[layer][i] for written in passes] + [last[i]], dim=2)
            expected = as_stored(expected if window is None else expected[:, :, -window:], cache)
            assert torch.equal(got[i], expected), f"layer {layer}"


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    """A forward pass breaks off before this module."""

    def fail(*_: object) -> None:
        raise RuntimeError("halfway")

    hook = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="halfway"):
        yield
    hook.remove()


class TestContract:
    def test_allocation(self, make: MakeCache) -> None:
        for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.int8]:
            cache = make(dtype=dtype, batch_size=3)
            assert cache.shape == (2, 3, 4, 16, 8)
            assert cache.dtype == dtype
            assert cache.device == torch.device("cpu")
            assert cache.seq_len == 0
            assert cache.capacity == 16

    def test_sizes_are_checked(self, make: MakeCache) -> None:
        for name, size in product([*SIZES, "batch_size"], [0, -1]):
            with pytest.raises(ValueError, match=rf"{name} must be at least 1, not {size}"):
                make(**{name: size})

    @pytest.mark.parametrize("cls", CACHES)
    def test_from_model_config(self, tiny_config: Callable, cls: type[BaseCache]) -> None:
        config = tiny_config(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=10)
        cache = cls.from_model_config(config, 7, batch_size=2, dtype="bfloat16", device="cpu")
        assert cache.shape == (3, 2, 2, 7, 10)
        assert cache.dtype == torch.bfloat16

    def test_update_and_advance(self, make: MakeCache) -> None:
        cache = make()
        k, v = random_kv(cache, 4)
        got_k, got_v = cache.update(0, k, v)
        assert got_k.shape == got_v.shape == (1, 4, 4, 8)
        assert cache.seq_len == 0  # not before the pass has ended
        cache.advance(4)
        assert cache.seq_len == 4
        last_k, last_v = random_kv(cache, 1, seed=1)
        got_k, got_v = cache.update(0, last_k, last_v)
        assert torch.equal(got_k, as_stored(torch.cat((k, last_k), dim=2), cache))
        assert torch.equal(got_v, as_stored(torch.cat((v, last_v), dim=2), cache))
        cache.advance(1)
        assert cache.seq_len == 5

    def test_layers_are_isolated(self, make: MakeCache) -> None:
        cache = make()
        first, second = fill(cache, 3, seed=1), fill(cache, 2, seed=2)
        assert not torch.equal(first[0][0], first[1][0])
        assert_holds(cache, first, second)

    def test_rows_are_isolated(self, make: MakeCache) -> None:
        cache = make(batch_size=3)
        assert_holds(cache, fill(cache, 5, seed=1), fill(cache, 1, seed=2))

    def test_input_is_copied(self, make: MakeCache) -> None:
        cache = make(num_layers=1)
        k, v = random_kv(cache, 2)
        cache.update(0, k, v)
        cache.advance(2)
        written = [(k.clone(), v.clone())]
        k.zero_()
        v.zero_()
        assert_holds(cache, written)

    def test_writing_the_same_position_again_replaces_it(self, make: MakeCache) -> None:
        cache = make()
        first = fill(cache, 2, seed=1)
        cache.update(0, *random_kv(cache, 3, seed=5))
        assert_holds(cache, first, fill(cache, 2, seed=2))

    def test_update_with_no_tokens_returns_what_is_held(self, make: MakeCache) -> None:
        cache = make()
        written = fill(cache, 3)
        keys, values = cache.update(1, *random_kv(cache, 0))
        assert torch.equal(keys, as_stored(written[1][0], cache))
        assert torch.equal(values, as_stored(written[1][1], cache))

    @pytest.mark.parametrize(
        ("dtype", "vector"), [(torch.float32, 8 * 4), (torch.bfloat16, 8 * 2), (torch.int8, 8 + 2)]
    )
    def test_memory_of_a_full_cache(self, make: MakeCache, dtype: torch.dtype, vector: int) -> None:
        cache = make(batch_size=3, dtype=dtype)
        fill(cache, 16)
        positions = sum(16 if window is None else min(window + 2, 16) for window in cache.windows)
        if isinstance(cache, PagedCache):  # which lets go of a window's pages at the next pass
            positions = 2 * whole_pages(cache, 16)
        assert cache.memory_bytes == 2 * positions * 3 * 4 * vector

    def test_positions(self, make: MakeCache) -> None:
        cache = make(batch_size=2)
        assert cache.positions(3).tolist() == [[0, 1, 2]] * 2
        fill(cache, 5)
        assert cache.positions(1).tolist() == [[5]] * 2
        cache.truncate(2)
        assert cache.positions(2).tolist() == [[2, 3]] * 2

    def test_capacity_of_one(self, make: MakeCache) -> None:
        cache = make(max_seq_len=1)
        written = fill(cache, 1)
        assert cache.seq_len == cache.capacity == 1
        with pytest.raises(ValueError, match="overflow"):
            cache.update(0, *random_kv(cache, 1))
        cache.truncate(0)
        cache.update(0, *written[0])

    def test_filled_to_the_last_position(self, make: MakeCache) -> None:
        cache = make()
        first = fill(cache, 15)
        assert_holds(cache, first)
        cache.advance(1)
        assert cache.seq_len == 16

    def test_truncate_then_write_again(self, make: MakeCache) -> None:
        cache = make()
        first = fill(cache, 6, seed=1)
        fill(cache, 4, seed=2)
        cache.truncate(3)
        assert cache.seq_len == 3
        kept = [(k[:, :, :3], v[:, :, :3]) for k, v in first]
        assert_holds(cache, kept, fill(cache, 5, seed=3))

    def test_truncate_to_its_own_length_keeps_everything(self, make: MakeCache) -> None:
        cache = make()
        first = fill(cache, 6)
        cache.truncate(6)
        assert_holds(cache, first)

    def test_truncate_refuses(self, make: MakeCache) -> None:
        for seq_len in [-1, 7, 100]:
            cache = make()
            first = fill(cache, 6)
            with pytest.raises(ValueError, match=rf"truncate to {seq_len}: the cache holds 6"):
                cache.truncate(seq_len)
            assert_holds(cache, first)

    def test_reset(self, make: MakeCache) -> None:
        cache = make()
        fill(cache, 6, seed=1)
        cache.reset()
        assert cache.seq_len == 0
        assert_holds(cache, fill(cache, 2, seed=2))

    REFUSED: ClassVar = [
        (2, {}, "layer 2 of a cache with 2 layers"),
        (-1, {}, "layer -1 of a cache"),
        (0, {"shape": (2, 4, 2, 8)}, "batch 1"),
        (0, {"shape": (1, 8, 2, 8)}, "kv_heads 4"),
        (0, {"shape": (1, 4, 2, 6)}, "head_dim 8"),
        (0, {"shape": (4, 2, 8)}, "do not fit"),
        (0, {"shape": (1, 4, 3, 8)}, "do not fit"),  # good alone, but not beside the other of 2 tokens
        (0, {"dtype": torch.bfloat16}, "the cache (holds torch.float32|takes floats of one dtype)"),
        (0, {"dtype": torch.int8}, "the cache (holds torch.float32|takes floats of one dtype)"),
        (0, {"device": "meta"}, "the cache is on cpu"),
    ]

    def test_refused_before_anything_is_written(self, make: MakeCache) -> None:
        cache = make()
        first = fill(cache, 3)
        before = stored(cache)
        good = torch.ones(1, 4, 2, 8)
        for layer, changes, message in self.REFUSED:
            bad = torch.ones(changes.get("shape", good.shape), **{k: v for k, v in changes.items() if k != "shape"})
            for k, v in ((bad, good), (good, bad)):
                with pytest.raises(ValueError, match=message):
                    cache.update(layer, k, v)
                assert all(map(torch.equal, stored(cache), before))
        assert_holds(cache, first)

    def test_overflow_is_refused_before_anything_is_written(self, make: MakeCache) -> None:
        for n in [4, 17]:
            cache = make()
            first = fill(cache, 13)
            before = stored(cache)
            message = f"overflow: 13 positions filled, {n} more requested, capacity 16"
            with pytest.raises(ValueError, match=message):
                cache.update(0, *random_kv(cache, n))
            with pytest.raises(ValueError, match=message):
                cache.positions(n)
            with pytest.raises(ValueError, match=message):
                cache.advance(n)
            assert cache.seq_len == 13
            assert all(map(torch.equal, stored(cache), before))
            assert_holds(cache, first)

    def test_negative_moves_are_refused(self, make: MakeCache) -> None:
        cache = make()
        fill(cache, 3)
        with pytest.raises(ValueError, match="cannot move by -1"):
            cache.advance(-1)
        assert cache.seq_len == 3

    @pairs({"cls, options": LAYOUTS}, dtype=STORED, window=[None, 3], retry=[1, 2, 4])
    def test_a_failed_forward_leaves_nothing_behind(
        self, dtype: str, cls: type[BaseCache], options: dict, tiny_model: Callable, retry: int, window: int | None
    ) -> None:
        kinds = {} if window is None else {"layer_types": ("sliding_attention",) * 2, "sliding_window": window}
        model = tiny_model(**kinds)
        cache = cls.from_model_config(model.config, 16, dtype=dtype, device="cpu", **options)
        ids = torch.arange(10)[None]
        model(ids[:, :3], kv_cache=cache)
        untouched = copy.deepcopy(cache)
        with failing(model.layers[1]):
            model(torch.tensor([[60, 61]]), kv_cache=cache)
        assert cache.seq_len == 3
        logits = model(ids[:, 3 : 3 + retry], kv_cache=cache)
        assert cache.seq_len == 3 + retry
        assert torch.equal(logits, model(ids[:, 3 : 3 + retry], kv_cache=untouched))
        if dtype == "float32":
            torch.testing.assert_close(logits, model(ids[:, : 3 + retry])[:, -1:], atol=1e-5, rtol=1e-5)

    def test_the_batch_must_be_the_caches(self, make: MakeCache, tiny_model: Callable) -> None:
        model = tiny_model(num_attention_heads=4, num_key_value_heads=4)
        for cache_rows, rows in ((1, 2), (3, 1), (3, 2)):
            cache = make(batch_size=cache_rows)
            with pytest.raises(ValueError, match="batch"):
                model(torch.zeros(rows, 2, dtype=torch.long), kv_cache=cache)
            assert cache.seq_len == 0


class TestKVCache:
    def test_layout(self) -> None:
        cache = KVCache.allocate(**SIZES, batch_size=3, dtype=torch.float16, device="cpu")
        assert cache.k.shape == cache.v.shape == (2, 3, 4, 16, 8)  # layers, batch, kv_heads, max_seq_len, head_dim
        assert cache.k.dtype == cache.v.dtype == torch.float16
        assert cache.k.is_contiguous()
        assert cache.v.is_contiguous()
        assert not cache.k.any()
        assert not cache.v.any()

    def test_writes_in_place(self) -> None:
        cache = KVCache.allocate(**SIZES, dtype=torch.float32, device="cpu")
        memory = cache.k.data_ptr(), cache.v.data_ptr(), cache.memory_bytes
        written = [fill(cache, n, seed=n) for n in (3, 1, 2)]
        assert (cache.k.data_ptr(), cache.v.data_ptr(), cache.memory_bytes) == memory
        for layer in range(2):
            expected = torch.cat([layers[layer][0] for layers in written], dim=2)
            assert torch.equal(cache.k[layer, :, :, :6], expected)
        assert not cache.k[:, :, :, 6:].any()
        keys, _ = cache.update(0, *random_kv(cache, 1))
        assert keys.data_ptr() == cache.k.data_ptr()  # a view, not a copy

    def test_memory_is_taken_up_front(self) -> None:
        cache = KVCache.allocate(**SIZES, batch_size=2, dtype=torch.bfloat16, device="cpu")
        assert cache.memory_bytes == 2 * 2 * 2 * 4 * 16 * 8 * 2

    def test_from_tensors(self) -> None:
        k, v = torch.randn(2, 1, 1, 4, 8, 2).unbind()  # each [layers 1, batch 1, kv_heads 4, positions 8, head_dim 2]
        cache = KVCache(k.clone(), v.clone(), seq_len=3)
        assert cache.positions(1).tolist() == [[3]]
        assert_holds(cache, [(k[0, :, :, :3], v[0, :, :, :3])])

    @pytest.mark.parametrize(
        ("k", "v"),
        [
            (torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4, 16)),
            (torch.zeros(2, 1, 4, 16, 8), torch.zeros(2, 1, 4, 16, 6)),
            (torch.zeros(2, 1, 4, 16, 8), torch.zeros(2, 1, 4, 16, 8, dtype=torch.bfloat16)),
            (torch.zeros(2, 1, 4, 16, 8), torch.zeros(2, 1, 4, 16, 8, device="meta")),
        ],
        ids=["four dimensions", "shapes differ", "dtypes differ", "devices differ"],
    )
    def test_tensors_must_be_alike(self, k: Tensor, v: Tensor) -> None:
        with pytest.raises(ValueError, match="k and v must have the same shape"):
            KVCache(k, v)

    @pytest.mark.parametrize("seq_len", [-1, 17])
    def test_seq_len_must_fit(self, seq_len: int) -> None:
        with pytest.raises(ValueError, match=rf"seq_len {seq_len} is outside 0\.\.16"):
            KVCache(torch.zeros(2, 1, 4, 16, 8), torch.zeros(2, 1, 4, 16, 8), seq_len)

    def test_more_than_the_memory_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.cache.base.available_memory", lambda device: 10**9)
        with pytest.raises(ValueError, match=r"1000000 positions needs 1\.02 GB, but 1\.00 GB are free on cpu"):
            KVCache.allocate(1, 2, 64, 10**6, dtype=torch.float32, device="cpu")

    @pytest.mark.parametrize("free", [2 * 2 * 4 * 16 * 8 * 4, None])
    def test_exactly_the_memory_is_enough(self, monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
        monkeypatch.setattr("infer.cache.base.available_memory", lambda device: free)
        assert KVCache.allocate(**SIZES, dtype=torch.float32, device="cpu").memory_bytes == 8192


class TestSeveralCaches:
    """They add up, although a CPU's memory counts as free until it is written."""

    @pytest.mark.parametrize("windows", [None, [4, None]], ids=["full", "windows"])
    def test_add_up(self, monkeypatch: pytest.MonkeyPatch, windows: list[int | None] | None) -> None:
        def allocate() -> BaseCache:
            if windows is None:
                return KVCache.allocate(**SIZES, dtype=torch.float32, device="cpu")
            return SlidingCache.allocate(**SIZES, dtype=torch.float32, device="cpu", windows=windows, prefill_chunk=2)

        size = allocate().memory_bytes
        gc.collect()  # other tests' caches would be collected meanwhile
        free = sum(cache.unwritten_bytes for cache in machine.lazy_allocations) + 2 * size
        monkeypatch.setattr(machine, "_system_memory", lambda: free)
        first, second = allocate(), allocate()
        with pytest.raises(ValueError, match="are free on cpu"):
            allocate()
        del second
        third = allocate()
        assert first.unwritten_bytes == third.unwritten_bytes == size
        first.advance(first.capacity)  # as if written: the system no longer counts that as free
        first.reset()
        assert first.unwritten_bytes == 0
        allocate()

    def test_by_what_was_written(self) -> None:
        cache = KVCache.allocate(**SIZES, dtype=torch.float32, device="cpu")
        cache.advance(cache.capacity // 4)
        cache.truncate(1)
        assert cache.unwritten_bytes == cache.memory_bytes * 3 // 4
        ring = SlidingCache.allocate(**SIZES, dtype=torch.float32, device="cpu", windows=[2, 2], prefill_chunk=2)
        ring.advance(4)
        assert ring.unwritten_bytes == 0

    @pytest.mark.parametrize("size", [0, -1, 2**63, 10**400])
    def test_sizes_that_cannot_be(self, size: int) -> None:
        for name in SIZES:
            with pytest.raises(ValueError, match=f"{name} must be"):
                KVCache.allocate(**(SIZES | {name: size}), dtype=torch.float32, device="cpu")


class TestGrowingCache:
    def test_holds_exactly_what_was_written(self) -> None:
        cache = GrowingCache.allocate(**SIZES, dtype=torch.float32, device="cpu")
        per_position = 2 * 2 * 4 * 8 * 4
        assert cache.memory_bytes == 0
        fill(cache, 5)
        assert cache.memory_bytes == 5 * per_position
        cache.truncate(2)
        assert cache.memory_bytes == 2 * per_position


class TestNoCache:
    def test_keeps_nothing(self) -> None:
        cache = NoCache(batch_size=2)
        k, v = torch.randn(2, 2, 4, 3, 8).unbind()
        for _ in range(2):
            assert cache.positions(3).tolist() == [[0, 1, 2]] * 2
            got_k, got_v = cache.update(7, k, v)
            assert got_k is k
            assert got_v is v
            cache.advance(3)
        assert cache.seq_len == 0
        assert cache.memory_bytes == 0


WINDOW = 5
GEMMA_3_1B = ModelConfig(
    model_type="gemma3",
    vocab_size=262_144,
    hidden_size=1152,
    intermediate_size=6912,
    num_hidden_layers=26,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    max_position_embeddings=32_768,
    layer_types=tuple("full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(26)),
    sliding_window=512,
)


class TestSlidingCache:
    @pytest.fixture
    def model(self, tiny_model: Callable) -> Decoder:
        return tiny_model(model_type="gemma3", sliding_window=WINDOW)

    @staticmethod
    def make(
        model: Decoder, prefill_chunk: int, max_seq_len: int = 40, batch_size: int = 1, dtype: Any = None
    ) -> SlidingCache:
        return SlidingCache.from_model_config(
            model.config,
            max_seq_len,
            batch_size=batch_size,
            prefill_chunk=prefill_chunk,
            dtype=dtype or model.dtype,
            device="cpu",
        )

    @staticmethod
    def feed(model: Decoder, cache: Cache, ids: Tensor, chunk: int, compiled: bool = False) -> Tensor:
        """All logits [B, S, V] of feeding ids in chunks; compiled: through the backend, which writes in place."""
        if compiled:
            return torch.cat([all_logits(model, cache, part) for part in ids.split(chunk, 1)], 1)
        return torch.cat([model(part, kv_cache=cache, all_logits=True) for part in ids.split(chunk, 1)], 1)

    def test_layout(self) -> None:
        layout = {"windows": [None, 4, 4, 200], "prefill_chunk": 3}
        cache = SlidingCache.allocate(4, 2, 8, 16, batch_size=3, dtype=torch.float16, device="cpu", **layout)
        assert [tuple(t.shape) for t in cache.k] == [(3, 2, slots, 8) for slots in (16, 7, 7, 16)]
        assert [tuple(t.shape) for t in cache.v] == [tuple(t.shape) for t in cache.k]
        assert {t.dtype for t in cache.k + cache.v} == {torch.float16}
        assert cache.memory_bytes == 2 * 3 * 2 * (16 + 7 + 7 + 16) * 8 * 2

    @pytest.mark.parametrize("max_seq_len", [3, 8, 40, 200])
    @pytest.mark.parametrize("prefill_chunk", [1, 3, 100])
    def test_slots_of_a_model(self, model: Decoder, prefill_chunk: int, max_seq_len: int) -> None:
        cache = self.make(model, prefill_chunk, max_seq_len)
        ring = min(WINDOW + prefill_chunk, max_seq_len)
        assert layer_slots(model.config, max_seq_len, prefill_chunk) == [ring, max_seq_len, ring]
        assert [t.shape[2] for t in cache.k] == [ring, max_seq_len, ring]

    def test_memory_of_gemma_3_1b(self) -> None:
        """At 32,768 positions in bf16."""
        sizes = {
            cls: cls.from_model_config(GEMMA_3_1B, 32_768, dtype="bfloat16", device="meta").memory_bytes
            for cls in (SlidingCache, KVCache)
        }
        print({cls.__name__: f"{size / 1e6:.1f} MB" for cls, size in sizes.items()})
        assert sizes[SlidingCache] == 2 * 2 * 256 * (4 * 32_768 + 22 * (512 + 512)) <= 160e6
        assert sizes[KVCache] == 2 * 2 * 256 * 26 * 32_768 == pytest.approx(872e6, rel=1e-3)

    def test_memory_is_taken_up_front(self, model: Decoder) -> None:
        cache = self.make(model, 3)
        memory = [t.data_ptr() for t in cache.k + cache.v]
        self.feed(model, cache, random_ids(1, 39), 7)
        assert [t.data_ptr() for t in cache.k + cache.v] == memory

    @pairs(compiled=[False, True], prefill_chunk=[1, 3, WINDOW, 40], chunk=[1, 3, WINDOW, WINDOW + 1, 40])
    def test_around_the_ring(self, model: Decoder, compiled: bool, chunk: int, prefill_chunk: int) -> None:
        for length in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3, 39):
            ids = random_ids(2, length)
            cache = self.make(model, prefill_chunk, batch_size=2)
            assert_close(self.feed(model, cache, ids, chunk, compiled), model(ids))
            last = random_ids(2, 1, seed=1)
            assert_close(self.feed(model, cache, last, 1, compiled), model(torch.cat((ids, last), 1))[:, -1:])

    @pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so once where the CPU has no bf16
    @pytest.mark.parametrize("chunk", [1, 3, 40])
    def test_bfloat16(self, tiny_model: Callable, chunk: int) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=WINDOW, dtype=torch.bfloat16)
        ids = random_ids(1, 23)
        sliding = self.make(model, 2)
        assert {t.dtype for t in sliding.k + sliding.v} == {torch.bfloat16}
        plain = KVCache.from_model_config(model.config, 40, dtype="bfloat16", device="cpu")
        got, expected = (self.feed(model, cache, ids, chunk).float() for cache in (sliding, plain))
        assert (got - expected).std() < 0.02 * expected.std()

    @pairs(compiled=[False, True], length=[3, WINDOW + 2, 17], prefill_chunk=[1, 3, WINDOW + 2], chunk=[1, 4, 40])
    def test_truncates_as_far_as_it_holds(
        self, model: Decoder, compiled: bool, length: int, prefill_chunk: int, chunk: int
    ) -> None:
        ids, last = random_ids(1, length), random_ids(1, 2, seed=1)
        full = self.make(model, prefill_chunk)
        self.feed(model, full, ids, chunk, compiled)
        slots = WINDOW + prefill_chunk
        for target in range(length + 1):
            cache = copy.deepcopy(full)
            held = range(max(0, length - slots), length)
            if target == 0 or all(p in held for p in range(max(0, target - WINDOW + 1), target)):
                cache.truncate(target)
                assert cache.seq_len == target
                tokens = torch.cat((ids[:, :target], last), 1)
                assert_close(self.feed(model, cache, last, 1, compiled), model(tokens)[:, -2:])
            else:
                with pytest.raises(ValueError, match=rf"cannot truncate to {target}: .* have been overwritten; reset"):
                    cache.truncate(target)
                assert cache.seq_len == length
                assert all(map(torch.equal, stored(cache), stored(full)))
                again = self.feed(model, copy.deepcopy(full), last, 1, compiled)
                assert torch.equal(self.feed(model, cache, last, 1, compiled), again)

    def test_a_window_of_one_truncates_anywhere(self, tiny_model: Callable) -> None:
        """The token that follows sees itself alone: nothing that was overwritten is missed."""
        model = tiny_model(layer_types=("sliding_attention",) * 2, sliding_window=1)
        ids, last = random_ids(1, 17), random_ids(1, 2, seed=1)
        for target in range(18):
            cache = self.make(model, 2)
            self.feed(model, cache, ids, 3)
            cache.truncate(target)
            tokens = torch.cat((ids[:, :target], last), 1)
            assert_close(self.feed(model, cache, last, 1), model(tokens)[:, -2:])

    @pytest.mark.parametrize("target", [-1, 25, 100])
    def test_truncating_to_what_never_was(self, model: Decoder, target: int) -> None:
        cache = self.make(model, 1)
        self.feed(model, cache, random_ids(1, 24), 5)
        with pytest.raises(ValueError, match=rf"cannot truncate to {target}: the cache holds 24"):
            cache.truncate(target)
        assert cache.seq_len == 24

    def test_truncated_again_and_again(self, model: Decoder) -> None:
        """What was overwritten before a truncation is still gone after it."""
        ids = random_ids(1, 24)
        cache = self.make(model, 3)
        self.feed(model, cache, ids, 4)  # positions 16 to 23 are held
        cache.truncate(21)
        cache.truncate(20)
        with pytest.raises(ValueError, match="cannot truncate to 19: its window begins at 15, and positions before 16"):
            cache.truncate(19)
        assert_close(self.feed(model, cache, ids[:, 20:], 1), model(ids)[:, 20:])

    def test_reset_forgets_what_was_overwritten(self, model: Decoder) -> None:
        cache = self.make(model, 1)
        self.feed(model, cache, random_ids(1, 24, seed=1), 5)
        cache.reset()
        ids = random_ids(1, 6)
        self.feed(model, cache, ids, 4)
        cache.truncate(2)
        assert_close(self.feed(model, cache, ids[:, 2:], 1), model(ids)[:, 2:])

    @pairs(
        dtype=STORED,
        place=["layers.1", "layers.2", "layers.2.mlp"],
        width=[1, 2, 3, WINDOW + 4, 20],  # the ring's chunk is 2
        filled=[2, WINDOW, 17],
    )
    def test_a_failed_pass_leaves_it_as_it_was(
        self, model: Decoder, dtype: str, place: str, width: int, filled: int
    ) -> None:
        cache = self.make(model, 2, dtype=dtype)
        self.feed(model, cache, random_ids(1, filled), 3)
        untouched = copy.deepcopy(cache)
        with failing(model.get_submodule(place)):
            model(random_ids(1, width, seed=1), kv_cache=cache)
        assert cache.seq_len == filled
        for retry in (1, 2, WINDOW + 2, 20):
            ids = random_ids(1, retry, seed=2)
            again, before = copy.deepcopy(cache), copy.deepcopy(untouched)
            for tokens in (ids, ids[:, :1]):
                assert torch.equal(model(tokens, kv_cache=again), model(tokens, kv_cache=before))

    def test_a_failed_wide_pass_writes_nothing(self, model: Decoder) -> None:
        cache = self.make(model, 2)
        self.feed(model, cache, random_ids(1, 17), 3)
        before = copy.deepcopy(cache)
        with failing(model.layers[1]):
            model(random_ids(1, 20, seed=1), kv_cache=cache)
        assert torch.equal(cache.k[0], before.k[0])
        cache.truncate(15)  # as far as before
        assert_close(
            model(random_ids(1, 1, seed=2), kv_cache=cache),
            model(torch.cat((random_ids(1, 17)[:, :15], random_ids(1, 1, seed=2)), 1))[:, -1:],
        )

    @pytest.mark.parametrize(("window", "sees"), [(None, "all"), (6, "6"), (100, "100")])
    @pytest.mark.parametrize("n", [1, 3])
    def test_a_wider_window_than_it_keeps_is_refused(self, n: int, window: int | None, sees: str) -> None:
        layout = {"windows": [None, WINDOW], "prefill_chunk": 2}
        cache = SlidingCache.allocate(**SIZES, dtype=torch.float32, device="cpu", **layout)
        fill(cache, 3)
        before = stored(cache)
        k, v = random_kv(cache, n)
        with pytest.raises(ValueError, match=f"layer 1 sees {sees} positions, but its cache keeps only 5"):
            cache.attend(1, k, k, v, scale=1.0, window=window)
        assert all(map(torch.equal, stored(cache), before))
        cache.attend(0, k, k, v, scale=1.0, window=window)  # a layer that keeps everything takes any

    @pytest.mark.parametrize(
        ("layout", "message"),
        [
            ({"windows": [4]}, "windows must have a positive integer or None for each of 2 layers"),
            ({"windows": [4, 4, 4]}, "for each of 2 layers"),
            ({"windows": [None, 0]}, "for each of 2 layers"),
            ({"prefill_chunk": 0}, "prefill_chunk must be a positive integer, not 0"),
        ],
    )
    def test_layouts_are_checked(self, layout: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SlidingCache.allocate(**SIZES, dtype=torch.float32, device="cpu", **layout)

    def test_more_than_the_memory_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the rings take counts, not what a contiguous cache would."""
        size = 2 * 2 * 64 * (10**6 + 100 + 28) * 4
        layout = {"windows": [None, 100], "prefill_chunk": 28, "dtype": torch.float32, "device": "meta"}
        monkeypatch.setattr("infer.cache.base.available_memory", lambda device: size)
        assert SlidingCache.allocate(2, 2, 64, 10**6, **layout).memory_bytes == size
        monkeypatch.setattr("infer.cache.base.available_memory", lambda device: size - 1)
        with pytest.raises(ValueError, match=r"1000000 positions needs 1\.02 GB, but 1\.02 GB are free on meta"):
            SlidingCache.allocate(2, 2, 64, 10**6, **layout)


class TestTable:
    """Where kernels may write the next keys themselves. Asking changes nothing."""

    @pytest.fixture
    def model(self, tiny_model: Callable) -> Decoder:
        return tiny_model(model_type="gemma3", sliding_window=WINDOW)

    @staticmethod
    def make(model: Decoder, cls: Any = KVCache, **options: Any) -> Any:
        return cls.from_model_config(model.config, 24, **({"dtype": "float32", "device": "cpu"} | options))

    @pytest.mark.parametrize("dtype", STORED)
    @pytest.mark.parametrize("cls", [KVCache, SlidingCache])
    def test_says_where_everything_lies(self, model: Decoder, cls: type[BaseCache], dtype: str) -> None:
        cache = self.make(model, cls, dtype=dtype, batch_size=2)
        fill(cache, 3)
        before = copy.deepcopy(cache)
        table = cache.table(model.config, torch.float32, 2)
        assert table.shape[:2] == (3, 2)
        for layer in range(3):
            for row in range(2):
                keys, values = cache.k[layer][row], cache.v[layer][row]
                at = table[layer, row]
                assert (at[K], at[V]) == (keys.data_ptr(), values.data_ptr())
                assert (at[STRIDE], at[SLOTS]) == (keys[1].data_ptr() - keys[0].data_ptr(), keys.shape[1])
                assert (at[FILLED], at[BITS]) == (3, keys.element_size() * 8)
        assert (cache.seq_len, all(map(torch.equal, stored(cache), stored(before)))) == (3, True)
        cache.advance(1)
        assert (cache.table(model.config, torch.float32, 1)[:, :, FILLED] == 4).all()

    @pytest.mark.parametrize("cls", [KVCache, SlidingCache])
    def test_is_of_the_tensors_it_has(self, model: Decoder, cls: type[BaseCache]) -> None:
        """A copy has others, and so has a cache whose tensors were set."""
        cache = self.make(model, cls)
        first = cache.table(model.config, torch.float32, 1)[0, 0, K]
        assert first == cache.k[0].data_ptr()
        twin = copy.deepcopy(cache)
        assert twin.table(model.config, torch.float32, 1)[0, 0, K] == twin.k[0].data_ptr() != first
        cache.k = cache.k.clone() if cls is KVCache else [k.clone() for k in cache.k]
        assert cache.table(model.config, torch.float32, 1)[0, 0, K] == cache.k[0].data_ptr() != first

    @pytest.mark.parametrize("cls", [KVCache, SlidingCache])
    def test_none_for_another_model(self, model: Decoder, tiny_config: Callable, cls: type[BaseCache]) -> None:
        cache = self.make(model, cls)
        assert cache.table(model.config, torch.float32, 1) is not None
        assert cache.table(model.config, torch.bfloat16, 1) is None
        for unlike in ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"head_dim": 8}):
            config = tiny_config(model_type="gemma3", sliding_window=WINDOW, **unlike)
            assert cache.table(config, torch.float32, 1) is None
        other_windows = tiny_config(model_type="gemma3", sliding_window=WINDOW - 1)
        assert (cache.table(other_windows, torch.float32, 1) is None) == (cls is SlidingCache)

    def test_none_where_each_call_must_be_seen(self, model: Decoder) -> None:
        cache = self.make(model)
        for other in (self.make(model, GrowingCache), NoCache(), TracedCache(cache, [0]), DebugCache(cache)):
            assert other.table(model.config, torch.float32, 1) is None

    def test_none_for_tensors_that_lie_otherwise(self, model: Decoder) -> None:
        shape = tuple(self.make(model).k.shape)
        turned = torch.zeros(shape).transpose(3, 4).contiguous().transpose(3, 4)
        for k, v in ((turned, turned.clone()), (torch.zeros(shape), turned)):
            assert KVCache(k, v).table(model.config, torch.float32, 1) is None

    @pytest.mark.parametrize(("n", "offered"), [(1, True), (2, True), (3, False), (20, False)])
    def test_none_for_a_pass_that_the_ring_cannot_hold(self, model: Decoder, n: int, offered: bool) -> None:
        cache = self.make(model, SlidingCache, prefill_chunk=1)
        fill(cache, 4)
        assert (cache.table(model.config, torch.float32, n) is not None) == offered

    @pytest.mark.parametrize("name", ["_store", "update", "attend"])
    @pytest.mark.parametrize("cls", [KVCache, SlidingCache])
    def test_none_for_a_subclass_with_its_own_way(self, model: Decoder, cls: type[BaseCache], name: str) -> None:
        """Unless it has a table of its own too; one that adds something else keeps its parent's."""
        different = type("Different", (cls,), {name: getattr(cls, name)})
        assert self.make(model, different).table(model.config, torch.float32, 1) is None
        assert self.make(model, type("Child", (different,), {})).table(model.config, torch.float32, 1) is None
        sure = type("Sure", (cls,), {name: getattr(cls, name), "table": cls.table})
        assert self.make(model, sure).table(model.config, torch.float32, 1) is not None
        named = type("Named", (cls,), {"name": "mine"})
        assert self.make(model, named).table(model.config, torch.float32, 1) is not None


class TestEncoding:
    """8 bits: every value comes back within half a step, and what cannot be a number does not become one."""

    FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])

    @staticmethod
    def vectors(size: float, head_dim: int = 64) -> Tensor:
        return torch.randn(50, 3, head_dim, generator=torch.Generator().manual_seed(0)) * size

    @FLOATS
    @pytest.mark.parametrize("head_dim", [2, 34, 64, 80, 256])
    def test_within_half_a_step(self, dtype: torch.dtype, head_dim: int) -> None:
        for size in [0.0, 1e-7, 1e-5, 1e-3, 1.0, 300.0, 1e4]:
            x = self.vectors(size, head_dim).to(dtype)
            stored = encode(x)
            assert stored.shape == (50, 3, stored_width(head_dim, torch.int8))
            assert stored.dtype == torch.int8
            got = decode(stored, dtype)
            assert got.dtype == dtype
            exact = x.double()
            # A step is 1/127 of the largest value, rounded up to float16: by 2^-10 of it, or by the smallest one.
            for group, result in zip(exact.split(GROUP, -1), got.double().split(GROUP, -1), strict=True):
                step = group.abs().amax(-1, keepdim=True) / 127
                step = torch.maximum(step * (1 + 2**-10), step + 2**-24) * (step > 0)
                rounding = torch.finfo(dtype).eps * group.abs() + torch.finfo(dtype).smallest_normal  # of the result
                assert ((result - group).abs() <= step / 2 + 2 * rounding).all()

    @pytest.mark.parametrize("group", [8, 32, 512])
    def test_groups(self, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each group is rounded as if it stood alone, whatever their size."""
        monkeypatch.setattr("infer.cache.int8.GROUP", group)
        for head_dim in (2, 8, 10, 34, 64, 80, 96, 256):
            x = self.vectors(1.0, head_dim) * torch.linspace(0.1, 30, head_dim)
            stored = encode(x)
            assert stored.shape[-1] == stored_width(head_dim, torch.int8) == head_dim + 2 * -(-head_dim // group)
            assert values_in(stored.shape[-1]) == head_dim
            alone = [decode(encode(part), torch.float32) for part in x.split(group, -1)]
            assert torch.equal(decode(stored, torch.float32), torch.cat(alone, -1))

    def test_the_largest_value_takes_all_steps(self) -> None:
        values = encode(self.vectors(1.0))[..., :64]
        assert (values.abs().amax(-1) == 127).double().mean() > 0.9  # others: the scale was rounded up
        assert values.min() >= -127

    def test_every_vector_has_its_own_scale(self) -> None:
        x = self.vectors(1.0)
        x[3, 1] *= 1000
        rest = encode(x)
        rest[3, 1] = encode(self.vectors(1.0))[3, 1]
        assert torch.equal(rest, encode(self.vectors(1.0)))
        assert torch.equal(encode(x[3:4, 1]), encode(x)[3:4, 1])  # independent of its neighbors

    def test_decoding_is_exact_in_float32(self) -> None:
        """So a kernel that multiplies in float32 gives the same bits."""
        stored = encode(self.vectors(1.0))
        assert torch.equal(decode(stored, torch.float32).double(), decode(stored, torch.float64))

    def test_zeros_stay_zeros(self) -> None:
        x = self.vectors(1.0)
        x[..., 5] = 0
        x[7] = 0
        got = decode(encode(x), torch.float32)
        assert not got[..., 5].any()
        assert not got[7].any()
        assert not encode(torch.zeros(1, 8)).any()

    @pytest.mark.parametrize("large", [127 * 65504.0, 1e7, 3e38])
    def test_beyond_the_largest_scale_values_saturate(self, large: float) -> None:
        got = decode(encode(torch.tensor([[large, -large, 1e5, 0.0]])), torch.float32)
        assert got.tolist()[0][:2] == [127 * 65504.0, -127 * 65504.0]
        assert got[0, 2] == pytest.approx(1e5, abs=65504 / 2)

    def test_the_largest_float16_does_not_become_infinite(self) -> None:
        x = torch.tensor([[65504.0, -65504.0, 1.0, 0.0]], dtype=torch.float16)
        assert torch.equal(decode(encode(x), torch.float16)[0, :2], x[0, :2])

    @FLOATS
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_no_number_stays_none(self, dtype: torch.dtype, value: float) -> None:
        x = self.vectors(1.0).to(dtype)
        good = encode(x)
        x[4, 1, 9] = value
        got = decode(encode(x), dtype)
        assert got[4, 1, : min(GROUP, 64)].isnan().all()
        good[4, 1] = encode(x)[4, 1]
        assert torch.equal(encode(x), good)  # the other vectors

    def test_layout_in_memory_does_not_matter(self) -> None:
        x = torch.randn(2, 5, 3, 8).transpose(1, 2)
        assert torch.equal(encode(x), encode(x.contiguous()))
        stored = encode(torch.randn(2, 3, 9, 8))[:, 1:2, 2:7]
        assert torch.equal(decode(stored, torch.float32), decode(stored.contiguous(), torch.float32))


class TestInt8:
    """What only caches of 8 bits do; all else is the contract, which they go through too."""

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("cls", [KVCache, SlidingCache])
    def test_about_half_of_bfloat16(self, cls: type[BaseCache], head_dim: int) -> None:
        sizes = [cls.allocate(2, 2, head_dim, 100, dtype=dtype, device="meta") for dtype in ("int8", "bfloat16")]
        int8, bfloat16 = (cache.memory_bytes for cache in sizes)
        assert int8 == 2 * 2 * 2 * 100 * stored_width(head_dim, torch.int8) <= 0.55 * bfloat16

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("cls", CACHES)
    def test_bytes_per_token(self, tiny_config: Callable, cls: type[BaseCache], dtype: str) -> None:
        for head_dim in (12, 64, 80, 256):
            config = tiny_config(head_dim=head_dim)
            cache = cls.from_model_config(config, 9, dtype=dtype, device="cpu")
            fill(cache, 9)
            positions = whole_pages(cache, 9) if isinstance(cache, PagedCache) else 9
            assert cache.memory_bytes == positions * config.cache_bytes_per_token(cache.dtype.itemsize)

    def test_given_by_name_or_dtype(self, layout: tuple[Any, dict[str, Any]]) -> None:
        cls, own = layout
        for dtype in ("int8", torch.int8):
            cache = cls.allocate(**SIZES, **own, dtype=dtype, device="cpu")
            assert cache.dtype == torch.int8
            assert cache.shape.head_dim == 8
            fill(cache, 3)
            assert {t.shape[-1] for t in stored(cache)} == {8 + 2}

    @pytest.mark.parametrize("free", [2 * 2 * 4 * 16 * (8 + 2) - 1, 2 * 2 * 4 * 16 * (8 + 2)])
    @pytest.mark.parametrize("cls", [KVCache, SlidingCache])
    def test_memory_is_counted(self, cls: type[BaseCache], free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.cache.base.available_memory", lambda device: free)
        if free % 2:
            with pytest.raises(ValueError, match="are free on cpu"):
                cls.allocate(**SIZES, dtype="int8", device="cpu")
        else:
            assert cls.allocate(**SIZES, dtype="int8", device="cpu").memory_bytes == free

    def test_an_odd_head_dim_is_refused(
        self, layout: tuple[Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cls, own = layout
        monkeypatch.setattr(torch, "zeros", lambda *args, **options: pytest.fail("memory was taken"))
        with pytest.raises(ValueError, match="an int8 cache needs an even head_dim, not 7"):
            cls.allocate(**SIZES | {"head_dim": 7}, **own, dtype="int8", device="cpu")

    def test_from_tensors(self) -> None:
        k, v = torch.randn(2, 1, 1, 4, 8, 6).unbind()
        cache = KVCache(encode(k), encode(v), seq_len=3)
        assert cache.shape == (1, 1, 4, 8, 6)
        assert_holds(cache, [(k[0, :, :, :3], v[0, :, :, :3])])
        with pytest.raises(ValueError, match="even head_dim, not 5"):
            KVCache(encode(k)[..., 1:], encode(v)[..., 1:])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_gives_back_the_dtype_it_was_given(self, layout: tuple[Any, dict[str, Any]], dtype: torch.dtype) -> None:
        """One cache for all: each pass may have another."""
        cls, own = layout
        cache = cls.allocate(**SIZES, **own, dtype="int8", device="cpu")
        fill(cache, 3)
        for n in (1, 2, 9):
            k, v = (x.to(dtype) for x in random_kv(cache, n))
            assert {x.dtype for x in cache.update(1, k, v)} == {dtype}
            window = cache.windows[1]
            assert cache.attend(1, k, k, v, scale=1.0, window=window).dtype == dtype

    @pytest.mark.parametrize("window", [None, 3, 8])
    @pytest.mark.parametrize("kernel", [None, CpuAttention()], ids=["torch", "kernel"])
    def test_attends_to_what_is_stored(
        self, layout: tuple[Any, dict[str, Any]], window: int | None, kernel: CpuAttention | None
    ) -> None:
        """The pass's own keys and values too: what a float cache gives of rounded ones."""
        cls, own = layout
        window = 8 if "windows" in own and window is None else window
        rounding, plain = (cls.allocate(**SIZES, **own, dtype=dtype, device="cpu") for dtype in ("int8", "float32"))
        for n in (5, 1, 1, 4, 1, 2):
            k, v = random_kv(rounding, n, seed=n)
            q = random_kv(rounding, n, seed=50 + n)[0].repeat(1, 2, 1, 1)
            for layer in range(2):
                got = rounding.attend(layer, q, k, v, scale=0.3, window=window, kernel=kernel)
                rounded = as_stored(k, rounding), as_stored(v, rounding)
                expected = plain.attend(layer, q, *rounded, scale=0.3, window=window)
                torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
            rounding.advance(n)
            plain.advance(n)

    @pytest.mark.parametrize("chunk", [1, 2, 3, 5])
    def test_the_same_bytes_however_it_is_fed(self, layout: tuple[Any, dict[str, Any]], chunk: int) -> None:
        cls, own = layout
        whole, cut = (cls.allocate(**SIZES, **own, dtype="int8", device="cpu") for _ in range(2))
        written = fill(whole, 15)
        for start in range(0, 15, chunk):
            for layer, (k, v) in enumerate(written):
                cut.update(layer, k[:, :, start : start + chunk], v[:, :, start : start + chunk])
            cut.advance(min(chunk, 15 - start))
        if cls is not PagedCache:  # which pages it has released depends on the sizes of its passes
            assert all(map(torch.equal, stored(cut), stored(whole)))
        last = random_kv(cut, 1)
        for layer in range(cut.shape.num_layers):
            assert all(map(torch.equal, cut.update(layer, *last), whole.update(layer, *last)))

    @pairs(
        prefill_chunk=[1, 3, 40],
        chunk=[1, 3, WINDOW + 1, 40],
        length=[WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3, 39],
    )
    def test_rings_are_the_contiguous_cache(
        self, tiny_model: Callable, length: int, chunk: int, prefill_chunk: int
    ) -> None:
        model = tiny_model(model_type="gemma3", sliding_window=WINDOW)
        sizes = {"batch_size": 2, "dtype": "int8", "device": "cpu"}
        caches = [
            KVCache.from_model_config(model.config, 40, **sizes),
            SlidingCache.from_model_config(model.config, 40, prefill_chunk=prefill_chunk, **sizes),
        ]
        ids = random_ids(2, length)
        plain, ring = (TestSlidingCache.feed(model, cache, ids, chunk) for cache in caches)
        assert torch.equal(ring, plain)
        plain, ring = (TestSlidingCache.feed(model, cache, random_ids(2, 1, seed=1), 1) for cache in caches)
        assert torch.equal(ring, plain)

    def test_a_contiguous_cache_decodes_only_the_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[int] = []

        def watch(x: Tensor, dtype: torch.dtype) -> Tensor:
            read.append(x.shape[2])
            return decode(x, dtype)

        monkeypatch.setattr("infer.cache.base.decode", watch)
        for cls in CACHES:
            cache = cls.allocate(**SIZES, dtype="int8", device="cpu")
            fill(cache, 10)
            for n, window in ((1, 4), (3, 4), (1, None), (2, 100)):
                k, v = random_kv(cache, n)
                read.clear()
                cache.attend(0, k, k, v, scale=1.0, window=window)
                assert read == [min(10 + n, (window or 100) + n - 1)] * 2

    def test_any_float_model_fits(self, tiny_config: Callable) -> None:
        config, cpu = tiny_config(), torch.device("cpu")
        for cls in CACHES:
            cache = cls.from_model_config(config, 8, dtype="int8", device="cpu")
            for dtype in (torch.float32, torch.bfloat16, torch.float16, None):
                cache.check_model(config, 1, dtype, cpu)
            with pytest.raises(ValueError, match=r"the cache is torch.int8 on cpu, but the model is .* on meta"):
                cache.check_model(config, 1, torch.float32, torch.device("meta"))

    @pytest.mark.parametrize("watcher", [lambda cache: TracedCache(cache, [0, 1]), DebugCache])
    @pytest.mark.parametrize("cls", CACHES)
    def test_watched(self, tiny_model: Callable, cls: type[BaseCache], watcher: Callable) -> None:
        model = tiny_model()
        plain, inner = (cls.from_model_config(model.config, 8, dtype="int8", device="cpu") for _ in range(2))
        for ids in (random_ids(1, 5), random_ids(1, 1, seed=1)):
            assert_close(model(ids, kv_cache=watcher(inner)), model(ids, kv_cache=plain))
        assert inner.seq_len == 6


class TestInterrupted:
    """Ctrl-C may come between any two lines. The cache is then consistent, or refuses to continue."""

    @pytest.mark.parametrize("dtype", STORED)
    def test_in_the_middle_of_a_staged_write(self, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = SlidingCache.allocate(2, 1, 4, 64, dtype=dtype, device="cpu", windows=[4, None], prefill_chunk=2)
        fill(cache, 5)
        for layer in range(2):
            cache.update(layer, *random_kv(cache, 20))

        def interrupted(self: BaseCache, seq_len: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(BaseCache, "_move_to", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.advance(20)
        assert cache.seq_len == 5
        with pytest.raises(ValueError, match="a pass was interrupted during a write: reset the cache"):
            cache.positions(1)
        cache.reset()
        assert cache.positions(1).tolist() == [[0]]

    @pairs({"cls, options": LAYOUTS}, dtype=STORED, n=[1, 20])  # all blocks in one call, and one by one
    def test_in_a_pass_of_kernels(
        self,
        dtype: str,
        cls: type[BaseCache],
        options: dict,
        n: int,
        tiny_model: Callable,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What it has written by then does not count."""
        model = tiny_model(model_type="gemma3", sliding_window=WINDOW)
        cache = cls.from_model_config(model.config, 40, dtype=dtype, device="cpu", **options)
        all_logits(model, cache, random_ids(1, 9))
        untouched = copy.deepcopy(cache)
        made, calls = kernels(), []
        monkeypatch.setattr("infer.backend.cpu.backend.BLOCK_TOKENS", 20)

        def interrupting(run: Callable) -> Callable:
            def interrupted(*args: Any) -> None:
                run(*args)
                calls.append(run)
                if len(calls) == (1 if n == 1 else 2):
                    raise KeyboardInterrupt

            return interrupted

        for name in ("run", "qkv_proj"):
            monkeypatch.setattr(made, name, interrupting(getattr(made, name)))
        with pytest.raises(KeyboardInterrupt):
            all_logits(model, cache, random_ids(1, n, seed=1))
        monkeypatch.undo()
        assert cache.seq_len == 9
        for width in (1, 3, 20):
            again, before = copy.deepcopy(cache), copy.deepcopy(untouched)
            ids = random_ids(1, width, seed=2)
            assert torch.equal(all_logits(model, again, ids), all_logits(model, before, ids))

    @pytest.mark.parametrize("cls", [KVCache, SlidingCache])
    @pytest.mark.parametrize("dtype", STORED)
    def test_between_two_tokens(self, dtype: str, cls: type[BaseCache], monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the next token goes follows from seq_len alone."""
        cache = cls.allocate(1, 1, 4, 16, dtype=dtype, device="cpu")
        written = fill(cache, 3)
        q, (k, v) = random_kv(cache, 1)[0], random_kv(cache, 1, seed=5)
        cache.attend(0, q, k, v, scale=1.0)
        moved = BaseCache._move_to

        def interrupted(self: BaseCache, seq_len: int) -> None:
            moved(self, seq_len)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(BaseCache, "_move_to", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.advance(1)
        assert cache.seq_len == 4
        last_k, last_v = random_kv(cache, 1, seed=6)
        cache.attend(0, q, last_k, last_v, scale=1.0)
        expected = torch.cat((written[0][0], k, last_k), dim=2)
        assert torch.equal(cache.k[0][:, :, :5], encode(expected) if cache.quantized else expected)


@pytest.mark.parametrize("cls", CACHES)
@pytest.mark.parametrize("length", [1.5, "1", True, None])
def test_truncating_to_no_whole_number(cls: type[BaseCache], length: object) -> None:
    cache = cls.allocate(1, 1, 4, 16, dtype="float32", device="cpu")
    fill(cache, 3)
    with pytest.raises(TypeError):
        cache.truncate(length)  # type: ignore[arg-type]
    assert cache.seq_len == 3


def test_gradients_are_refused_where_they_would_be_lost(tiny_model: Callable) -> None:
    model = tiny_model().requires_grad_(True)
    ids = torch.tensor([[1, 2, 3]])
    for cls in (KVCache, SlidingCache):
        cache = cls.from_model_config(model.config, 8, dtype="float32", device="cpu")
        with pytest.raises(ValueError, match="keeps no gradients"):
            model(ids, kv_cache=cache)
    for cls in CACHES:
        cache = cls.from_model_config(model.config, 8, dtype="int8", device="cpu")
        with pytest.raises(ValueError, match="keeps no gradients"):
            model(ids, kv_cache=cache)
    cache = GrowingCache.from_model_config(model.config, 8, dtype="float32", device="cpu")
    model(ids, kv_cache=cache).sum().backward()
    assert model.layers[0].self_attn.qkv_proj.weight.grad is not None
