"""The index finds the pages of what sequences have in common, and lets go of them in the right order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from amount import amount, once
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.cache.pool import OutOfPages, PagePool
from infer.cache.prefix import TRIES, Match, PrefixIndex

FULL = [None]
MIXED = [None, 4]  # pages of 4 positions below: a window of one page and the three positions before


def index_of(windows: Sequence[int | None] = FULL, *, page: int = 4, count: int = 60) -> PrefixIndex:
    pool = PagePool(count, 1, 1, 2, dtype=torch.float32, device=torch.device("cpu"), page_size=page)
    return PrefixIndex(pool, windows)


def put(
    index: PrefixIndex, tokens: Sequence[int], *, known: int = 0, lost: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Insert tokens as their sequence does that ends then.

    known: pages that it took from the index; lost: which pages it no longer has of groups with windows.
    """
    pool = index.pool
    pages = index.match(tokens[: known * pool.page_size]).pages
    for at in range(known, -(-len(tokens) // pool.page_size)):
        new = pool.allocate(len(index.windows))
        gone = [page for page, window in zip(new, index.windows, strict=True) if window and at in lost]
        pool.release(gone)
        pages.append(tuple(-1 if page in gone else page for page in new))
    index.insert(tokens, pages)
    release(index, pages)
    index.check()
    return pages


def release(index: PrefixIndex, pages: Sequence[tuple[int, ...]]) -> None:
    index.pool.release(page for some in pages for page in some if page >= 0)


def look(index: PrefixIndex, tokens: Sequence[int]) -> Match:
    """A match that is released at once."""
    match = index.match(tokens)
    index.check()
    release(index, match.pages)
    return match


def consistent(index: PrefixIndex, *held: Sequence[tuple[int, ...]]) -> None:
    """All pages are held as often as the index and these say, and free otherwise."""
    holders = index.check()
    assert index.num_pages == len(holders)
    holders.update(page for pages in held for some in pages for page in some if page >= 0)
    assert Counter(dict(enumerate(index.pool.ref_counts.tolist()))) == holders
    assert index.pool.num_free_pages == index.pool.num_pages - len(holders)


class TestMatch:
    def test_nothing(self) -> None:
        index = index_of()
        assert look(index, [1, 2]) == Match(0, [])
        put(index, [])
        put(index, [1, 2])
        assert look(index, []) == look(index, [2, 1]) == Match(0, [])
        assert len(index) == 1

    def test_any_length(self) -> None:
        for length in range(1, 14):
            for asked in [3, 4, 5, 8, 9, 14]:
                index = index_of()
                pages = put(index, range(length))
                common = min(length, asked)
                assert look(index, range(asked)) == Match(common, pages[: -(-common // 4)])
                assert len(index) == index.num_pages == len(pages)

    @pytest.mark.parametrize("common", range(1, 10))
    def test_fork(self, common: int) -> None:
        """Where it is in the middle of a page, each branch has its own page, which also holds the tokens before."""
        index = index_of()
        one, other = [*range(10)], [*range(common), 90, 91, 92, 93, 94]
        first = put(index, one)
        second = put(index, other, known=common // 4)
        assert second[: common // 4] == first[: common // 4]
        assert look(index, one) == Match(10, first)
        assert look(index, other) == Match(common + 5, second)
        assert look(index, [*range(common), 80]) == Match(common, first[: -(-common // 4)])

    def test_three_ways(self) -> None:
        index = index_of()
        a, b, c = (put(index, tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7, 8]))
        assert [look(index, t).pages for t in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7, 8])] == [a, b, c]
        assert look(index, [1, 2, 3]).pages == a
        assert (len(index), index.num_pages) == (5, 3)

    def test_shared_for_the_caller(self) -> None:
        index = index_of()
        put(index, range(8))
        match = index.match(range(6))
        consistent(index, match.pages)
        index.clear()
        consistent(index, match.pages)
        assert index.pool.num_free_pages == 58
        assert len(index) == index.num_pages == 0


class TestInsert:
    def test_twice(self) -> None:
        index = index_of()
        first = put(index, range(10))
        put(index, range(10))
        put(index, range(7))
        assert look(index, range(10)).pages == first
        assert index.num_pages == 3

    def test_a_tail_grows(self) -> None:
        """A conversation does not leave a page per turn."""
        index = index_of()
        for length in range(1, 12):
            pages = put(index, range(length), known=length // 4)
            assert index.num_pages == len(index) == len(pages)
            assert look(index, range(length)) == Match(length, pages)

    def test_a_tail_grows_in_the_same_page(self) -> None:
        index = index_of()
        pages = [(page,) for page in index.pool.allocate(2)]
        for length in range(1, 9):
            index.insert(range(length), pages[: -(-length // 4)])
            consistent(index, pages)
        assert len(index) == 2

    def test_a_tail_in_use_grows(self) -> None:
        index = index_of()
        put(index, [1, 2])
        match = index.match([1, 2])
        longer = put(index, [1, 2, 3])
        consistent(index, match.pages)
        assert match.pages != longer == look(index, [1, 2, 3]).pages

    def test_a_full_page_does_not_grow(self) -> None:
        index = index_of()
        first = put(index, range(4))
        second = put(index, range(6))
        assert look(index, range(6)).pages == [first[0], second[1]]

    @pytest.mark.parametrize(
        ("tokens", "pages"), [(4, []), (4, [(0, 1)] * 2), (5, [(0, 1)]), (4, [(-1, 1)]), (4, [(0,)]), (0, [(0, 1)])]
    )
    def test_refuses(self, tokens: int, pages: list[tuple[int, ...]]) -> None:
        index = index_of(MIXED)
        index.pool.allocate(2)
        with pytest.raises(ValueError, match="page"):
            index.insert(range(tokens), pages)
        assert len(index) == 0


class TestWindows:
    @once(length=range(1, 13), window=range(1, 11))
    def test_only_what_it_needs(self, window: int, length: int) -> None:
        """The next token sees itself and window - 1 before it."""
        index = index_of([None, window])
        pages = put(index, range(12))
        needed = {position // 4 for position in range(max(0, length - window + 1), length)}
        match = look(index, range(length))
        assert match.length == length
        assert match.pages == [(a, b if at in needed else -1) for at, (a, b) in enumerate(pages[: len(match.pages)])]

    @pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (0, 1), (1, 3), (0, 2)], ids=str)
    @pytest.mark.parametrize("asked", [14, 16])
    def test_longest(self, lost: tuple[int, ...], asked: int) -> None:
        for window in range(1, 18):
            self.check_longest(window, lost, asked)

    def check_longest(self, window: int, lost: tuple[int, ...], asked: int) -> None:
        index = index_of([None, window])
        put(index, range(16), lost=lost)
        lengths = [
            length
            for length in range(asked + 1)
            if not any(position // 4 in lost for position in range(max(0, length - window + 1), length))
        ]
        assert look(index, range(asked)).length == max(lengths)

    def test_longest_in_the_middle_of_a_page(self) -> None:
        """The rest of the page is another's, which has lost it."""
        index = index_of(MIXED)
        first = put(index, [0, 1, 2, 3, 4, 5])
        put(index, [0, 1, 2, 3, 4, 8], known=1)
        put(index, [0, 1, 2, 3, 4, 5, 7], known=1, lost=[1])
        assert look(index, [0, 1, 2, 3, 4, 5, 7]) == Match(5, first)
        consistent(index)

    def test_lost_ones_come_back(self) -> None:
        index = index_of(MIXED)
        lost = put(index, range(12), lost=[0, 1])
        assert look(index, range(8)).length == 0
        assert look(index, range(12)).length == 12
        new = put(index, range(8))
        match = look(index, range(8))
        assert match == Match(8, [(lost[0][0], -1), (lost[1][0], new[1][1])])

    def test_lost_ones_come_back_in_part(self) -> None:
        """What comes ends in the middle of a page: its page will not do for the rest."""
        index = index_of(MIXED)
        put(index, range(12), lost=[0, 1])
        new = put(index, range(6))
        match = look(index, range(6))
        assert (match.length, match.pages[1][1]) == (6, new[1][1])
        assert look(index, range(8)).length == 6
        assert look(index, range(12)).length == 12


class TestEvict:
    def test_least_recently_used_first(self) -> None:
        index = index_of()
        for start in (10, 20, 30):
            put(index, range(start, start + 4))
        look(index, range(10, 14))
        for gone, left in ((20, [10, 30]), (30, [10]), (10, [])):
            index.evict(1)
            consistent(index)
            assert look(index, range(gone, gone + 4)).length == 0
            assert index.num_pages == len(left)

    def test_from_the_end(self) -> None:
        index = index_of()
        put(index, range(12))
        for left in (8, 4, 0):
            index.evict(1)
            assert look(index, range(12)).length == left

    def test_the_pool_asks(self) -> None:
        index = index_of(count=5)
        put(index, range(20))
        taken = index.pool.allocate(3)
        assert look(index, range(20)).length == 8
        with pytest.raises(OutOfPages):
            index.pool.allocate(3)
        index.pool.release(taken)
        consistent(index)

    def test_never_what_is_in_use(self) -> None:
        index = index_of()
        for start in (10, 20, 30):
            put(index, range(start, start + 8))
        match = index.match(range(10, 18))
        for _ in range(2):
            index.evict(100)
            consistent(index, match.pages)
            assert index.num_pages == 2
        release(index, match.pages)
        index.evict(100)
        assert index.num_pages == len(index) == 0

    def test_all_but_what_is_in_use(self) -> None:
        """Also the page of a node with descendants: their page holds its tokens too."""
        index = index_of()
        put(index, [1, 2, 3, 4])
        put(index, [1, 2, 8, 9])
        match = index.match([1, 2, 8, 9])
        index.evict(100)
        consistent(index, match.pages)
        assert index.pool.num_free_pages == index.pool.num_pages - 1
        release(index, match.pages)
        assert look(index, [1, 2, 8, 9]).length == 4

    def test_what_was_in_use_counts_as_used(self) -> None:
        index = index_of()
        put(index, [1])
        put(index, [2])
        match = index.match([1])
        put(index, [3])
        look(index, [2])
        look(index, [3])
        index.evict(1)  # passes by 1, which is in use
        release(index, match.pages)
        index.evict(1)
        assert [look(index, [token]).length for token in (1, 2, 3)] == [1, 0, 0]

    def test_twins(self) -> None:
        """Two nodes with one page after a fork: letting go of one of them frees nothing."""
        index = index_of()
        put(index, [1, 2, 3, 4])
        put(index, [1, 2, 8, 9])
        look(index, [1, 2, 8, 9])
        free = index.pool.num_free_pages
        index.evict(1)
        consistent(index)
        assert index.pool.num_free_pages >= free + 1
        match = index.match([1, 2])
        index.evict(9)
        consistent(index, match.pages)
        assert index.num_pages == 1

    def test_window_pages_go_first(self) -> None:
        """Those that no end, nor the last token of it asked for again, needs; from the beginning on."""
        index = index_of(MIXED)
        put(index, range(16))
        for stripped in (1, 2, 3):
            index.evict(1)
            consistent(index)
            match = look(index, range(16))
            assert (match.length, index.num_pages, len(index)) == (16, 8 - stripped, 4)
        assert [look(index, range(length)).length for length in (14, 15)] == [0, 15]
        index.evict(1)
        assert len(index) == 3

    @pytest.mark.parametrize("window", range(1, 13))
    def test_window_pages_that_hits_need_stay(self, window: int) -> None:
        """A repeated prompt without its last token, and one that continues at a fork."""
        index = index_of([None, window])
        put(index, range(16))
        put(index, [*range(10), 90, 91], known=2)
        size = len(index)
        while len(index) == size:
            assert look(index, range(16)).length == 16
            assert look(index, range(15)).length == 15
            assert look(index, [*range(10), 90, 91]).length == 12
            assert look(index, [*range(10), 80]).length == 10
            index.evict(1)
            consistent(index)

    def test_window_pages_before_a_fork_that_is_none_any_more(self) -> None:
        index = index_of(MIXED)
        put(index, range(8))
        put(index, [*range(4), 90])
        put(index, [*range(8), *range(20, 24)], known=2)
        look(index, range(8))
        while look(index, [*range(4), 90]).length == 5:
            look(index, [*range(8), *range(20, 24)])
            index.evict(1)
        consistent(index)
        index.evict(1)
        assert look(index, [*range(8), *range(20, 24)]).length == 12
        assert look(index, range(4)).length == 0

    def test_window_pages_in_use(self) -> None:
        """They are passed by, however many they are, and found again when they are not."""
        index = index_of([4])
        long = range(4 * (TRIES * 3 + 2))
        put(index, long)
        held = [index.match(range(end)).pages for end in range(4, len(long), 4)]
        put(index, [-1])
        held.append(index.match(long).pages)
        for _ in range(2):
            index.evict(9)
            consistent(index, *held)
            assert index.num_pages == len(long) // 4
        release(index, held.pop(TRIES * 2))
        index.evict(9)
        consistent(index, *held)
        assert index.num_pages == len(long) // 4 - 1

    def test_terminates(self) -> None:
        index = index_of(MIXED)
        matches = []
        for start in range(0, 60, 20):
            put(index, range(start, start + 12))
            matches.append(index.match(range(start, start + 12)).pages)
        for _ in range(3):
            index.evict(10**9)
            consistent(index, *matches)
        assert [look(index, range(start, start + 12)).length for start in range(0, 60, 20)] == [12] * 3


class World:
    """Sequences that share pages as the engine's do, and who wrote what where."""

    def __init__(self, windows: Sequence[int | None], page: int, count: int) -> None:
        self.index = index_of(windows, page=page, count=count)
        self.pool, self.size, self.windows = self.index.pool, page, windows
        self.pool.evict = self.evict
        self.written: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # of a page: group, index, all tokens to its end
        self.running: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}  # beginnings of what was inserted: their last pages

    def needed(self, length: int, at: int, group: int) -> bool:
        window = self.windows[group]
        low = 0 if window is None else max(0, length - window + 1)
        return any(low <= position < length for position in range(at * self.size, (at + 1) * self.size))

    def match(self, tokens: tuple[int, ...]) -> Match:
        """Every page was written for these very tokens, none is missing or too many, and nothing longer would do."""
        length, pages = match = self.index.match(tokens)
        assert length == max(at for at in range(len(tokens) + 1) if self.is_there(tokens[:at]))
        assert len(pages) == -(-length // self.size)
        for at, some in enumerate(pages):
            for group, page in enumerate(some):
                assert (page >= 0) == self.needed(length, at, group)
                if page >= 0:
                    end = min(length, (at + 1) * self.size)
                    owner, index, contents = self.written[page]
                    assert (owner, index, contents[:end]) == (group, at, tokens[:end])
        return match

    def is_there(self, tokens: tuple[int, ...]) -> bool:
        ends = [*range(self.size, len(tokens), self.size), len(tokens)] if tokens else []
        return all(tokens[:end] in self.known for end in ends) and all(
            self.known[tokens[:end]][group] >= 0 or not self.needed(len(tokens), at, group)
            for at, end in enumerate(ends)
            for group in range(len(self.windows))
        )

    def learn(self) -> None:
        """What the tree says, one beginning after the other."""
        before, self.known = self.known, {}
        rest = [((), self.index._root)]
        while rest:
            tokens, node = rest.pop()
            for at in range(len(node.tokens)):
                self.known[tokens + node.tokens[: at + 1]] = node.pages
            rest += [(tokens + node.tokens, child) for child in node.children.values()]
        self.lost = before.keys() - self.known.keys()

    def start(self, tokens: tuple[int, ...], lose: int) -> None:
        """A sequence with a cached prefix, perhaps. lose: the first entries whose window pages are released."""
        length, pages = self.match(tokens[:-1])
        known = length // self.size  # a page to be written to is copied
        self.running.append((tokens, pages))
        if self.take(pages, known, len(tokens)):
            self.write(tokens, pages, known)
            for at in range(min(lose, len(pages))):
                gone = [page for page, window in zip(pages[at], self.windows, strict=True) if window and page >= 0]
                self.pool.release(gone)
                pages[at] = tuple(-1 if page in gone else page for page in pages[at])
            self.insert(tokens, pages)

    def go_on(self, at: int, more: tuple[int, ...]) -> None:
        """A running sequence writes on, into the last of its pages, which the index and others may hold too."""
        if self.running:
            tokens, pages = self.running.pop(at % len(self.running))
            if len(tokens) % self.size and -1 in pages[-1]:
                more = ()  # what was lost cannot be written to
            self.running.append((tokens + more, pages))
            if self.take(pages, len(pages), len(tokens + more)):
                self.write(tokens + more, pages, len(tokens) // self.size)
                self.insert(tokens + more, pages)

    def take(self, pages: list[tuple[int, ...]], known: int, length: int) -> bool:
        """Pages after the known ones, for the sequence that came last, or its end."""
        groups = len(self.windows)
        try:
            new = self.pool.allocate((-(-length // self.size) - known) * groups)
        except OutOfPages:
            self.end(-1)
            return False
        release(self.index, pages[known:])
        pages[known:] = [tuple(new[at : at + groups]) for at in range(0, len(new), groups)]
        return True

    def write(self, tokens: tuple[int, ...], pages: list[tuple[int, ...]], start: int) -> None:
        for at in range(start, len(pages)):
            for group, page in enumerate(pages[at]):
                if page >= 0:
                    self.written[page] = group, at, tokens[: (at + 1) * self.size]

    def insert(self, tokens: tuple[int, ...], pages: list[tuple[int, ...]]) -> None:
        """Nothing is lost, and complete prefixes are found."""
        self.index.insert(tokens, pages)
        self.learn()
        assert not self.lost
        match = self.match(tokens)
        release(self.index, match.pages)
        if all(
            page >= 0 or not self.needed(len(tokens), at, group)
            for at, some in enumerate(pages)
            for group, page in enumerate(some)
        ):
            assert match.length == len(tokens)

    def end(self, at: int) -> None:
        if self.running:
            release(self.index, self.running.pop(at % len(self.running))[1])

    def evict(self, count: int) -> None:
        """What others hold stays; if too little came free, every leaf and every page to be stripped is in use."""
        before, free = self.index.check(), self.pool.num_free_pages
        used = {page: times for page, times in before.items() if self.pool.ref_counts[page] > times}
        self.index.evict(count)
        after = self.index.check()
        assert all(after[page] >= times for page, times in used.items())  # more, where others have them now too
        self.learn()
        if self.pool.num_free_pages < free + count:
            for node in self.index._nodes():
                assert node.children or any(page in used for page in node.pages)
                assert all(node.pages[group] in used for group in self.index._unneeded_groups(node))

    def check(self) -> None:
        consistent(self.index, *(pages for _, pages in self.running))


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), TOKENS, st.integers(0, 4)),
        st.tuples(st.just("start"), TOKENS, st.just(0)),
        st.tuples(st.just("go_on"), st.integers(0, 9), TOKENS),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(1, 9)),
    ),
    max_size=30,
)


@settings(max_examples=amount(3000, 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    windows=st.sampled_from([[None], [None, 3], [2, None], [4], [None, 2, 5], [1, None], [7, 3]]),
    page=st.integers(2, 4),
    count=st.integers(8, 40),
    operations=OPERATIONS,
)
def test_any_operations(windows: list[int | None], page: int, count: int, operations: list[tuple[Any, ...]]) -> None:
    world = World(windows, page, count)
    for name, *arguments in operations:
        getattr(world, name)(*arguments)
        world.check()
    while world.running:
        world.end(0)
    world.evict(count + 1)  # more than there are, so that nodes without a page go too
    world.check()
    assert world.pool.num_free_pages == count
    assert len(world.index) == 0


def test_a_salt_separates() -> None:
    index = index_of(MIXED)
    tokens = list(range(10))
    for salt in ("", "a", "b", "a"):
        pages = [tuple(index.pool.allocate(2)) for _ in range(3)]
        index.insert(tokens, pages, salt)
        release(index, pages)
        index.check()
    found = [index.match(tokens, salt) for salt in ("", "a", "b", "c")]
    assert [match.length for match in found] == [10, 10, 10, 0]
    used = [{page for some in match.pages for page in some if page >= 0} for match in found]
    assert len(set.union(*used)) == sum(map(len, used))
    assert index.match([], "a").length == 0
    for match in found:
        release(index, match.pages)
    index.evict(index.pool.num_pages)
    assert index.pool.num_free_pages == index.pool.num_pages
    assert len(index) == 0
