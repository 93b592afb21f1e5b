"""Pages: shared pages are never written, none leaks, and after any operations logits are those of a fresh run."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from amount import amount, once, pairs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny import make_tiny_config, make_tiny_model
from torch import Tensor

from infer import KVCache
from infer.backend import Row, backend_for
from infer.cache import NoCache, PagedCache, paged, prefix
from infer.cache.base import first_visible
from infer.cache.device_tables import DeviceTables
from infer.cache.pool import (
    NO_PAGE,
    PAGE_SIZE,
    RUN_PAGES,
    LayerGroup,
    OutOfPages,
    PagePool,
    layer_groups,
    page_bytes,
    pages_for,
)
from infer.cache.prefix import PrefixIndex
from infer.cache.ring import PREFILL_CHUNK, layer_slots
from infer.engine.memory import CacheMemory
from infer.models.common import Decoder
from infer.models.rows import ALL

CPU = torch.device("cpu")


def pool_of(count: int, *, page: int = 4, layers: int = 1, dtype: torch.dtype = torch.float32) -> PagePool:
    return PagePool(count, layers, 1, 2, dtype=dtype, device=CPU, page_size=page)


def check_pool(pool: PagePool, held: Counter[int]) -> None:
    """Each page is held as often as it should be, or it is free, once."""
    assert Counter({page: int(times) for page, times in enumerate(pool.ref_counts) if times}) == held
    free = [*pool._free_pages]
    for run in pool._free_runs:
        free += range(run * RUN_PAGES, min((run + 1) * RUN_PAGES, pool.num_pages))
    assert sorted(free) == [page for page in range(pool.num_pages) if not held[page]]
    assert pool.num_free_pages == len(free)


class TestPool:
    @pytest.mark.parametrize("count", [1, 2, RUN_PAGES - 1, RUN_PAGES, RUN_PAGES + 1, 3 * RUN_PAGES + 5])
    def test_all_pages_can_be_had(self, count: int) -> None:
        pool = pool_of(count)
        assert (pool.num_pages, pool.num_free_pages) == (count, count)
        assert sorted(pool.allocate(count)) == [*range(count)]
        assert pool.num_free_pages == 0
        pool.release(range(count))
        assert sorted(page for _ in range(count) for page in pool.allocate(1)) == [*range(count)]

    def test_none_is_left(self) -> None:
        pool = pool_of(3)
        first = pool.allocate(2)
        with pytest.raises(
            OutOfPages, match=r"2 more pages of 4 positions are needed, but of 3 .* 1 are free"
        ) as error:
            pool.allocate(2)
        assert "\n" not in str(error.value)
        check_pool(pool, Counter(first))

    def test_nothing_is_taken(self) -> None:
        pool = pool_of(1)
        assert pool.allocate(0) == []
        check_pool(pool, Counter())

    def test_holders(self) -> None:
        pool = pool_of(3)
        [page] = pool.allocate(1)
        pool.retain([page, page])
        pool.release([page])
        check_pool(pool, Counter({page: 2}))
        pool.release([page, page])
        check_pool(pool, Counter())

    @pytest.mark.parametrize("change", [PagePool.retain, PagePool.release])
    def test_a_page_that_nobody_holds(self, change: Callable[..., None]) -> None:
        pool = pool_of(3)
        [page] = pool.allocate(1)
        pool.release([page])
        with pytest.raises(RuntimeError, match=f"page {page} is .*, but it is free"):
            change(pool, [page])
        check_pool(pool, Counter())

    def test_one_behind_the_other(self) -> None:
        """Also when they are taken one by one, and others are taken in between."""
        pool = pool_of(4 * RUN_PAGES)
        one, other = pool.allocate(2), pool.allocate(2)
        for _ in range(RUN_PAGES - 2):
            one += pool.allocate(1, one[-1])
            other += pool.allocate(1, other[-1])
        for pages in (one, other):
            assert pages == [*range(pages[0], pages[0] + RUN_PAGES)]
            assert pages[0] % RUN_PAGES == 0

    def test_runs_before_gaps(self) -> None:
        """A new sequence begins where it can grow; gaps are for when no run is free."""
        pool = pool_of(2 * RUN_PAGES)
        first = pool.allocate(RUN_PAGES)
        pool.release(first[3:5])
        assert pool.allocate(1) == [RUN_PAGES]
        pool.allocate(RUN_PAGES - 1, RUN_PAGES)
        assert sorted(pool.allocate(2)) == first[3:5]

    def test_the_index_is_asked(self) -> None:
        """For what is missing, or a run at once where pages are many."""
        asked: list[int] = []
        few, many = pool_of(4), pool_of(64 * RUN_PAGES)
        for pool in (few, many):
            held = pool.allocate(pool.num_pages - 1)

            def let_go(count: int, pool: PagePool = pool, held: list[int] = held) -> None:
                asked.append(count)
                pool.release(held[:count])

            pool.evict = let_go
            assert len(pool.allocate(1)) == 1
            assert asked == []
            assert len(pool.allocate(1)) == 1
            assert asked == [1 if pool is few else RUN_PAGES]
            asked.clear()

    def test_the_index_cannot_help(self) -> None:
        pool = pool_of(2)
        held = pool.allocate(2)
        pool.evict = lambda count: None
        with pytest.raises(OutOfPages):
            pool.allocate(1)
        check_pool(pool, Counter(held))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
    def test_contents(self, dtype: torch.dtype) -> None:
        pool = PagePool(5, 3, 2, 4, dtype=dtype, device=CPU, page_size=3)
        pool.memory.copy_(torch.arange(pool.memory.numel()).reshape(pool.memory.shape) % 101)
        before = pool.memory.clone()
        read = pool.read([4, 1])
        assert read.shape == (2, *pool.page_shape)
        assert torch.equal(read[0], before[:, :, :, 4])
        keys, values = pool.keys_and_values(2)
        assert torch.equal(keys[1], before[2, 0, :, 1])
        assert torch.equal(values[4], before[2, 1, :, 4])
        pool.copy(4, 0)
        pool.write([2, 3], read)
        for page, of in enumerate([4, 1, 4, 1, 4]):
            assert torch.equal(pool.memory[:, :, :, page], before[:, :, :, of])
        assert pool.read([]).shape == (0, *pool.page_shape)

    def test_any_operations(self) -> None:
        draw = random.Random(0)
        for count in (1, 7, RUN_PAGES, 2 * RUN_PAGES + 3):
            pool, held = pool_of(count), list[int]()
            for _ in range(amount(20_000, 300)):
                kind = draw.randrange(3)
                if kind == 0 and pool.num_free_pages:
                    new = pool.allocate(draw.randint(1, min(pool.num_free_pages, 5)), draw.choice([NO_PAGE, *held]))
                    assert not {*new} & {*held}
                    assert len({*new}) == len(new)
                    held += new
                elif kind == 1 and held:
                    held.append(draw.choice(held))
                    pool.retain(held[-1:])
                elif held:
                    pool.release([held.pop(draw.randrange(len(held)))])
                check_pool(pool, Counter(held))

    @pytest.mark.parametrize("page", [0, -1, 1.5, True, None, "4"])
    def test_a_page_that_is_none(self, page: Any) -> None:
        with pytest.raises(ValueError, match="page_size must be a positive integer"):
            pool_of(1, page=page)

    @pytest.mark.parametrize("count", [0, -1, 1.5, None])
    def test_no_pages_at_all(self, count: Any) -> None:
        with pytest.raises(ValueError, match="num_pages must be a positive integer"):
            pool_of(count)

    def test_more_than_there_is(self) -> None:
        with pytest.raises(ValueError, match="are free on cpu"):
            pool_of(2**50)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
    def test_for_a_model(self, dtype: torch.dtype) -> None:
        config = make_tiny_config(model_type="gemma3")  # two layers with windows and one without
        size = page_bytes(1, 2, 12, dtype, 4)
        pool = PagePool.for_model(config, 10 * size + size // 2, dtype=dtype, device=CPU, page_size=4)
        assert (pool.num_pages, pool.layers, pool.page_bytes, pool.memory_bytes) == (10, 1, size, 10 * size)
        with pytest.raises(ValueError, match="bytes of cache are too few: 4 positions of this model"):
            PagePool.for_model(config, 3 * size - 1, dtype=dtype, device=CPU, page_size=4)

    def test_unwritten(self) -> None:
        """What was never taken counts as free memory still."""
        pool = pool_of(40)
        assert pool.unwritten_bytes == pool.memory_bytes
        pool.release(pool.allocate(10))
        assert pool.unwritten_bytes == 30 * pool.page_bytes


def test_groups_of_layers() -> None:
    """Of one size, so that any page will do for any group."""
    assert layer_groups((None,) * 3) == [LayerGroup(None, (0, 1, 2))]
    assert layer_groups((4, None, 4)) == [LayerGroup(4, (0,)), LayerGroup(4, (2,)), LayerGroup(None, (1,))]
    assert layer_groups((4, 4, None, 4, 4, None)) == [
        LayerGroup(4, (0, 1)),
        LayerGroup(4, (3, 4)),
        LayerGroup(None, (2, 5)),
    ]


def cache_of(page: int = 4, *, windows: tuple[int | None, ...] = (None,), capacity: int = 40, **sizes: Any) -> Any:
    return PagedCache.allocate(len(windows), 1, 2, capacity, windows=windows, page_size=page, device="cpu", **sizes)


def fill(cache: PagedCache, n: int, start: float | None = None) -> None:
    """One pass over n tokens: the key at position p of layer l is (p, l), or counted from `start`."""
    first = cache.seq_len if start is None else start
    batch = cache.shape.batch_size
    for layer in range(cache.shape.num_layers):
        k = torch.stack((first + torch.arange(n), torch.full((n,), float(layer))), -1).expand(batch, 1, n, 2)
        cache.update(layer, k, -k)
    cache.advance(n)


def contents(cache: PagedCache, layer: int = 0) -> list[float]:
    """The first number of each key that the next query sees."""
    group, within = cache._places[layer]
    keys, values = cache.pool.keys_and_values(within)
    found = []
    for position in range(first_visible(cache.seq_len, cache.windows[layer]), cache.seq_len):
        for row in range(cache.shape.batch_size):
            page, at = cache.page_table[row, group, position // cache.pool.page_size], position % cache.pool.page_size
            assert page != NO_PAGE
            number, owner = keys[page, 0, at].tolist()
            assert (owner, values[page, 0, at].tolist()) == (layer, [-number, -owner])
        found.append(number)
    return found


class TestPaged:
    @pytest.mark.parametrize("page", [1, 3, 4, 64])
    def test_as_many_pages_as_it_needs(self, page: int) -> None:
        cache = cache_of(page)
        for n in range(1, 41):
            fill(cache, 1)
            assert cache.num_pages == -(-n // page)
            assert cache.memory_bytes == cache.num_pages * cache.pool.page_bytes
            assert cache.pool.num_pages - cache.pool.num_free_pages == cache.num_pages
        assert contents(cache) == [*range(40)]
        cache.truncate(page + 1 if page < 40 else 1)
        assert cache.num_pages == (2 if page < 40 else 1)
        cache.reset()
        assert (cache.num_pages, cache.pool.num_free_pages) == (0, cache.pool.num_pages)

    @once(kept=range(10), held=[3, 4, 5, 7, 8, 9])
    def test_pages_ends(self, held: int, kept: int) -> None:
        """Exactly a page, one position less and one more, before and after a truncation."""
        cache = cache_of()
        kept = min(kept, held)
        fill(cache, held)
        cache.truncate(kept)
        assert cache.num_pages == -(-kept // 4)
        fill(cache, 6, 100)
        assert contents(cache) == [*range(kept), *range(100, 106)]
        assert cache.num_pages == -(-(kept + 6) // 4)

    @pytest.mark.parametrize("common", range(1, 10))
    def test_copied_only_when_shared(self, common: int) -> None:
        cache = cache_of()
        fill(cache, common)
        pages = cache.num_pages
        twin = cache.fork()
        assert cache.pool.num_pages - cache.pool.num_free_pages == pages
        fill(twin, 1, 50)
        whole = common // 4
        assert (twin.page_table[0, 0, :whole] == cache.page_table[0, 0, :whole]).all()
        assert twin.page_table[0, 0, whole] != cache.page_table[0, 0, whole]
        assert cache.pool.num_pages - cache.pool.num_free_pages == pages + 1
        before = cache.page_table.copy()
        fill(cache, 1)  # the page is its own again
        assert (cache.page_table[0, 0, :pages] == before[0, 0, :pages]).all()
        assert contents(cache) == [*range(common + 1)]
        assert contents(twin) == [*range(common), 50]

    def test_nothing_is_copied_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copies: list[int] = []
        copy = PagePool.copy
        monkeypatch.setattr(PagePool, "copy", lambda pool, page, to: (copies.append(page), copy(pool, page, to)))
        cache = cache_of()
        for _ in range(20):
            fill(cache, 1)
        cache.truncate(10)
        fill(cache, 3)
        assert copies == []
        twin = cache.fork()
        for _ in range(4):
            fill(twin, 1)
            fill(cache, 1)
        assert len(copies) == 1

    def test_forks_of_forks(self) -> None:
        pool = pool_of(60, page=3)
        family = [PagedCache(pool, 12, [None])]
        fill(family[0], 4)
        for n in range(5):
            family.append(family[-1].fork())
            fill(family[-1], 1, 10 * (n + 1))
        assert [contents(each) for each in family] == [
            [0, 1, 2, 3, *range(10, 10 * n + 1, 10)] for n in range(len(family))
        ]
        del family[:4]
        assert contents(family[-1]) == [0, 1, 2, 3, 10, 20, 30, 40, 50]
        family.clear()
        assert pool.num_free_pages == pool.num_pages

    def test_a_fork_knows_its_tokens(self) -> None:
        model = make_tiny_model()
        memory = CacheMemory(model, 10**5, page_size=4)
        cache = memory.cache(20)
        run(model, cache, [1, 2, 3])
        twin = cache.fork()
        run(model, twin, [4])
        assert cache.contents.tokens(3) == [1, 2, 3]
        assert twin.contents.tokens(4) == [1, 2, 3, 4]

    def test_a_fork_knows_its_model(self) -> None:
        one, other = make_tiny_model(), make_tiny_model(1)
        cache = CacheMemory(one, 10**5, page_size=4).cache(20)
        run(one, cache, [1, 2, 3])
        with pytest.raises(ValueError, match="of another model"):
            run(other, cache.fork(), [4])

    def test_rows_of_a_batch(self) -> None:
        pool = pool_of(30)
        cache = PagedCache(pool, 12, [None], batch_size=3)
        fill(cache, 5)
        twin = cache.fork()
        assert pool.num_pages - pool.num_free_pages == cache.num_pages == 6
        fill(twin, 1, 70)
        assert pool.num_pages - pool.num_free_pages == 9
        assert contents(cache) == [0, 1, 2, 3, 4]
        assert contents(twin) == [0, 1, 2, 3, 4, 70]

    def test_no_room(self) -> None:
        """Refused before anything is written, for one group or for both."""
        pool = pool_of(5)
        cache, other = PagedCache(pool, 12, [None, 2]), PagedCache(pool, 40, [None, 2])
        fill(cache, 4)
        fill(other, 2)
        twin = cache.fork()
        held = Counter(pool.ref_counts.tolist())
        for each, n in ((cache, 1), (twin, 5), (other, 3)):
            with pytest.raises(OutOfPages):
                fill(each, n)
            assert Counter(pool.ref_counts.tolist()) == held
        assert [contents(cache), cache.seq_len, other.seq_len] == [[0, 1, 2, 3], 4, 2]
        del other, each
        fill(twin, 2)
        assert contents(twin) == [*range(6)]

    def test_gone_caches_give_their_pages_back(self) -> None:
        pool = pool_of(30)
        caches = [PagedCache(pool, 12, [None, 3]) for _ in range(3)]
        for cache in caches:
            fill(cache, 9)
        caches.append(caches[0].fork())
        cache = caches.pop()
        caches.clear()
        assert pool.num_pages - pool.num_free_pages == cache.num_pages
        del cache
        assert pool.num_free_pages == pool.num_pages

    def test_another_pool(self) -> None:
        with pytest.raises(ValueError, match=r"a page of this pool holds 2 layers, but .* pages of 1"):
            PagedCache(pool_of(4, layers=2), 8, [None, 2])

    @pytest.mark.parametrize("seq_len", [-1, 41, 2.0, True, None, 10**20])
    def test_set_by_hand(self, seq_len: Any) -> None:
        """However many pages it has already."""
        cache = cache_of(64)
        fill(cache, 5)
        cache.seq_len = seq_len
        with pytest.raises(ValueError, match="seq_len was set to"):
            cache.positions(1)


class TestAdopt:
    def test_goes_on(self) -> None:
        one = PagedCache(pool_of(9), 12, [None])
        fill(one, 6)
        other = PagedCache(one.pool, 12, [None])
        pages = one.filled_pages()
        one.pool.retain(page for [page] in pages)
        other.adopt(pages, range(6), None)
        assert other.contents.tokens(6) == [*range(6)]
        assert contents(one) == contents(other) == [*range(6)]
        fill(other, 1, 60)
        fill(one, 1)
        assert (contents(one), contents(other)) == ([*range(7)], [*range(6), 60])

    @pytest.mark.parametrize("held", [1, 2])
    def test_refused(self, held: int) -> None:
        cache = cache_of(batch_size=held)
        if held == 1:
            fill(cache, 1)
        with pytest.raises(ValueError, match="an empty cache of one row"):
            cache.adopt([(0,)], [1], None)

    def test_a_window_of_one(self) -> None:
        """Nothing of the last page is seen, and so it may be missing; it can be written to all the same."""
        cache = PagedCache(pool_of(9), 12, [None, 1])
        [page] = cache.pool.allocate(1)
        cache.pool.memory[:, :, :, page] = 7.0
        cache.adopt([(page, NO_PAGE)], [1, 2], None)
        assert contents(cache, 1) == []
        fill(cache, 1)
        assert cache.num_pages == 2
        assert contents(cache, 1) == []


class TestWindows:
    @pairs(n=[1, 2, 5], window=[1, 2, 3, 4, 5, 9], page=[1, 2, 3, 4])
    def test_dropped_only_when_unseen(self, page: int, window: int, n: int) -> None:
        cache = cache_of(page, windows=(None, window))
        for _ in range(38 // n):
            fill(cache, n)
            assert contents(cache, 0) == [*range(cache.seq_len)]
            assert contents(cache, 1) == [*range(max(0, cache.seq_len - window + 1), cache.seq_len)]
            kept = cache.page_table[0, 1] != NO_PAGE
            before = cache.seq_len - n  # what the pass began with is what counted
            assert kept.sum() <= -(-cache.seq_len // page) - max(0, before - window + 1 - page) // page

    @pytest.mark.parametrize("page", [1, 2, 3, 4])
    @pytest.mark.parametrize("window", [1, 2, 3, 5])
    def test_a_page_can_be_rewound(self, page: int, window: int) -> None:
        cache = cache_of(page, windows=(None, window))
        for length in range(1, 40):
            fill(cache, 1)
            for back in range(min(page, length) + 1):
                twin = cache.fork()
                twin.truncate(length - back)
                assert contents(twin, 1) == [*range(max(0, length - back - window + 1), length - back)]

    def test_what_is_gone_is_refused(self) -> None:
        cache = cache_of(2, windows=(None, 3))
        for _ in range(20):
            fill(cache, 1)
        held = cache.num_pages
        with pytest.raises(ValueError, match=r"cannot truncate to 9: its window begins at 7, and positions before 14"):
            cache.truncate(9)
        assert (cache.seq_len, cache.num_pages) == (20, held)
        cache.truncate(0)
        assert cache.pool.num_free_pages == cache.pool.num_pages

    def test_told_before(self) -> None:
        """While all is there still."""
        cache, told = cache_of(2, windows=(None, 3)), list[tuple[int, int]]()
        cache.on_window_release = lambda each: told.append((each.seq_len, int((each.page_table != NO_PAGE).sum())))
        for _ in range(16):
            fill(cache, 1)
        assert told == [(6, 6), (8, 7), (10, 8), (12, 9), (14, 10)]
        assert cache.fork().on_window_release is cache.on_window_release

    @pytest.mark.parametrize("chunk", [PREFILL_CHUNK, 64])
    def test_no_more_than_a_ring(self, chunk: int) -> None:
        """A page more for each layer at most, however long the text; as many layers with windows as Gemma 3 has."""
        kinds = (("sliding_attention",) * 5 + ("full_attention",)) * 4 + ("sliding_attention",) * 2
        sizes = {"num_hidden_layers": 26, "layer_types": kinds, "sliding_window": 512, "head_dim": 2}
        config = make_tiny_config(model_type="gemma3", num_key_value_heads=1, max_position_embeddings=8192, **sizes)
        cache = PagedCache.from_model_config(config, 8192, dtype=torch.float32, device="cpu")
        per_page = cache.pool.page_size * cache.pool.layers
        while cache.seq_len < 6144:
            cache.advance(chunk)
            slots = layer_slots(config, cache.seq_len, chunk)
            assert cache.num_pages * per_page <= sum(slots) + 26 * cache.pool.page_size
        for _ in range(200):
            cache.advance(1)
            assert cache.num_pages == pages_for(config, cache.seq_len - 1) + (cache.seq_len % 64 == 1) * len(
                cache.groups
            )
            assert (
                cache.num_pages * per_page <= sum(layer_slots(config, cache.seq_len, 1)) + 26 * 2 * cache.pool.page_size
            )


# The property: any operations on rows of one small pool.

CAPACITY = 16
TOKENS = 3  # few, so that texts have much in common
ROWS = 5
WINDOWS = [None, 1, 2, 3, 5]
SMALL = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
}


@functools.cache
def model_of(window: int | None) -> Decoder:
    layers = ("full_attention",) * 2 if window is None else ("sliding_attention", "full_attention")
    return make_tiny_model(**SMALL, layer_types=layers, sliding_window=window)


def run(model: Decoder, cache: Any, tokens: list[int]) -> Tensor:
    """Logits of all of them [n, V]."""
    with torch.inference_mode():
        assert backend_for(model).name == "cpu"
        return backend_for(model).run([Row(cache, tokens, ALL)])[0][0]


known: dict[tuple[int | None, str], dict[tuple[int, ...], Tensor]] = {}


def afresh(window: int | None, dtype: str, tokens: tuple[int, ...], n: int) -> Tensor:
    """The logits of the last n of these tokens, of a run that has no pages: without a cache, unless that rounds."""
    found = known.setdefault((window, dtype), {})
    wanted = [tokens[: end + 1] for end in range(len(tokens) - n, len(tokens))]
    if any(each not in found for each in wanted):
        config = model_of(window).config
        cache = (
            KVCache.from_model_config(config, CAPACITY, dtype="int8", device="cpu") if dtype == "int8" else NoCache()
        )
        for end, logits in enumerate(run(model_of(window), cache, [*tokens])):
            found.setdefault(tokens[: end + 1], logits)
    return torch.stack([found[each] for each in wanted])


class Sequence:
    """A cache, and what it should hold."""

    def __init__(self, cache: PagedCache, tokens: tuple[int, ...] = (), lost: int = 0) -> None:
        self.cache, self.tokens = cache, tokens
        self.lost = lost  # it need not go back to before this length

    def passes(self, n: int) -> None:
        """A pass over n tokens begins: pages that no query sees are released, except one."""
        self.lost = max(self.lost, len(self.tokens) - self.cache.pool.page_size)


class World:
    """Sequences of one small pool, on which any operation can be tried, and what must hold after each."""

    def __init__(self, window: int | None, page: int, dtype: str, kernels: bool, seed: int) -> None:
        """kernels: whether they write to pages; otherwise caches attend."""
        self.model, self.window, self.dtype, self.kernels = model_of(window), window, dtype, kernels
        config = self.model.config
        layers = 2 if window is None else 1
        size = page_bytes(layers, 1, config.computed_head_dim, torch.int8 if dtype == "int8" else torch.float32, page)
        count = pages_for(config, CAPACITY, page) * 5 // 2
        self.memory = CacheMemory(
            self.model, size * count, cache_dtype="int8" if dtype == "int8" else "auto", page_size=page
        )
        self.pool, self.index = self.memory.pool, self.memory.index
        self.poison = -1 if dtype == "int8" else torch.nan
        self.pool.memory.fill_(self.poison)
        self.random = random.Random(seed)
        self.rows: list[Sequence] = []
        self.texts: list[tuple[int, ...]] = [()]  # the last ones that were there
        self.saved: list[tuple[tuple[int, ...], dict[str, Tensor]]] = []

    def run(self, operations: list[tuple[str, int, int]]) -> None:
        for name, which, number in operations:
            getattr(self, name)(which, number)
            self.check()
        for which in range(len(self.rows)):
            self.step(which, 0)
            self.check()
        self.end()

    def end(self) -> None:
        """All pages come back."""
        self.rows.clear()
        self.check()
        self.index.clear()
        assert self.pool.num_free_pages == self.pool.num_pages

    def check(self) -> None:
        held = self.index.check()
        page = self.pool.page_size
        for row in self.rows:
            cache = row.cache
            own = cache.page_table != NO_PAGE
            held.update(cache.page_table[own].tolist())
            assert cache.num_pages == own.sum()
            assert cache.seq_len == len(row.tokens)
            assert cache.contents.tokens(cache.seq_len) == [*row.tokens]
            for group, there in zip(cache.groups, own[0], strict=True):
                seen = range(first_visible(cache.seq_len, group.window), cache.seq_len)
                assert all(there[position // page] for position in seen)
        check_pool(self.pool, held)
        free = np.flatnonzero(self.pool.ref_counts == 0).tolist()
        self.pool.memory[:, :, :, free] = self.poison

    def new(self) -> PagedCache:
        return self.seen(self.memory.cache(CAPACITY))

    def seen(self, cache: PagedCache) -> PagedCache:
        if not self.kernels:
            cache.table = lambda *_: None  # type: ignore[method-assign]
        return cache

    def some(self, n: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(TOKENS), k=n))

    def row(self, which: int) -> Sequence | None:
        return self.rows[which % len(self.rows)] if self.rows else None

    def feed(self, *rows: Any) -> None:
        """Pairs of a sequence and how many tokens it goes on by, in one pass."""
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        pairs = [(row, self.some(min(n, CAPACITY - len(row.tokens)))) for row, n in pairs]
        self.put([(row, new) for row, new in pairs if new])

    def put(self, pairs: list[tuple[Sequence, tuple[int, ...]]]) -> None:
        if not pairs:
            return
        for row, new in pairs:
            row.passes(len(new))
        try:
            with torch.inference_mode():
                logits = backend_for(self.model).run([Row(row.cache, [*new], ALL) for row, new in pairs])
        except OutOfPages:
            # No copy could be made, or too few pages be had for all rows; and nothing is kept for its own sake.
            groups = len(pairs[0][0].cache.groups)
            assert self.pool.num_free_pages < sum(groups * (2 + len(new) // self.pool.page_size) for _, new in pairs)
            leaves = [node for node in self.index._nodes() if not node.children]
            assert all(any(self.index._in_use(page) for page in node.pages if page >= 0) for node in leaves)
            return
        for (row, new), found in zip(pairs, logits, strict=True):
            row.tokens += new
            self.texts.append(row.tokens)
            assert torch.equal(found[0], afresh(self.window, self.dtype, row.tokens, len(new)))
        del self.texts[:-12]

    # Operations: each takes which row, and a number.

    def rest(self, which: int, number: int) -> None:
        """Nothing: what a failure does not need becomes this."""

    def extend(self, which: int, number: int) -> None:
        if row := self.row(which):
            self.feed(row, 1 + number % 5)

    def step(self, which: int, number: int) -> None:
        if row := self.row(which):
            self.feed(row, 1)

    def together(self, which: int, number: int) -> None:
        self.feed(*itertools.chain.from_iterable((row, 1 + (number + i) % 3) for i, row in enumerate(self.rows)))

    def start(self, which: int, number: int) -> None:
        """A sequence that begins as another, which may be gone; what is known of it is not computed again."""
        if len(self.rows) < ROWS:
            self.rows.append(Sequence(self.new()))
            self.again(-1, number)

    def again(self, which: int, number: int) -> None:
        """A sequence gets another prompt: the common prefix is kept."""
        if row := self.row(which):
            text = self.random.choice(self.texts)
            cut = self.random.choice([0, 0, 1, self.random.randrange(CAPACITY)])
            prompt = (text[: max(0, len(text) - cut)] + self.some(1 + number % 3))[:CAPACITY]
            before = row.cache.seq_len
            found = self.memory.attach_prefix(row.cache, list(prompt))
            assert found == row.cache.seq_len < len(prompt)
            row.tokens = prompt[:found]
            row.lost = found if found > before else max(row.lost, found)
            self.put([(row, prompt[found:])])

    def fork(self, which: int, number: int) -> None:
        if (row := self.row(which)) and len(self.rows) < ROWS:
            free = self.pool.num_free_pages
            self.rows.append(Sequence(self.seen(row.cache.fork()), row.tokens, row.lost))
            assert self.pool.num_free_pages == free

    def truncate(self, which: int, number: int) -> None:
        if row := self.row(which):
            back = [len(row.tokens), self.pool.page_size, number][number % 3]
            length = max(0, len(row.tokens) - back)
            try:
                row.cache.truncate(length)
            except ValueError:
                assert 0 < length < row.lost
                return
            row.tokens = row.tokens[:length]
            row.lost = row.lost if length else 0

    def free(self, which: int, number: int) -> None:
        """Left to be collected, or emptied first."""
        if self.rows:
            row = self.rows.pop(which % len(self.rows))
            if number % 2:
                row.cache.reset()

    def keep(self, which: int, number: int) -> None:
        if row := self.row(which):
            self.memory.keep(row.cache)

    def evict(self, which: int, number: int) -> None:
        self.index.evict(1 + number % 4)

    def clear(self, which: int, number: int) -> None:
        if number > 24:
            self.index.clear()

    def press(self, which: int, number: int) -> None:
        """Somebody else needs pages for a while."""
        try:
            pages = self.pool.allocate(1 + number)
        except OutOfPages:
            return
        self.pool.write(pages, torch.full((len(pages), *self.pool.page_shape), self.poison, dtype=self.pool.dtype))
        self.pool.release(pages)

    def fail(self, which: int, number: int) -> None:
        """A pass that is interrupted when it has written already."""
        row = self.row(which)
        if row is None or not (n := min(1 + number % 6, CAPACITY - len(row.tokens))):
            return
        row.passes(n)
        try:
            row.cache.reserve(n)
        except OutOfPages:
            return
        for position in range(len(row.tokens), len(row.tokens) + n):
            for page in row.cache.page_table[0, :, position // self.pool.page_size]:
                self.pool.memory[:, :, :, page, position % self.pool.page_size] = self.poison

    def save(self, which: int, number: int) -> None:
        if row := self.row(which):
            self.saved.append((row.tokens, self.memory.dump(row.cache)))
            del self.saved[:-3]

    def load(self, which: int, number: int) -> None:
        if self.saved and len(self.rows) < ROWS:
            tokens, tensors = self.saved[number % len(self.saved)]
            row = Sequence(self.new(), tokens, len(tokens))
            try:
                self.memory.restore(row.cache, tensors)
            except OutOfPages:
                return
            self.rows.append(row)


NAMES = [
    "rest",
    *["start", "extend", "step", "fork", "truncate", "keep"] * 3,
    *["again", "together", "evict", "press", "fail", "free", "save", "load"] * 2,
    "clear",
]
LENGTH = 40
PROPERTY = given(
    operations=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(0, 31), st.integers(0, 31)),
        min_size=LENGTH,
        max_size=LENGTH,
    ),
    window=st.sampled_from(WINDOWS),
    page=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "int8"]),
    kernels=st.booleans(),
    seed=st.integers(0, 999),
)
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def check_world(
    operations: list[tuple[str, int, int]], window: int | None, page: int, dtype: str, kernels: bool, seed: int
) -> None:
    world = World(window, page, dtype, kernels, seed)
    try:
        world.run(operations)
    except BaseException:
        world.pool.release = lambda pages: None  # type: ignore[method-assign]  # what is amiss is amiss already
        raise


def test_any_operations() -> None:
    """A hundred thousand in the full run."""
    settings(SETTINGS, max_examples=amount(100_000, 4000) // LENGTH)(PROPERTY(check_world))()


class Broken:
    """Parts of pages, each with a mistake."""

    fork, release_from, drop = PagedCache.fork, PagedCache._release_from, PrefixIndex._drop
    insert = PrefixIndex.insert

    @staticmethod
    def fork_unshared(cache: PagedCache) -> PagedCache:
        twin = Broken.fork(cache)
        cache.pool.release(twin.page_table[twin.page_table != NO_PAGE].tolist())
        return twin

    @staticmethod
    def truncate_unreleased(cache: PagedCache, first: int) -> None:
        held = cache.page_table[:, :, first : cache.table_length].copy()
        cache.pool.retain(held[held != NO_PAGE].tolist())
        Broken.release_from(cache, first)

    @staticmethod
    def truncate_late(cache: PagedCache, first: int) -> None:
        """Keeps a page too many."""
        Broken.release_from(cache, first + (0 < first < cache.table_length))

    @staticmethod
    def written_while_shared(cache: PagedCache, index: int) -> list[tuple[int, int]]:
        return [(0, int(group)) for group in np.flatnonzero(cache.page_table[0, :, index] == NO_PAGE)]

    @staticmethod
    def a_page_short(positions: int, page: int) -> int:
        """One position beyond a page's end takes no page."""
        return max(-(-(positions - 1) // page), 1 if positions else 0)

    @staticmethod
    def a_page_long(positions: int, page: int) -> int:
        """A full page takes another."""
        return positions // page + 1 if positions else 0

    @staticmethod
    def drops(early: int) -> Callable[[PagedCache], None]:
        """So many pages earlier than they should be, counting the one that is kept for a rewind."""

        def drop_unseen(cache: PagedCache) -> None:
            page, kept = cache.pool.page_size, list(cache._first)
            for i, group in enumerate(cache.groups):
                if group.window is not None:
                    first = (first_visible(cache.seq_len, group.window) + (early - 1) * page) // page
                    kept[i] = max(kept[i], min(first, cache.seq_len // page))
                gone = cache.page_table[:, i, cache._first[i] : kept[i]]
                cache.pool.release(gone[gone != NO_PAGE].tolist())
                gone[:] = NO_PAGE
            cache._set_first(kept)

        return drop_unseen

    @staticmethod
    def stays_in_the_tree(index: PrefixIndex, pinned: Any) -> bool:
        """A leaf whose pages are gone."""
        leaves = {node: node.parent for node in index._nodes() if not node.children}
        dropped = Broken.drop(index, pinned)
        for node, parent in leaves.items():
            if node.parent is None:
                node.parent = parent
                parent.children[node.tokens[0]] = node
                index._size += 1
        return dropped

    @staticmethod
    def under_other_tokens(index: PrefixIndex, tokens: Any, pages: Any, salt: str = "") -> None:
        Broken.insert(index, [(token + 1) % TOKENS for token in tokens], pages, salt)

    @staticmethod
    def a_token_more(run: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        """That both begin with."""
        same = next(
            (i for i, (a, b) in enumerate(zip(run, tokens, strict=False)) if a != b), min(len(run), len(tokens))
        )
        return min(same + 1, len(run), len(tokens))


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        pytest.param(PagedCache, "fork", Broken.fork_unshared, id="fork does not share"),
        pytest.param(PagedCache, "_release_from", Broken.truncate_unreleased, id="truncate does not release"),
        pytest.param(PagedCache, "_release_from", Broken.truncate_late, id="truncate releases a page late"),
        pytest.param(PagedCache, "_shared_at", Broken.written_while_shared, id="written while shared"),
        pytest.param(paged, "_pages", Broken.a_page_short, id="a page short"),
        pytest.param(paged, "_pages", Broken.a_page_long, id="a page long"),
        pytest.param(PagedCache, "_drop_invisible", Broken.drops(1), id="dropped a page early"),
        pytest.param(PagedCache, "_drop_invisible", Broken.drops(2), id="dropped two pages early"),
        pytest.param(PrefixIndex, "_drop", Broken.stays_in_the_tree, id="dropped, but still found"),
        pytest.param(PrefixIndex, "insert", Broken.under_other_tokens, id="kept under other tokens"),
        pytest.param(prefix, "_common", Broken.a_token_more, id="found for other tokens"),
    ],
)
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any) -> None:
    """Caches attend here, without kernels: these would follow a page's number wherever it leads."""
    monkeypatch.setattr(owner, name, broken)

    def without_kernels(**example: Any) -> None:
        check_world(**example | {"kernels": False})

    search = settings(SETTINGS, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False)
    # Other logits or holders, a refusal without a reason, or a kernel that has no key to attend to.
    with pytest.raises((AssertionError, ValueError, RuntimeError, SystemError)):
        search(PROPERTY(without_kernels))()


@pytest.mark.parametrize(
    ("page", "has"), [(PAGE_SIZE, True), (2 * PAGE_SIZE, True), (4, False), (PAGE_SIZE + 16, False)]
)
def test_pages_that_a_gpu_can_read(page: int, has: bool) -> None:
    """Its kernels read blocks of keys within one page. Any other cache attends itself."""
    config = make_tiny_config()
    cache = PagedCache.from_model_config(config, 300, dtype="float32", device="cpu", page_size=page)
    assert cache.table(config, torch.float32, 1) is not None
    cache._device_table = DeviceTables(torch.device("cpu")).allocate(cache.page_table.size)  # as on a GPU
    assert (cache.table(config, torch.float32, 1) is not None) == has
