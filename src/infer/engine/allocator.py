"""KV allocators: the memory for the caches of running sequences."""

from __future__ import annotations

from collections import Counter

from infer.cache.base import Cache, NoCache, unwrap
from infer.cache.paged import PagedCache
from infer.cache.pool import OutOfPages, pages_for
from infer.engine.memory import CacheMemory
from infer.engine.runner import Runner
from infer.engine.sequence import Sequence, Status
from infer.engine.store import page_keys


class BaseAllocator:
    """What the two allocators have in common. By default sequences share nothing and need nothing."""

    checked_version = False  # of the model, in this step

    def __init__(self, runner: Runner, context: int) -> None:
        self._runner, self._context = runner, context
        self.num_lookahead_slots = runner.num_lookahead_slots

    def check(self, sequence: Sequence) -> None:
        """Refuse a sequence that the memory could not hold if all of it were free."""

    def submit(self, sequence: Sequence) -> None:
        """Prepare a sequence that was queued."""

    def publish(self, sequence: Sequence) -> None:
        """Share the computed pages of a prompt with other sequences."""

    def cancel_wait(self, sequence: Sequence) -> None:
        """A finished sequence waits for no page."""

    def switch_to_recompute(self, sequence: Sequence) -> None:
        """The context is used up: from now on every token moves to another position, so nothing cached is valid.

        Each step computes the last tokens that fit again.
        """
        self.free(sequence)
        sequence.cache, sequence.recompute_tokens = sequence.wrap(NoCache(1, self._runner.device)), self._context
        sequence.num_computed_tokens = sequence.num_prefill_tokens = 0

    def free(self, sequence: Sequence) -> None:
        self._runner.remove(sequence)

    def _start(self, sequence: Sequence, cache: Cache) -> None:
        """Let a sequence continue after the tokens that the cache holds."""
        sequence.cache, sequence.num_computed_tokens = sequence.wrap(cache), cache.seq_len
        sequence.capacity = min(cache.capacity, self._context)
        sequence.num_prefill_tokens = sequence.num_tokens

    def _reserve(self, sequence: Sequence, cache: Cache, n: int) -> None:
        self._runner.sync(sequence)
        slots = min(n + self.num_lookahead_slots, cache.capacity - cache.seq_len)
        sequence.num_reserved_slots = cache.reserve(slots)


class PerSequenceCaches(BaseAllocator):
    """The caller provides the cache of each sequence, and keeps it."""

    def allocate(self, sequence: Sequence) -> bool:
        self._runner.recheck_model()
        assert sequence.cache is not None
        capacity = min(sequence.cache.capacity, self._context)
        if isinstance(sequence.cache, NoCache) or sequence.num_tokens > capacity:
            self.switch_to_recompute(sequence)
        else:
            self._start(sequence, sequence.cache)
        return True

    def reserve(self, sequence: Sequence, n: int) -> bool:
        """A cache that is too small says so itself."""
        assert sequence.cache is not None
        self._reserve(sequence, sequence.cache, n)
        return True

    def can_grow(self, count: int) -> bool:
        return True


