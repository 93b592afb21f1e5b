"""The memory of all caches of a model: pages, the tokens that they hold, and a folder for them where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from infer.backend import ModelVersion
from infer.backend.fingerprint import fingerprint
from infer.cache.base import first_visible
from infer.cache.paged import PagedCache
from infer.cache.pool import NO_PAGE, PAGE_SIZE, OutOfPages, PagePool, bytes_for, layer_groups, pages_for
from infer.cache.prefix import PrefixIndex
from infer.cache.ring import PREFILL_CHUNK
from infer.config import ModelConfig
from infer.engine.model import Model, cache_dtype_of, keep_prefix, model_device, reset_if_outdated
from infer.engine.store import PrefixStore, page_keys
from infer.machine import available_memory
from infer.models.common import Decoder
from infer.parallel.tensor_parallel import ShardedPool
from infer.values import BYTES, MODEL, takes

# Without a size, caches take this part of the free memory, and no more than this many sequences of this length need.
DEFAULT_MEMORY_FRACTION, DEFAULT_MAX_SEQUENCES, DEFAULT_SEQUENCE_LEN = 0.5, 256, 8192
MIN_STORED_PAGES = 4  # full pages of a prompt: shorter ones are not worth a place in the store


class CacheMemory:
    """Owns the page pool and the prefix index, and makes caches whose common prefixes share pages.

    For one thread at a time.
    """

    @takes(model=MODEL, size=BYTES)
    def __init__(
        self,
        model: Model,
        size: int | None = None,
        *,
        cache_dtype: str = "auto",
        store: str | Path | PrefixStore | None = None,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """size: in bytes; None: half of what is free, or what 256 long conversations take.

        store: a folder in which pages of long prompts outlive this process.
        """
        dtype, device = cache_dtype_of(model, cache_dtype), model_device(model)
        group = model.group if isinstance(model, Decoder) else None
        if size is None:
            size = default_size(model, cache_dtype, page_size)
        self.model = model
        if group is not None and isinstance(model, Decoder):
            self.pool: PagePool = ShardedPool.of(model, size, dtype, page_size)
        else:
            self.pool = PagePool.for_model(model.config, size, dtype=dtype, device=device, page_size=page_size)
        self.windows = model.config.windows
        self.index = PrefixIndex(self.pool, [group.window for group in layer_groups(self.windows)])
        self.store = PrefixStore(store) if isinstance(store, str | Path) else store
        self._embedding = model.embed_tokens if isinstance(model, Decoder) else None
        self._model_version = ModelVersion(model)
        self.version = self._model_version.number()  # of the model, when it was last checked
        self._key: str | None = None

    def check_version(self) -> None:
        """Forget all pages if the model has changed. Caches in use keep theirs, but no longer share them."""
        if (version := self._model_version.number()) != self.version:
            self.version, self._key = version, None
            self.index.clear()

    @property
    def key(self) -> str:
        """Names all that pages depend on beside their tokens."""
        self.check_version()
        if self._key is None:
            model, pool = self.model, self.pool
            named = pool.fingerprint(model) if isinstance(pool, ShardedPool) else fingerprint(model)
            self._key = f"{named} {pool.dtype} {pool.page_size}"
        return self._key

    def cache(self, max_seq_len: int) -> PagedCache:
        """An empty one, which takes pages as it grows."""
        cache = PagedCache(self.pool, min(max_seq_len, self.model.config.max_position_embeddings), self.windows)
        cache.on_window_release, cache.contents.version = partial(self.keep, last_page=False), self.version
        return cache

    def attach_prefix(self, cache: PagedCache, prompt: Sequence[int]) -> int:
        """Let a cache hold as much of a prompt as is known, less at least one token; returns how many.

        What the cache held of it is kept, and so is what others have: in memory, or in the store. If the model may have
        changed, call `check_version` first.
        """
        reset_if_outdated(cache, self.version)
        keep_prefix(cache, list(prompt))
        tokens = list(prompt[:-1][: cache.capacity])
        if self.store is not None:
            self._load(self.store, tokens, cache.salt)
        found = self.index.match(tokens, cache.salt)
        if found.length > cache.seq_len:
            cache.reset()
            cache.adopt(found.pages, tokens[: found.length], self._embedding)
        else:
            self._release(found.pages)
        return cache.seq_len

    def keep(self, cache: PagedCache, *, last_page: bool = True) -> None:
        """Remember what a cache holds, for others and for later.

        last_page: False leaves an incomplete page out: a cache that is written to would have to copy what others hold.
        """
        page, pages, salt = self.pool.page_size, cache.filled_pages(), cache.salt
        tokens = self._tokens(cache)
        full = len(tokens) // page
        if not last_page:
            tokens, pages = tokens[: full * page], pages[:full]
        if not tokens:
            return
        self.index.insert(tokens, pages, salt)
        if self.store is not None and full >= MIN_STORED_PAGES:
            # In reverse, so that LRU eviction removes the last page first.
            for key, some in reversed(list(zip(self._page_keys(tokens, salt), pages, strict=False))):
                groups = [group for group, number in enumerate(some) if number >= 0]
                if not self.store.has(key, len(groups)):
                    self.store.save(key, groups, self.pool.read([some[group] for group in groups]))

    def pages_of(self, tokens: Sequence[int]) -> set[int]:
        """The pages in memory that hold a prefix of these tokens."""
        pages = self.index.match(tokens).pages
        self._release(pages)
        return {page for some in pages for page in some if page >= 0}

    def dump(self, cache: PagedCache) -> dict[str, Tensor]:
        """What a cache holds, for `restore`, perhaps in another process.

        pages: those with filled positions; numbers: [pages, groups], which of them, NO_PAGE where a window is past.
        """
        tokens = cache.contents.tokens(cache.seq_len)
        if tokens is None:
            raise ValueError("the cache was filled by hand: its tokens are unknown")
        filled = torch.tensor(cache.filled_pages(), dtype=torch.int64).reshape(-1, len(cache.groups))
        there = filled != NO_PAGE
        numbers = torch.full_like(filled, NO_PAGE)
        numbers[there] = torch.arange(int(there.sum()))
        pages = self.pool.read(filled[there].tolist()).cpu()
        if used := cache.seq_len % self.pool.page_size:  # without what other sequences left in the page
            last = numbers[-1][numbers[-1] != NO_PAGE]
            pages[last, :, :, :, used:] = 0
        return {"tokens": torch.tensor(tokens, dtype=torch.int64), "pages": pages, "numbers": numbers}

    def restore(self, cache: PagedCache, dumped: Mapping[str, Tensor]) -> None:
        """Let a cache hold what `dump` returned. Invalid tensors are refused before any page is allocated."""
        tokens = self._checked(cache, dumped)
        new = self.pool.allocate(len(dumped["pages"]))
        self.pool.write(new, dumped["pages"])
        numbers = [tuple(NO_PAGE if i == NO_PAGE else new[i] for i in some) for some in dumped["numbers"].tolist()]
        cache.reset()
        cache.adopt(numbers, tokens, self._embedding)
        self.keep(cache)

    def _checked(self, cache: PagedCache, dumped: Mapping[str, Tensor]) -> list[int]:
        tokens, pages, numbers = dumped["tokens"], dumped["pages"], dumped["numbers"]
        vocabulary, page = self.model.config.vocab_size, self.pool.page_size
        if tokens.dtype is not torch.int64 or tokens.dim() != 1 or not 0 <= len(tokens) <= cache.capacity:
            raise ValueError(f"the token ids must be a 1-D int64 tensor of at most {cache.capacity}")
        ids = tokens.tolist()
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError("a token id is outside the vocabulary")
        if numbers.dtype is not torch.int64 or numbers.shape != (-(-len(ids) // page), len(cache.groups)):
            raise ValueError("the number of pages does not match the number of tokens")
        there = numbers[numbers != NO_PAGE].tolist()
        if (
            there != list(range(len(there)))
            or pages.shape != (len(there), *self.pool.page_shape)
            or pages.dtype is not self.pool.dtype
        ):
            raise ValueError("its pages do not fit this model")
        for i, group in enumerate(cache.groups):
            missing = (numbers[:, i] == NO_PAGE).nonzero().flatten().tolist()
            first = first_visible(len(ids), group.window)  # a window of one position needs none of these
            if missing and first < len(ids) and missing[-1] >= first // page:
                raise ValueError("some of its pages are missing")
        return ids

    def max_sequences(self, length: int) -> int:
        """How many of this many tokens fit, if they have nothing in common."""
        return self.pool.num_pages // pages_for(self.model.config, length, self.pool.page_size)

    def _tokens(self, cache: PagedCache) -> list[int]:
        """Empty if they are unknown, or another model computed them, or this one before it has changed."""
        if self.store is not None:
            self.check_version()  # stored pages outlive this process: check before every write
        known = self._embedding is None or cache.contents.is_from(self._embedding)
        known = known and cache.contents.version == self.version
        return (cache.contents.tokens(cache.seq_len) or []) if known else []

    def _load(self, store: PrefixStore, tokens: Sequence[int], salt: str) -> None:
        """Bring pages back from the store that are not in memory."""
        keys = self._page_keys(tokens, salt)  # first: it forgets the pages of a model that has changed
        found = self.index.match(tokens, salt)
        first = found.length // self.pool.page_size
        numbers = [*found.pages[:first]]
        taken: list[int] = []
        for key in keys[first:]:
            stored = store.load(key, self.pool.page_shape, self.pool.dtype)
            if stored is None:
                break
            groups, pages = stored
            try:
                new = self.pool.allocate(len(groups))
            except OutOfPages:
                break
            taken += new
            self.pool.write(new, pages)
            by_group = dict(zip(groups, new, strict=True))
            numbers.append(tuple(by_group.get(group, -1) for group in range(len(self.index.windows))))
            if any(window is None and numbers[-1][i] < 0 for i, window in enumerate(self.index.windows)):
                numbers.pop()
                break
        if len(numbers) > first:
            self.index.insert(tokens[: len(numbers) * self.pool.page_size], numbers, salt)
            store.touch(keys[: len(numbers)])
        self.pool.release(taken)
        self._release(found.pages)

    def _page_keys(self, tokens: Sequence[int], salt: str) -> list[str]:
        return page_keys(f"{self.key} {salt}" if salt else self.key, tokens, self.pool.page_size)

    def _release(self, pages: Sequence[tuple[int, ...]]) -> None:
        self.pool.release(page for some in pages for page in some if page >= 0)


def default_size(model: Model, cache_dtype: str = "auto", page_size: int = PAGE_SIZE) -> int:
    """Half of what is free, or what 256 long conversations take."""
    device, group = model_device(model), model.group if isinstance(model, Decoder) else None
    free = available_memory(device, 1 if group is None else group.sharing, release=True)
    if free is None:
        raise ValueError(f"{device} does not report its free memory: set the memory for caches (cache_memory)")
    item = cache_dtype_of(model, cache_dtype).itemsize
    needed = DEFAULT_MAX_SEQUENCES * bytes_for(model.config, DEFAULT_SEQUENCE_LEN, item, page_size)
    return min(int(free * DEFAULT_MEMORY_FRACTION), needed)


def pass_tokens(config: ModelConfig, prefill_chunk: int | None) -> int | None:
    """Prompt tokens of one pass; None: all. Layers with windows would hold pages of all of them meanwhile."""
    return prefill_chunk or (PREFILL_CHUNK if config.has_windows else None)
