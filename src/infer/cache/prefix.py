"""The prefix cache: finds the pages of a token prefix, so that sequences with a common prefix compute it once.

A radix tree over tokens. A node stands for consecutive tokens within one page, and holds the pages that contain these
tokens and those before them in the same page. A sequence that diverges from another in the middle of a page has copied
that page, so the nodes after a fork have pages of their own, which also contain the tokens before the fork.
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

from infer.cache.pool import NO_PAGE, PagePool

Pages = tuple[int, ...]  # one of each group of layers, or NO_PAGE
FEW = 16  # less than this part of a page is not worth a copy
TRIES = 8  # nodes whose pages are in use that `evict` skips before it drops a leaf, to bound its work


class Match(NamedTuple):
    """The cached prefix of some tokens. Its pages are retained for the caller, who releases them."""

    length: int  # in tokens
    pages: list[Pages]  # NO_PAGE for positions before a window


@dataclass(slots=True, eq=False)
class _Node:
    parent: _Node | None  # None: the root, or a removed node
    tokens: tuple[int, ...]
    start: int  # of the first token, within its page
    pages: Pages
    last_used: int
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class _Queue:
    """Nodes, the least recently used first. A node that was used after its `push` is requeued instead of popped."""

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
    """The pages of running and finished sequences by their tokens; evicts the least recently used."""

    def __init__(self, pool: PagePool, windows: Sequence[int | None]) -> None:
        """windows: of each group of layers."""
        self.pool, self.windows = pool, tuple(windows)
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._narrowest = min((window for _, window in self._windowed), default=0)
        self._widest = max((window for _, window in self._windowed), default=0)
        self._clock = 0
        self._reset()
        pool.evict = _weak(self.evict)

    def _reset(self) -> None:
        self._root = _Node(None, (), 0, (), 0)
        self._size = 0
        self._ref_counts = np.zeros_like(self.pool.ref_counts)  # of each page: the nodes that hold it
        self._leaves = _Queue()
        self._window_evictable = _Queue()  # all nodes with a window page that no hit is likely to need, and some others

    def __len__(self) -> int:
        """The number of nodes."""
        return self._size

    @property
    def num_pages(self) -> int:
        """Pages that the index holds."""
        return int(np.count_nonzero(self._ref_counts))

    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        """The longest prefix of these tokens whose cached pages include all positions that the next token sees.

        salt: only pages that were inserted with the same one are found.
        """
        tokens = _salted(tokens, salt)
        self._clock += 1
        node, at, path, best, length = self._root, 0, list[_Node](), 0, 0
        gapless_from = [0] * len(self.windows)  # of each group: the entry from which no page before `at` is missing
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            node = child
            common = _common(node.tokens, tokens[at : at + len(node.tokens)])
            index = at // self.pool.page_size
            at += common
            node.last_used = self._clock
            path.append(node)
            # Within a node, the longest length needs the fewest pages: shorter ones need no check. A few tokens of a
            # page are computed again, because the page would have to be copied.
            few = 0 < at % self.pool.page_size < self.pool.page_size // FEW and at < len(tokens)
            if not few and all(
                (first := self._first(at, window)) > index or (node.pages[group] >= 0 and first >= gapless_from[group])
                for group, window in self._windowed
            ):
                best, length = len(path), at
            if common < len(node.tokens):
                break
            if node.stop == self.pool.page_size:
                for group, _ in self._windowed:
                    if node.pages[group] < 0:
                        gapless_from[group] = index + 1
        pages: list[Pages] = []
        for node in path[:best]:
            if node.start:
                pages.pop()  # the deeper node's page contains these tokens too
            pages.append(node.pages)
        firsts = [0 if window is None else self._first(length, window) for window in self.windows]
        for index in range(min(len(pages), max(firsts, default=0))):
            entries = zip(pages[index], firsts, strict=True)
            pages[index] = tuple(page if index >= first else NO_PAGE for page, first in entries)
        self.pool.retain(page for some in pages for page in _present(some))
        return Match(length, pages)

    def insert(self, tokens: Sequence[int], pages: Sequence[Pages], salt: str = "") -> None:
        """Add what is missing. The last page may be partly filled. The caller keeps its own references."""
        tokens = _salted(tokens, salt)
        size = self.pool.page_size
        if len(pages) != -(-len(tokens) // size):
            raise ValueError(f"{len(tokens)} tokens need {-(-len(tokens) // size)} pages, not {len(pages)}")
        groups = len(self.windows)
        if any(len(some) != groups for some in pages) or any(some[group] < 0 for group in self._full for some in pages):
            raise ValueError("every group of layers needs a page; only a group with a window may have NO_PAGE")
        self._clock += 1
        node, at, path = self._root, 0, list[tuple[_Node, int]]()  # nodes and their end positions
        while at < len(tokens):
            own = pages[at // size]
            rest = tokens[at : at - at % size + size]
            child = node.children.get(tokens[at])
            if child is not None:
                common = _common(child.tokens, rest)
                both = child.pages
                if NO_PAGE in both:  # the caller may still hold the missing page
                    both = tuple(own[group] if page < 0 else page for group, page in enumerate(both))
                if common < len(child.tokens) and (both != child.pages or at + common < len(tokens)):
                    child = self._split(child, common)
                if both != child.pages:
                    self._replace(child, both)
            elif 0 < node.stop < size and not node.children:
                # The last node of a sequence that has grown: extend it. It is on the path already.
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
            self._enqueue(path)

    def _enqueue(self, path: list[tuple[_Node, int]]) -> None:
        """After an insert, queue its leaf, and the nodes that are now outside the windows of the leaf's end."""
        last, end = path[-1]
        if not last.children:
            self._leaves.push(last)
            end -= self._narrowest
        for node, stop in path:
            if stop <= end and any(node.pages[group] >= 0 for group, _ in self._windowed):
                self._window_evictable.push(node)

    def evict(self, count: int) -> None:
        """Release pages that no sequence holds, until `count` more pages are free or none is left to release."""
        goal = self.pool.num_free_pages + count
        pinned: list[tuple[_Queue, _Node]] = []
        while self.pool.num_free_pages < goal:
            if not (
                self._evict_window_pages(pinned, TRIES)
                or self._drop(pinned)
                or self._evict_window_pages(pinned, len(self._window_evictable))
                or self._evict_pinned_window_pages(pinned)
                or self._share_descendant_page(pinned)
            ):
                break
        self._clock += 1
        for queue, node in pinned:
            node.last_used = self._clock
            queue.push(node)

    def pages_in_use(self) -> np.ndarray[Any, Any]:
        """Pages that sequences hold. From any thread."""
        return (self.pool.ref_counts > self._ref_counts).nonzero()[0]

    def clear(self) -> None:
        """Release all pages."""
        for node in self._nodes():
            self.pool.release(_present(node.pages))
            node.parent = None
        self._reset()

    def check(self) -> Counter[int]:
        """Assert all invariants, for tests. Returns the number of nodes that hold each page."""
        held: Counter[int] = Counter()
        nodes = list(self._nodes())
        assert len(nodes) == self._size
        for node in nodes:
            assert node.parent is not None
            assert node.tokens
            assert node.parent.children[node.tokens[0]] is node
            assert node.start == node.parent.stop % self.pool.page_size
            assert node.stop <= self.pool.page_size
            assert len(node.pages) == len(self.windows)
            assert all(node.pages[group] >= 0 for group in self._full)
            assert all(child.parent is node for child in node.children.values())
            assert node.last_used <= self._clock
            assert node.children or node in self._leaves
            assert node in self._window_evictable or not self._unneeded_groups(node)
            held.update(_present(node.pages))
        assert held == {page: self._ref_counts[page] for page in self._ref_counts.nonzero()[0]}
        assert all(self.pool.ref_counts[page] >= times for page, times in held.items())
        return held

    def _first(self, length: int, window: int) -> int:
        """The entry of the first page that a window needs after this many tokens."""
        low = max(0, length - window + 1)
        return (low if low < length else length + self.pool.page_size - 1) // self.pool.page_size

    def _split(self, node: _Node, at: int) -> _Node:
        """Split a node's first tokens off into a parent with the same pages."""
        assert node.parent is not None
        upper = _Node(node.parent, node.tokens[:at], node.start, node.pages, node.last_used)
        self._hold(upper.pages)
        self._size += 1
        node.parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.start = upper, node.tokens[at:], upper.stop
        upper.children[node.tokens[0]] = node
        return upper

    def _unneeded_groups(self, node: _Node) -> list[int]:
        """Groups whose page no hit is likely to need: a window's positions after the node have no fork.

        One more position than the window: a repeated prompt matches without its last token, which is recomputed.
        """
        ahead, last = 0, node
        while ahead < self._widest and len(last.children) == 1:
            [last] = last.children.values()
            ahead += len(last.tokens)
        return [group for group, window in self._windowed if window <= ahead and node.pages[group] >= 0]

    def _evict_window_pages(self, pinned: list[tuple[_Queue, _Node]], tries: int) -> bool:
        """Release a node's pages that no hit is likely to need. tries: how many nodes in use to skip at most."""
        while tries > 0 and (node := self._window_evictable.pop()) is not None:
            unneeded = self._unneeded_groups(node)
            idle = [group for group in unneeded if not self._in_use(node.pages[group])]
            if len(idle) < len(unneeded):
                pinned.append((self._window_evictable, node))
                tries -= 1
            if idle:
                self._replace(node, tuple(NO_PAGE if group in idle else page for group, page in enumerate(node.pages)))
                return True
        return False

    def _drop(self, pinned: list[tuple[_Queue, _Node]]) -> bool:
        """Remove a leaf."""
        while (node := self._leaves.pop()) is not None:
            if node.children:
                continue
            if any(self._in_use(page) for page in _present(node.pages)):
                pinned.append((self._leaves, node))
                continue
            assert node.parent is not None
            parent, node.parent = node.parent, None
            del parent.children[node.tokens[0]]
            self._release(node.pages)
            self._size -= 1
            if parent is not self._root and not parent.children:
                self._leaves.push(parent)
            # This may have been a fork: nodes before it may be outside all windows now.
            ahead = 0
            while parent.parent is not None and len(parent.children) == 1 and ahead < self._widest:
                self._window_evictable.push(parent)
                ahead += len(parent.tokens)
                parent = parent.parent
            return True
        return False

    def _evict_pinned_window_pages(self, pinned: list[tuple[_Queue, _Node]]) -> bool:
        """Release unused window pages of a node whose other pages are in use."""
        for _, node in pinned:
            idle = [g for g, _ in self._windowed if node.pages[g] >= 0 and not self._in_use(node.pages[g])]
            if idle:
                self._replace(node, tuple(NO_PAGE if group in idle else page for group, page in enumerate(node.pages)))
                return True
        return False

    def _share_descendant_page(self, pinned: list[tuple[_Queue, _Node]]) -> bool:
        """Replace a node's page by the page of its descendant that is in use and contains its tokens too."""
        for _, node in pinned:
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
        return bool(self.pool.ref_counts[page] > self._ref_counts[page])

    def _replace(self, node: _Node, pages: Pages) -> None:
        self._hold(pages)
        self._release(node.pages)
        node.pages = pages

    def _hold(self, pages: Pages) -> None:
        self.pool.retain(_present(pages))
        for page in _present(pages):
            self._ref_counts[page] += 1

    def _release(self, pages: Pages) -> None:
        self.pool.release(_present(pages))
        for page in _present(pages):
            self._ref_counts[page] -= 1

    def _nodes(self) -> Iterator[_Node]:
        rest = list(self._root.children.values())
        while rest:
            node = rest.pop()
            rest.extend(node.children.values())
            yield node


def _weak(method: Callable[[int], None]) -> Callable[[int], None]:
    """Calls the method without keeping its index alive: the pool must be freed with its last user."""
    reference = WeakMethod(method)

    def call(count: int) -> None:
        if (own := reference()) is not None:
            own(count)

    return call


def _present(pages: Pages) -> Pages:
    return pages if NO_PAGE not in pages else tuple(page for page in pages if page >= 0)


def _salted(tokens: Sequence[Any], salt: str) -> tuple[Any, ...]:
    """With a salt, the first token is of another kind, and with it the whole branch."""
    return ((salt, tokens[0]), *tokens[1:]) if salt and len(tokens) else tuple(tokens)


def _common(run: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """The length of the common prefix."""
    length = min(len(run), len(tokens))
    if run[:length] == tokens[:length]:
        return length
    return next(i for i in range(length) if run[i] != tokens[i])