class PagedAllocator(BaseAllocator):
    """Caches of pages from one pool, with prefix caching.

    Sequences whose prompts share a prefix compute it once: the others wait for its pages.
    """

    def __init__(self, memory: CacheMemory, runner: Runner, context: int, prefill_chunk: int) -> None:
        super().__init__(runner, context)
        self.memory, self._prefill_chunk = memory, prefill_chunk
        self._computing: Counter[str] = Counter()  # hashes of prompt pages that running sequences will compute
        self._waiting: Counter[str] = Counter()  # sequences that wait for one, by the hash of their prompt

    def check(self, sequence: Sequence) -> None:
        check_memory(self.memory, min(sequence.max_len, self._context), self._prefill_chunk)

    def submit(self, sequence: Sequence) -> None:
        if sequence.num_tokens > self._context:
            sequence.recompute_tokens = self._context
        else:
            pages = page_keys(sequence.cache_salt, sequence.prompt, self.memory.pool.page_size)
            sequence.page_hashes = [*pages, f"prompt {hash((sequence.cache_salt, *sequence.prompt))}"]

    def allocate(self, sequence: Sequence) -> bool:
        if not self.checked_version:
            self.memory.check_version()
            self.checked_version = True
        if sequence.recompute_tokens:
            self.switch_to_recompute(sequence)
            return True
        if sequence.awaited_page in self._computing:
            return False
        self._wait_for(sequence, "")
        hashes, cache = sequence.page_hashes, self.memory.cache(sequence.max_len)
        cache.salt = sequence.cache_salt
        scored = sequence.num_scored_prompt_tokens  # log-probabilities of those after them need computed tokens
        self.memory.attach_prefix(cache, sequence.token_ids[:scored])
        published = cache.seq_len // self.memory.pool.page_size
        if cache.seq_len == sequence.num_tokens - 1:
            published = len(hashes)  # every sequence computes its own last token
        elif scored is None and published < len(hashes) and hashes[published] in self._computing:
            self._wait_for(sequence, hashes[published])
            cache.reset()
            return False
        sequence.num_published_pages = published
        self._computing.update(hashes[published:])
        self._start(sequence, cache)
        return True

    def reserve(self, sequence: Sequence, n: int) -> bool:
        try:
            self._reserve(sequence, _paged(sequence), n)
        except OutOfPages:
            return False
        return True

    def can_grow(self, count: int) -> bool:
        try:
            self.memory.pool.ensure_free(count * len(self.memory.index.windows))
        except OutOfPages:
            return False
        return True

    def publish(self, sequence: Sequence) -> None:
        cache = _paged(sequence)
        if sequence.num_tokens - cache.seq_len > 1:
            self.memory.keep(cache, last_page=False)
            self._mark_computed(sequence, cache.seq_len // self.memory.pool.page_size)
            return
        # The last page may be incomplete: it is shared only if a sequence waits for it.
        self.memory.keep(cache, last_page=sequence.page_hashes[-1] in self._waiting)
        sequence.num_reserved_slots = 0  # a page that others hold is copied before the next token
        self._mark_computed(sequence, None)

    def free(self, sequence: Sequence) -> None:
        """What its pages hold stays in the prefix index."""
        super().free(sequence)
        if not sequence.recompute_tokens and sequence.cache is not None:
            cache = _paged(sequence)
            self._mark_computed(sequence, None)
            sequence.cache_bytes = cache.memory_bytes
            if sequence.error is None and sequence.status is Status.RUNNING:  # else it has computed nothing
                self.memory.keep(cache)
            cache.reset()
        sequence.cache, sequence.num_reserved_slots, sequence.num_prefill_tokens = None, 0, 0

    def cancel_wait(self, sequence: Sequence) -> None:
        self._wait_for(sequence, "")

    def _mark_computed(self, sequence: Sequence, count: int | None) -> None:
        """Its first `count` pages are computed (None: all): sequences that wait for them may run."""
        pages = sequence.page_hashes[sequence.num_published_pages : count]
        self._computing.subtract(pages)
        for page in pages:
            if not self._computing[page]:
                del self._computing[page]
        sequence.num_published_pages += len(pages)

    def _wait_for(self, sequence: Sequence, page: str) -> None:
        if page != sequence.awaited_page:
            prompt = sequence.page_hashes[-1]
            self._waiting[prompt] += bool(page) - bool(sequence.awaited_page)
            if not self._waiting[prompt]:
                del self._waiting[prompt]
            sequence.awaited_page = page


def check_memory(memory: CacheMemory, length: int, prefill_chunk: int) -> None:
    """Refuse more positions than all pages hold. A page that is shared may have to be copied: one more per group."""
    pool = memory.pool
    pages = pages_for(memory.model.config, length, pool.page_size, min(prefill_chunk, length)) + len(
        memory.index.windows
    )
    if pages > pool.num_pages:
        raise OutOfPages(
            f"{length} positions take {pages * pool.page_bytes / 1e6:.1f} MB, but the memory for caches has "
            f"{pool.memory_bytes / 1e6:.1f}: ask for fewer positions, or give caches more memory"
        )


def _paged(sequence: Sequence) -> PagedCache:
    assert sequence.cache is not None
    cache = unwrap(sequence.cache)
    assert isinstance(cache, PagedCache)
    return cache
