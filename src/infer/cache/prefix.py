"""Which tokens lead to which pages: what one sequence has computed, another that begins alike need not.

A radix tree over tokens. A node stands for a run of tokens within one page, and holds pages whose first positions are
of these tokens and of all before them. A sequence that leaves another in the middle of a page has copied that page, so
the nodes after a fork have pages of their own, which hold what lies before the fork too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count as counting
from typing import Any, NamedTuple
from weakref import WeakMethod

import numpy as np

from infer.cache.pool import PagePool

Pages = tuple[int, ...]  # one of each group of layers; -1: not held
TRIES = 8  # pages of others that are looked at in vain before a leaf goes: they are no work to come back to each time


class Match(NamedTuple):
    """What is there of some tokens, held for the caller, who releases it."""

    length: int  # in tokens
    pages: list[Pages]  # -1 where a window no longer reaches


@dataclass(slots=True, eq=False)
class _Node:
    parent: _Node | None  # None: the root, or a node that is gone
    tokens: tuple[int, ...]
    start: int  # of the first token, within its page
    pages: Pages
    last_used: int
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class _Queue:
    """Nodes, the least recently used first. One that was used since it came is put back when it is its turn."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Node]] = []
        self._queued: set[_Node] = set()
        self._order = counting()

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, node: _Node) -> bool:
        return node in self._queued

    def push(self, node: _Node) -> None:
        if node not in self._queued:
            self._queued.add(node)
            heappush(self._heap, (node.last_used, next(self._order), node))

    def pop(self) -> _Node | None:
        while self._heap:
            used, _, node = self._heap[0]
            if node.parent is not None and used < node.last_used:
                heapreplace(self._heap, (node.last_used, next(self._order), node))
                continue
            heappop(self._heap)
            self._queued.remove(node)
            if node.parent is not None:
                return node
        return None


