"""The contract of every cache, then what is peculiar to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mocks import CACHES
from torch import Tensor

from infer import GrowingCache, KVCache
from infer.cache import BaseCache, NoCache

SIZES = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "max_seq_len": 16}
MakeCache = Callable[..., BaseCache]


@pytest.fixture(params=CACHES, ids=lambda cls: cls.__name__)
def make(request: pytest.FixtureRequest) -> MakeCache:
    def make(**changes: object) -> BaseCache:
        return request.param.allocate(**({"dtype": torch.float32, "device": "cpu"} | SIZES | changes))

    return make


def random_kv(cache: BaseCache, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    shape = (cache.shape.batch_size, cache.shape.num_kv_heads, n, cache.shape.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator).to(cache.dtype),
        torch.randn(shape, generator=generator).to(cache.dtype),
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


def assert_holds(cache: BaseCache, *passes: list[tuple[Tensor, Tensor]]) -> None:
    """The cache returns exactly these passes, in order, in front of one more token."""
    for layer in range(cache.shape.num_layers):
        last = random_kv(cache, 1, seed=999)
        got = cache.update(layer, *last)
        for i in range(2):
            expected = torch.cat([written[layer][i] for written in passes] + [last[i]], dim=2)
            assert torch.equal(got[i], expected), f"layer {layer}"


class TestContract:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_allocation(self, make: MakeCache, dtype: torch.dtype) -> None:
        cache = make(dtype=dtype, batch_size=3)
        assert cache.shape == (2, 3, 4, 16, 8)
        assert cache.dtype == dtype
        assert cache.device == torch.device("cpu")
        assert cache.seq_len == 0
        assert cache.capacity == 16

    @pytest.mark.parametrize("name", [*SIZES, "batch_size"])
    @pytest.mark.parametrize("size", [0, -1])
    def test_sizes_are_checked(self, make: MakeCache, name: str, size: int) -> None:
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
        assert cache.seq_len == 0  # not before the whole pass is through
        cache.advance(4)
        assert cache.seq_len == 4
        last_k, last_v = random_kv(cache, 1, seed=1)
        got_k, got_v = cache.update(0, last_k, last_v)
        assert torch.equal(got_k, torch.cat((k, last_k), dim=2))
        assert torch.equal(got_v, torch.cat((v, last_v), dim=2))
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
        assert torch.equal(keys, written[1][0])
        assert torch.equal(values, written[1][1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_memory_of_a_full_cache(self, make: MakeCache, dtype: torch.dtype) -> None:
        cache = make(batch_size=3, dtype=dtype)
        fill(cache, 16)
        assert cache.memory_bytes == 2 * 2 * 3 * 4 * 16 * 8 * dtype.itemsize

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

    @pytest.mark.parametrize("seq_len", [-1, 7, 100])
    def test_truncate_refuses(self, make: MakeCache, seq_len: int) -> None:
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

    @pytest.mark.parametrize(
        ("layer", "changes", "message"),
        [
            (2, {}, "layer 2 of a cache with 2 layers"),
            (-1, {}, "layer -1 of a cache"),
            (0, {"shape": (2, 4, 2, 8)}, "batch 1"),
            (0, {"shape": (1, 8, 2, 8)}, "kv_heads 4"),
            (0, {"shape": (1, 4, 2, 6)}, "head_dim 8"),
            (0, {"shape": (4, 2, 8)}, "do not fit"),
            (0, {"shape": (1, 4, 3, 8)}, "do not fit"),  # good alone, but not beside the other of 2 tokens
            (0, {"dtype": torch.bfloat16}, "the cache holds torch.float32"),
            (0, {"device": "meta"}, "the cache is on cpu"),
        ],
    )
    @pytest.mark.parametrize("wrong", ["k", "v"])
    def test_refused_before_anything_is_written(
        self, make: MakeCache, layer: int, changes: dict, message: str, wrong: str
    ) -> None:
        cache = make()
        first = fill(cache, 3)
        before = stored(cache)
        good = torch.ones(1, 4, 2, 8)
        bad = torch.ones(changes.get("shape", good.shape), **{k: v for k, v in changes.items() if k != "shape"})
        with pytest.raises(ValueError, match=message):
            cache.update(layer, *((bad, good) if wrong == "k" else (good, bad)))
        assert all(map(torch.equal, stored(cache), before))
        assert_holds(cache, first)

    @pytest.mark.parametrize("n", [4, 17])
    def test_overflow_is_refused_before_anything_is_written(self, make: MakeCache, n: int) -> None:
        cache = make()
        first = fill(cache, 13)
        before = stored(cache)
        message = f"overflow: 13 positions filled, {n} more asked for, capacity 16"
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

    @pytest.mark.parametrize("retry", [1, 2, 4])
    @pytest.mark.parametrize("window", [None, 3])
    def test_a_failed_forward_leaves_nothing_behind(
        self, make: MakeCache, tiny_model: Callable, retry: int, window: int | None
    ) -> None:
        kinds = {} if window is None else {"layer_types": ("sliding_attention",) * 2, "sliding_window": window}
        model = tiny_model(num_attention_heads=4, num_key_value_heads=4, **kinds)
        cache = make()
        ids = torch.arange(10)[None]
        model(ids[:, :3], kv_cache=cache)

        def fail(*_: object) -> None:
            raise RuntimeError("halfway")

        hook = model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="halfway"):
            model(torch.tensor([[60, 61]]), kv_cache=cache)
        hook.remove()
        assert cache.seq_len == 3
        logits = model(ids[:, 3 : 3 + retry], kv_cache=cache)
        assert cache.seq_len == 3 + retry
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
        with pytest.raises(ValueError, match="k and v must be alike"):
            KVCache(k, v)

    @pytest.mark.parametrize("seq_len", [-1, 17])
    def test_seq_len_must_fit(self, seq_len: int) -> None:
        with pytest.raises(ValueError, match=rf"seq_len {seq_len} is outside 0\.\.16"):
            KVCache(torch.zeros(2, 1, 4, 16, 8), torch.zeros(2, 1, 4, 16, 8), seq_len)

    def test_more_than_the_memory_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.cache.simple.available_memory", lambda device: 10**9)
        with pytest.raises(ValueError, match=r"1000000 positions needs 1\.02 GB, but 1\.00 GB are free on cpu"):
            KVCache.allocate(1, 2, 64, 10**6, dtype=torch.float32, device="cpu")

    @pytest.mark.parametrize("free", [2 * 2 * 4 * 16 * 8 * 4, None])
    def test_exactly_the_memory_is_enough(self, monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
        monkeypatch.setattr("infer.cache.simple.available_memory", lambda device: free)
        assert KVCache.allocate(**SIZES, dtype=torch.float32, device="cpu").memory_bytes == 8192


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
