"""A pass over rows of any lengths: how they are packed, what is refused, and that each is what it is alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mocks import CACHES, LAYOUTS
from tiny import FAMILIES
from torch import Tensor

from infer import GrowingCache, KVCache
from infer.backend import backend_for
from infer.cache import BaseCache, NoCache
from infer.models.common import Decoder
from infer.models.rows import ALL, LAST, NONE, PackedBatch, Row, pack

CPU = torch.device("cpu")
SIZES = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "max_seq_len": 16}


def empty(cls: Any = KVCache, **changes: Any) -> Any:
    return cls.allocate(**({"dtype": "float32", "device": "cpu"} | SIZES | changes))


def holding(count: int, batch: int = 1) -> KVCache:
    """A cache with so many positions filled."""
    cache = empty(batch_size=batch)
    cache.advance(count)
    return cache


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(seed))


def stored(cache: BaseCache) -> list[Tensor]:
    return [t.clone() for t in (*cache.k, *cache.v)]


@pytest.fixture
def packed() -> PackedBatch:
    """One row of 3 tokens, a batch of two with 2 each, and one of a single token."""
    rows = [
        Row(holding(0), [5, 6, 7], slice(0, 2)),
        Row(holding(4, batch=2), torch.tensor([[1, 2], [3, 4]]), LAST),
        Row(holding(9), [8], ALL),
    ]
    return pack(rows, CPU)


class TestPack:
    def test_rows_follow_each_other(self, packed: PackedBatch) -> None:
        assert packed.ids.tolist() == [5, 6, 7, 1, 2, 3, 4, 8]
        assert packed.positions.tolist() == [0, 1, 2, 4, 5, 4, 5, 9]
        assert [(span.batch, span.n, span.start, span.stop) for span in packed.spans] == [
            (1, 3, 0, 3),
            (2, 2, 3, 7),
            (1, 1, 7, 8),
        ]

    def test_one_row(self) -> None:
        packed = pack([Row(holding(2), torch.tensor([[3, 4]], dtype=torch.int32))], CPU)
        assert (packed.ids.tolist(), packed.positions.tolist()) == ([3, 4], [2, 3])

    def test_last_positions_of_a_cache_and_of_a_model(self) -> None:
        assert pack([Row(holding(13), [1, 2, 3])], CPU, 16).positions.tolist() == [13, 14, 15]

    def test_any_sequence_of_ids(self) -> None:
        for tokens in ((1, 2), range(1, 3), torch.tensor([[1, 2]])):
            assert pack([Row(holding(0), tokens)], CPU).ids.tolist() == [1, 2]

    def test_nothing_counts_before_the_pass_is_through(self, packed: PackedBatch) -> None:
        assert [span.row.cache.seq_len for span in packed.spans] == [0, 4, 9]
        packed.advance()
        assert [span.row.cache.seq_len for span in packed.spans] == [3, 6, 10]


class TestWanted:
    def test_of_each_row_its_own(self, packed: PackedBatch) -> None:
        assert packed.selected() == [0, 1, 4, 6, 7]

    def test_all(self) -> None:
        rows = [Row(holding(0), [1, 2], ALL), Row(holding(0), [3], ALL)]
        assert pack(rows, CPU).selected() is None

    @pytest.mark.parametrize(
        ("logits", "wanted"),
        [(NONE, []), (LAST, [3, 7]), (slice(1, 3), [1, 2, 5, 6]), (slice(-2, None), [2, 3, 6, 7]), (slice(9, 12), [])],
        ids=str,
    )
    def test_slices(self, logits: slice, wanted: list[int]) -> None:
        packed = pack([Row(holding(0, batch=2), random_ids(2, 4), logits)], CPU)
        assert packed.selected() == wanted
        x = torch.randn(8, 3)
        assert torch.equal(packed.select(x), x[wanted])

    def test_choose(self, packed: PackedBatch) -> None:
        x = torch.randn(8, 3)
        assert torch.equal(packed.select(x), x[[0, 1, 4, 6, 7]])

    def test_split(self, packed: PackedBatch) -> None:
        logits = torch.randn(5, 3)
        first, second, third = packed.split(logits)
        assert torch.equal(first, logits[None, 0:2])
        assert torch.equal(second, logits[2:4, None])  # a batch of two, the last of each
        assert torch.equal(third, logits[None, 4:5])

    def test_split_where_some_want_nothing(self) -> None:
        rows = [Row(holding(0, batch=2), random_ids(2, 4), NONE), Row(holding(0), [1, 2])]
        nothing, last = pack(rows, CPU).split(torch.ones(1, 3))
        assert (nothing.shape, last.shape) == ((2, 0, 3), (1, 1, 3))
        assert pack(rows[:1], CPU).split(torch.ones(0, 3))[0].shape == (2, 0, 3)


class TestRefusals:
    """Before any work: no cache has moved."""

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ([], r"there are no tokens in input_ids of shape \[1, 0\]"),
            (torch.zeros(1, 0, dtype=torch.int64), r"no tokens in input_ids of shape \[1, 0\]"),
            (torch.zeros(0, 2, dtype=torch.int64), r"no tokens in input_ids of shape \[0, 2\]"),
            (torch.zeros(2, dtype=torch.int64), r"integers \[batch, tokens\], not int64 of shape \[2\]"),
            (torch.zeros(1, 2), r"integers \[batch, tokens\], not float32 of shape \[1, 2\]"),
            (torch.zeros(2, 2, dtype=torch.int64), "a batch of 2, but the cache one of 1"),
            ([1] * 17, "overflow: 0 positions filled, 17 more requested, capacity 16"),
        ],
    )
    def test_of_any_row(self, tokens: Any, message: str) -> None:
        for place in range(3):
            rows = [Row(holding(0), [1]), Row(holding(3), [2])]
            rows.insert(place, Row(holding(0), tokens))
            with pytest.raises(ValueError, match=message):
                pack(rows, CPU)

    def test_no_rows(self) -> None:
        with pytest.raises(ValueError, match="a pass needs at least one row"):
            pack([], CPU)

    def test_one_cache_twice(self) -> None:
        cache = holding(0)
        with pytest.raises(ValueError, match="each row of a pass needs a cache of its own"):
            pack([Row(cache, [1]), Row(holding(0), [1]), Row(cache, [2])], CPU)

    def test_positions_that_were_not_learned(self) -> None:
        with pytest.raises(ValueError, match="13 positions exceed the 12 that the model learned"):
            pack([Row(holding(3), [1]), Row(holding(10), [1, 2, 3])], CPU, 12)

    @pytest.mark.parametrize("way", ["torch", "backend"])
    def test_through_a_model(self, tiny_model: Callable[..., Decoder], way: str) -> None:
        """The rows beside it, in front and behind, are as they were, and go on as they would have."""
        model = tiny_model(model_type="gpt2", max_position_embeddings=12)
        make = {"dtype": "float32", "device": "cpu"}
        caches = [KVCache.from_model_config(model.config, size, **make) for size in (10, 20, 10)]
        with torch.inference_mode():
            run = model.run if way == "torch" else backend_for(model).run
            run([Row(cache, [1, 2, 3, 4]) for cache in caches])
            before = copy.deepcopy(caches)
            for wrong, message in (
                ([1] * 7, "overflow: 4 positions filled, 7 more requested, capacity 10"),
                ([1] * 9, "13 positions exceed the 12 that the model learned"),
                (random_ids(2, 1), "a batch of 2, but the cache one of 1"),
                ([], "there are no tokens"),
            ):
                place = 1 if "learned" in message else 2
                rows = [Row(cache, [5]) for cache in caches]
                rows[place] = Row(caches[place], wrong)
                with pytest.raises(ValueError, match=message):
                    run(rows)
                for cache, was in zip(caches, before, strict=True):
                    assert cache.seq_len == was.seq_len == 4
                    assert all(map(torch.equal, stored(cache), stored(was)))
            again, expected = (run([Row(cache, [5, 6]) for cache in each]) for each in (caches, before))
            assert all(map(torch.equal, again, expected))


# How many tokens the rows hold, and how many each is fed; none of a window's edges is left out.
HELD = [0, 4, 11, 1, 3, 5, 0, 6]
FED = [7, 1, 2, 1, 12, 3, 9, 1]
WANTED = [LAST, LAST, ALL, NONE, slice(3, 9), LAST, NONE, ALL]


def filled(model: Decoder, dtype: str = "float32") -> list[Any]:
    """A cache of each layout, holding so many tokens."""
    caches = []
    for i, (cls, options) in enumerate(LAYOUTS):
        cache = cls.from_model_config(model.config, 32, dtype=dtype, device="cpu", **options)
        if HELD[i]:
            model(random_ids(1, HELD[i], seed=i), kv_cache=cache)
        caches.append(cache)
    return caches


def rows_of(caches: list[Any], wanted: list[slice] | None = None) -> list[Row]:
    each = wanted or [ALL] * len(caches)
    return [Row(cache, random_ids(1, FED[i], seed=50 + i), each[i]) for i, cache in enumerate(caches)]


class TestRun:
    """`Decoder.run`, in plain torch."""

    @pytest.fixture(params=FAMILIES)
    def model(self, request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model(model_type=request.param)

    @pytest.fixture
    def gemma(self, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model(model_type="gemma3")

    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_equals_its_rows_alone(self, model: Decoder, dtype: str) -> None:
        together, alone = filled(model, dtype), filled(model, dtype)
        for _ in range(2):
            got = model.run(rows_of(together))
            expected = [model.run([row])[0] for row in rows_of(alone)]
            for mine, same in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, same, atol=1e-5 if dtype == "float32" else 0.05, rtol=1e-4)
        assert [cache.seq_len for cache in together] == [a + 2 * b for a, b in zip(HELD, FED, strict=True)]

    def test_equals_a_pass_without_a_cache(self, model: Decoder) -> None:
        got = model.run(rows_of(filled(model)))
        for i, logits in enumerate(got):
            tokens = torch.cat((random_ids(1, HELD[i], seed=i), random_ids(1, FED[i], seed=50 + i)), 1)
            torch.testing.assert_close(logits, model(tokens)[:, HELD[i] :], atol=1e-4, rtol=1e-4)

    def test_one_row_is_the_model_itself(self, model: Decoder) -> None:
        """A call is a pass of one row on the model's backend."""
        run = backend_for(model).run
        for row, same in zip(rows_of(filled(model)), filled(model), strict=True):
            assert torch.equal(run([row])[0], model(row.tokens, kv_cache=same, all_logits=True))
        for row, same in zip(rows_of(filled(model), [LAST] * len(HELD)), filled(model), strict=True):
            assert torch.equal(run([row])[0], model(row.tokens, kv_cache=same))
        ids = random_ids(2, 6)
        assert torch.equal(run([Row(NoCache(2), ids, ALL)])[0], model(ids))

    def test_gives_the_logits_that_are_wanted(self, model: Decoder) -> None:
        whole = model.run(rows_of(filled(model)))
        some = model.run(rows_of(filled(model), WANTED))
        for got, logits, wanted in zip(some, whole, WANTED, strict=True):
            torch.testing.assert_close(got, logits[:, wanted], atol=1e-5, rtol=1e-5)

    def test_batches_and_rows_without_a_cache_beside_others(self, model: Decoder) -> None:
        ids = [random_ids(3, 5), random_ids(1, 4, seed=1), random_ids(2, 2, seed=2), random_ids(1, 1, seed=3)]

        def caches() -> list[BaseCache]:
            make = {"dtype": "float32", "device": "cpu"}
            kinds = [(KVCache, 3), (GrowingCache, 2), (KVCache, 1)]
            first, third, last = (cls.from_model_config(model.config, 9, batch_size=n, **make) for cls, n in kinds)
            return [first, NoCache(), third, last]

        got = model.run([Row(cache, tokens, ALL) for cache, tokens in zip(caches(), ids, strict=True)])
        for logits, tokens in zip(got, ids, strict=True):
            torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=1e-4)

    def test_order_and_company_do_not_matter(self, gemma: Decoder) -> None:
        logits = gemma.run(rows_of(filled(gemma)))
        backwards = gemma.run(rows_of(filled(gemma))[::-1])[::-1]
        some = gemma.run(rows_of(filled(gemma))[1:3])
        for got, expected in zip((*backwards, *some), (*logits, *logits[1:3]), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

    def test_a_failed_pass_leaves_all_rows_as_they_were(self, gemma: Decoder) -> None:
        caches = filled(gemma)
        before = copy.deepcopy(caches)

        def fail(*_: object) -> None:
            raise RuntimeError("halfway")

        for count in (1, 8):
            hook = gemma.layers[2].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="halfway"):
                gemma.run([Row(cache, [7] * count) for cache in caches])
            hook.remove()
            assert [cache.seq_len for cache in caches] == HELD
        got, expected = (gemma.run(rows_of(each)) for each in (caches, before))
        assert all(map(torch.equal, got, expected))

    def test_modules_see_all_rows_at_once(self, gemma: Decoder) -> None:
        shapes: list[tuple[int, ...]] = []
        hook = gemma.layers[1].mlp.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
        gemma.run(rows_of(filled(gemma)))
        hook.remove()
        assert shapes[-1] == (sum(FED), 32)

    def test_gradients(self, tiny_model: Callable[..., Decoder]) -> None:
        """Of ragged rows: those of each alone, added up."""
        model = tiny_model().requires_grad_(True)
        ids = [random_ids(1, 5), random_ids(2, 3, seed=1)]

        def gradients(logits: list[Tensor]) -> list[Tensor]:
            model.zero_grad()
            sum(x.square().mean() for x in logits).backward()
            return [weight.grad.clone() for weight in model.parameters()]

        got = gradients(model.run([Row(NoCache(len(each)), each, ALL) for each in ids]))
        expected = gradients([model(each) for each in ids])
        assert all(gradient.any() for gradient in got)
        for mine, same in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, same, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_row_among_others_stores_and_attends_as_it_does_alone(dtype: str) -> None:
    """The same keys, whoever is beside it: bit for bit."""
    together, alone = ([empty(cls, dtype=dtype) for cls in CACHES] for _ in range(2))
    for counts in ((3, 1, 5, 2), (1, 1, 1, 1), (2, 4, 1, 3)):
        packed = pack([Row(cache, [0] * n) for cache, n in zip(together, counts, strict=True)], CPU)
        for layer in range(2):
            q, k, v = (torch.randn(sum(counts), heads, 8) for heads in (8, 4, 4))
            got = packed.attend(layer, q, k, v, scale=1.0, window=None)
            for cache, span in zip(alone, packed.spans, strict=True):
                part = slice(span.start, span.stop)
                own = pack([Row(cache, [0] * span.n)], CPU)
                expected = own.attend(layer, q[part], k[part], v[part], scale=1.0, window=None)
                assert torch.equal(got[part], expected)
        packed.advance()
        for cache, n in zip(alone, counts, strict=True):
            cache.advance(n)
    for cache, same in zip(together, alone, strict=True):
        assert all(map(torch.equal, stored(cache), stored(same)))