class PrefixIndex:
    """The pages of sequences past and present, by their tokens; those used least recently go when pages run out."""

    def __init__(self, pool: PagePool, windows: Sequence[int | None]) -> None:
        """windows: of each group of layers."""
        self.pool, self.windows = pool, tuple(windows)
        self._limited = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._unlimited = [group for group, window in enumerate(windows) if window is None]
        self._narrowest = min((window for _, window in self._limited), default=0)
        self._widest = max((window for _, window in self._limited), default=0)
        self._clock = 0
        self._begin()
        pool.reclaim = _weakly(self.evict)

    def _begin(self) -> None:
        self._root = _Node(None, (), 0, (), 0)
        self._size = 0
        self._held: dict[int, int] = {}  # how often each page is held here
        self._leaves = _Queue()
        self._passed = _Queue()  # every node with a window's page that no hit is likely to need, and some others

    def __len__(self) -> int:
        """How many nodes there are."""
        return self._size

    @property
    def pages(self) -> int:
        """How many pages are held."""
        return len(self._held)

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest beginning of these tokens of which all is there that the next token would see."""
        tokens = tuple(tokens)
        self._clock += 1
        node, at, path, best, length = self._root, 0, list[_Node](), 0, 0
        whole_from = [0] * len(self.windows)  # the pages of a group that lie before `at` are all there from this one on
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            node = child
            common = _common(node.tokens, tokens[at : at + len(node.tokens)])
            index = at // self.pool.page
            at += common
            node.last_used = self._clock
            path.append(node)
            # Within a node the furthest length asks for the least: others are worth no look.
            if all(
                (first := self._first(at, window)) > index or (node.pages[group] >= 0 and first >= whole_from[group])
                for group, window in self._limited
            ):
                best, length = len(path), at
            if common < len(node.tokens):
                break
            if node.stop == self.pool.page:
                for group, _ in self._limited:
                    if node.pages[group] < 0:
                        whole_from[group] = index + 1
        pages: list[Pages] = []
        for node in path[:best]:
            if node.start:
                pages.pop()  # the deeper node has the rest of the page too
            pages.append(node.pages)
        firsts = [0 if window is None else self._first(length, window) for window in self.windows]
        for index in range(min(len(pages), max(firsts, default=0))):
            reach = zip(pages[index], firsts, strict=True)
            pages[index] = tuple(page if index >= first else -1 for page, first in reach)
        self.pool.share(page for some in pages for page in _real(some))
        return Match(length, pages)

    def insert(self, tokens: Sequence[int], pages: Sequence[Pages]) -> None:
        """Keep what is not there yet. The last page may be filled in part; the caller goes on holding what it holds."""
        tokens = tuple(tokens)
        size = self.pool.page
        if len(pages) != -(-len(tokens) // size):
            raise ValueError(f"{len(tokens)} tokens are in {-(-len(tokens) // size)} pages, not in {len(pages)}")
        if any(len(some) != len(self.windows) or any(some[group] < 0 for group in self._unlimited) for some in pages):
            raise ValueError("each group of layers has a page, and only one with a window may lack it")
        self._clock += 1
        node, at, path = self._root, 0, list[tuple[_Node, int]]()  # nodes and where each ends
        while at < len(tokens):
            own = pages[at // size]
            rest = tokens[at : at - at % size + size]
            child = node.children.get(tokens[at])
            if child is not None:
                common = _common(child.tokens, rest)
                both = child.pages
                if -1 in both:  # what of it the caller still holds is kept
                    both = tuple(own[group] if page < 0 else page for group, page in enumerate(both))
                if common < len(child.tokens) and (both != child.pages or at + common < len(tokens)):
                    child = self._split(child, common)
                if both != child.pages:
                    self._replace(child, both)
            elif 0 < node.stop < size and not node.children:
                # The tail of a sequence that goes on. It is the node before, which is on the path already.
                path.pop()
                common, child = len(rest), node
                node.tokens += rest
                self._replace(node, own)
            else:
                common, child = len(rest), _Node(node, rest, at % size, own, self._clock)
                node.children[rest[0]] = child
                self._hold(own)
                self._size += 1
            node = child
            node.last_used = self._clock
            path.append((node, at - at % size + node.stop))
            at += common
        if path:
            self._offer(path)

    def _offer(self, path: list[tuple[_Node, int]]) -> None:
        """After an insert: its leaf, and what now lies further back than a window reaches from there."""
        last, end = path[-1]
        if not last.children:
            self._leaves.push(last)
            end -= self._narrowest
        for node, stop in path:
            if stop <= end and any(node.pages[group] >= 0 for group, _ in self._limited):
                self._passed.push(node)

    def evict(self, count: int) -> None:
        """Let go of pages that nobody else holds until so many more are free, or no more can be."""
        goal = self.pool.free + count
        busy: list[tuple[_Queue, _Node]] = []
        while self.pool.free < goal:
            if not (
                self._strip(busy, TRIES)
                or self._drop(busy)
                or self._strip(busy, len(self._passed))
                or self._strip_busy(busy)
                or self._fold(busy)
            ):
                break
        self._clock += 1
        for queue, node in busy:
            node.last_used = self._clock
            queue.push(node)

    def holds(self, page: int) -> int:
        """How often the index holds a page."""
        return self._held.get(page, 0)

    def in_use(self) -> np.ndarray[Any, Any]:
        """Pages that somebody holds beside the index."""
        holders = self.pool.holders.copy()
        held = np.fromiter(self._held.items(), np.dtype((np.int64, 2)), len(self._held))
        holders[held[:, 0]] -= held[:, 1]
        return holders.nonzero()[0]

    def clear(self) -> None:
        """Let go of everything."""
        for node in self._nodes():
            self.pool.release(_real(node.pages))
            node.parent = None
        self._begin()

    def check(self) -> Counter[int]:
        """Raise AssertionError if anything is amiss; how often each page is held here."""
        held: Counter[int] = Counter()
        nodes = list(self._nodes())
        assert len(nodes) == self._size
        for node in nodes:
            assert node.parent is not None
            assert node.tokens
            assert node.parent.children[node.tokens[0]] is node
            assert node.start == node.parent.stop % self.pool.page
            assert node.stop <= self.pool.page
            assert len(node.pages) == len(self.windows)
            assert all(node.pages[group] >= 0 for group in self._unlimited)
            assert all(child.parent is node for child in node.children.values())
            assert node.last_used <= self._clock
            assert node.children or node in self._leaves
            assert node in self._passed or not self._spare(node)
            held.update(_real(node.pages))
        assert held == self._held
        assert all(self.pool.holders[page] >= times for page, times in held.items())
        return held

    def _first(self, length: int, window: int) -> int:
        """The first page that a window asks for after so many tokens."""
        low = max(0, length - window + 1)
        return (low if low < length else length + self.pool.page - 1) // self.pool.page

    def _split(self, node: _Node, at: int) -> _Node:
        """The first tokens of a node as a node before it, with the same pages."""
        assert node.parent is not None
        upper = _Node(node.parent, node.tokens[:at], node.start, node.pages, node.last_used)
        self._hold(upper.pages)
        self._size += 1
        node.parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.start = upper, node.tokens[at:], upper.stop
        upper.children[node.tokens[0]] = node
        return upper

    def _spare(self, node: _Node) -> list[int]:
        """Groups whose page no hit is likely to need: all of a window's positions after the node lie on one line.

        One position more than the window needs, as whoever asks for a whole prompt again wants its last token anew.
        """
        ahead, last = 0, node
        while ahead < self._widest and len(last.children) == 1:
            [last] = last.children.values()
            ahead += len(last.tokens)
        return [group for group, window in self._limited if window <= ahead and node.pages[group] >= 0]

    def _strip(self, busy: list[tuple[_Queue, _Node]], tries: int) -> bool:
        """Let go of a node's pages that no hit is likely to need. tries: how often these may be another's too."""
        while tries > 0 and (node := self._passed.pop()) is not None:
            spare = self._spare(node)
            idle = [group for group in spare if not self._in_use(node.pages[group])]
            if len(idle) < len(spare):
                busy.append((self._passed, node))
                tries -= 1
            if idle:
                self._replace(node, tuple(-1 if group in idle else page for group, page in enumerate(node.pages)))
                return True
        return False

    def _drop(self, busy: list[tuple[_Queue, _Node]]) -> bool:
        """Let go of a leaf."""
        while (node := self._leaves.pop()) is not None:
            if node.children:
                continue
            if any(self._in_use(page) for page in _real(node.pages)):
                busy.append((self._leaves, node))
                continue
            assert node.parent is not None
            parent, node.parent = node.parent, None
            del parent.children[node.tokens[0]]
            self._release(node.pages)
            self._size -= 1
            if parent is not self._root and not parent.children:
                self._leaves.push(parent)
            # A fork that is none any more: what lies before it may be further back now than a window reaches.
            ahead = 0
            while parent.parent is not None and len(parent.children) == 1 and ahead < self._widest:
                self._passed.push(parent)
                ahead += len(parent.tokens)
                parent = parent.parent
            return True
        return False

    def _strip_busy(self, busy: list[tuple[_Queue, _Node]]) -> bool:
        """Let go of what nobody else holds of a node that is in use by its other pages."""
        for _, node in busy:
            idle = [g for g, _ in self._limited if node.pages[g] >= 0 and not self._in_use(node.pages[g])]
            if idle:
                self._replace(node, tuple(-1 if group in idle else page for group, page in enumerate(node.pages)))
                return True
        return False

    def _fold(self, busy: list[tuple[_Queue, _Node]]) -> bool:
        """Give a node the page of one behind it that is in use, and holds its tokens too, in place of its own."""
        for _, node in busy:
            while node.parent is not None and node.parent is not self._root:
                parent = node.parent
                if node.start:
                    pairs = zip(parent.pages, node.pages, strict=True)
                    idle = [own >= 0 <= page and self._in_use(page) and not self._in_use(own) for own, page in pairs]
                    if any(idle):
                        chosen = zip(idle, parent.pages, node.pages, strict=True)
                        self._replace(parent, tuple(page if better else own for better, own, page in chosen))
                        return True
                node = parent
        return False

    def _in_use(self, page: int) -> bool:
        return bool(self.pool.holders[page] > self._held[page])

    def _replace(self, node: _Node, pages: Pages) -> None:
        self._hold(pages)
        self._release(node.pages)
        node.pages = pages

    def _hold(self, pages: Pages) -> None:
        self.pool.share(_real(pages))
        for page in _real(pages):
            self._held[page] = self._held.get(page, 0) + 1

    def _release(self, pages: Pages) -> None:
        self.pool.release(_real(pages))
        for page in _real(pages):
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]

    def _nodes(self) -> Iterator[_Node]:
        rest = list(self._root.children.values())
        while rest:
            node = rest.pop()
            rest.extend(node.children.values())
            yield node


def _weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    """Without keeping the index: a pool that nobody has any more is to go at once."""
    reference = WeakMethod(method)

    def call(count: int) -> None:
        if (own := reference()) is not None:
            own(count)

    return call


def _real(pages: Pages) -> Pages:
    return pages if -1 not in pages else tuple(page for page in pages if page >= 0)


def _common(run: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    length = min(len(run), len(tokens))
    if run[:length] == tokens[:length]:
        return length
    return next(i for i in range(length) if run[i] != tokens[i])
