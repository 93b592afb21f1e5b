"""The memory of all caches of a model: pages, the tokens that they hold, and a folder for them where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infer.backend.fingerprint import fingerprint
from infer.cache.base import first_seen, resolve_cache_dtype
from infer.cache.paged import NONE, PagedCache
from infer.cache.pool import PAGE, NoPages, PagePool, bytes_for, layer_groups, pages_for
from infer.cache.prefix import PrefixIndex
from infer.cache.ring import PREFILL_CHUNK
from infer.config import ModelConfig
from infer.engine.caches import keep_prefix
from infer.engine.model import Model, model_device, model_dtype
from infer.engine.store import PrefixStore, page_keys
from infer.machine import available_memory
from infer.models.common import Decoder
from infer.parallel.pages import SplitPool
from infer.values import BYTES, MODEL, takes

SHARE = 0.5  # of the memory that is free, for caches
MANY, LENGTH = 256, 8192  # conversations, and their tokens: more are not kept unless somebody says so
LONG = 4  # pages from which on a prompt is worth a place in the store


class CacheMemory:
    """Makes caches that share what they have in common, and remembers what caches have held.

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
        page: int = PAGE,
    ) -> None:
        """size: in bytes; None: half of what is free, or what 256 long conversations take.

        store: a folder in which pages of long prompts outlive this process.
        """
        dtype, device = resolve_cache_dtype(cache_dtype, model_dtype(model) or torch.float32), model_device(model)
        if size is None:
            free = available_memory(device, _sharing(model))
            if free is None:
                raise ValueError(f"{device} does not say how much memory is free: say how much caches may take")
            size = min(int(free * SHARE), MANY * bytes_for(model.config, LENGTH, dtype.itemsize, page))
        self.model = model
        if isinstance(model, Decoder) and model.group is not None:
            self.pool: PagePool = SplitPool.of(model, size, dtype, page)
        else:
            self.pool = PagePool.for_model(model.config, size, dtype=dtype, device=device, page=page)
        self.windows = [model.config.window(i) for i in range(model.config.num_hidden_layers)]
        self.index = PrefixIndex(self.pool, [group.window for group in layer_groups(self.windows)])
        self.store = PrefixStore(store) if isinstance(store, str | Path) else store
        self._embedding = model.embed_tokens if isinstance(model, Decoder) else None
        self._key: str | None = None

    @property
    def key(self) -> str:
        """Names all that pages depend on beside their tokens."""
        if self._key is None:
            model, pool = self.model, self.pool
            named = pool.fingerprint(model) if isinstance(pool, SplitPool) else fingerprint(model)
            self._key = f"{named} {pool.dtype} {pool.page}"
        return self._key

    def cache(self, max_seq_len: int) -> PagedCache:
        """An empty one, which takes pages as it grows."""
        cache = PagedCache(self.pool, min(max_seq_len, self.model.config.max_position_embeddings), self.windows)
        cache.before_drop = self.keep_prompt
        return cache

    def recall(self, cache: PagedCache, prompt: Sequence[int]) -> int:
        """Let a cache hold as much of a prompt as is known, less at least one token; returns how many.

        What the cache held of it is kept, and so is what others have: in memory, or in the store.
        """
        keep_prefix(cache, prompt)
        wanted = list(prompt[:-1][: cache.capacity])
        if self.store is not None:
            self._load(self.store, wanted)
        found = self.index.match(wanted)
        if found.length > cache.seq_len:
            self.adopt(cache, found.pages, wanted[: found.length])
        else:
            self._release(found.pages)
        return cache.seq_len

    def adopt(self, cache: PagedCache, pages: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> None:
        """Let a cache go on behind tokens whose pages the caller holds, and hands over."""
        cache.reset()
        cache.adopt(pages, tokens, self._embedding)

    def keep(self, cache: PagedCache) -> None:
        """Remember what a cache holds, for others and for later."""
        tokens = self._tokens(cache)
        if tokens:
            self._insert(tokens, cache.filled_pages())

    def dump(self, cache: PagedCache) -> dict[str, Tensor]:
        """What a cache holds, for `restore`, perhaps in another process.

        pages: those with filled positions; numbers: [pages, groups], which of them, NONE where a window is past.
        """
        tokens = cache.contents.tokens(cache.seq_len)
        if tokens is None:
            raise ValueError("the cache was filled by hand: nobody knows which tokens it holds")
        filled = torch.tensor(cache.filled_pages(), dtype=torch.int64).reshape(-1, len(cache.groups))
        there = filled != NONE
        numbers = torch.full_like(filled, NONE)
        numbers[there] = torch.arange(int(there.sum()))
        pages = self.pool.read(filled[there].tolist()).cpu()
        if used := cache.seq_len % self.pool.page:  # what others have left behind the end is nobody's business
            last = numbers[-1][numbers[-1] != NONE]
            pages[last, :, :, :, used:] = 0
        return {"tokens": torch.tensor(tokens, dtype=torch.int64), "pages": pages, "numbers": numbers}

    def restore(self, cache: PagedCache, dumped: Mapping[str, Tensor]) -> None:
        """Let a cache hold what another held. What `dump` would not have given is refused, and nothing taken."""
        tokens = self._checked(cache, dumped)
        new = self.pool.take(len(dumped["pages"]))
        self.pool.write(new, dumped["pages"])
        numbers = [tuple(NONE if i == NONE else new[i] for i in some) for some in dumped["numbers"].tolist()]
        self.adopt(cache, numbers, tokens)
        self.keep(cache)

    def _checked(self, cache: PagedCache, dumped: Mapping[str, Tensor]) -> list[int]:
        tokens, pages, numbers = dumped["tokens"], dumped["pages"], dumped["numbers"]
        vocabulary, page = self.model.config.vocab_size, self.pool.page
        if tokens.dtype is not torch.int64 or tokens.dim() != 1 or not 0 <= len(tokens) <= cache.capacity:
            raise ValueError("its tokens are none, or too many")
        ids = tokens.tolist()
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError("its tokens are not this model's")
        if numbers.dtype is not torch.int64 or numbers.shape != (-(-len(ids) // page), len(cache.groups)):
            raise ValueError("its pages are not those of its tokens")
        there = numbers[numbers != NONE].tolist()
        if (
            there != list(range(len(there)))
            or pages.shape != (len(there), *self.pool.page_shape)
            or pages.dtype is not self.pool.dtype
        ):
            raise ValueError("its pages do not fit this model")
        for i, group in enumerate(cache.groups):
            missing = (numbers[:, i] == NONE).nonzero().flatten().tolist()
            first = first_seen(len(ids), group.window)  # a window of one position needs none of these
            if missing and first < len(ids) and missing[-1] >= first // page:
                raise ValueError("some of its pages are missing")
        return ids

    def conversations(self, length: int) -> int:
        """How many of so many tokens fit, if they have nothing in common."""
        return self.pool.count // pages_for(self.model.config, length, self.pool.page)

    def keep_prompt(self, cache: PagedCache) -> None:
        """As `keep`, without the last page: the cache is being written to, and would have to copy what others hold."""
        whole = cache.seq_len // self.pool.page
        tokens = self._tokens(cache)[: whole * self.pool.page]
        if tokens:
            self._insert(tokens, cache.filled_pages()[:whole])

    def _tokens(self, cache: PagedCache) -> list[int]:
        """None where nobody knows, or another model computed them."""
        known = self._embedding is None or cache.contents.is_of(self._embedding)
        return (cache.contents.tokens(cache.seq_len) or []) if known else []

    def _insert(self, tokens: Sequence[int], pages: Sequence[tuple[int, ...]]) -> None:
        self.index.insert(tokens, pages)
        whole = len(tokens) // self.pool.page
        if self.store is not None and whole >= LONG:
            keys = page_keys(self.key, tokens, self.pool.page)
            for key, some in reversed(list(zip(keys, pages, strict=False))):  # the first is to be the last that goes
                groups = [group for group, page in enumerate(some) if page >= 0]
                if not self.store.has(key, len(groups)):
                    self.store.save(key, groups, self.pool.read([some[group] for group in groups]))

    def _load(self, store: PrefixStore, tokens: Sequence[int]) -> None:
        """Bring pages back from the store that are not in memory."""
        found = self.index.match(tokens)
        first = found.length // self.pool.page
        numbers = [*found.pages[:first]]
        taken: list[int] = []
        keys = page_keys(self.key, tokens, self.pool.page)
        for key in keys[first:]:
            stored = store.load(key, self.pool.page_shape, self.pool.dtype)
            if stored is None:
                break
            groups, pages = stored
            try:
                new = self.pool.take(len(groups))
            except NoPages:
                break
            taken += new
            self.pool.write(new, pages)
            by_group = dict(zip(groups, new, strict=True))
            numbers.append(tuple(by_group.get(group, -1) for group in range(len(self.index.windows))))
            if any(window is None and numbers[-1][i] < 0 for i, window in enumerate(self.index.windows)):
                numbers.pop()
                break
        if len(numbers) > first:
            self.index.insert(tokens[: len(numbers) * self.pool.page], numbers)
            store.touch(keys[: len(numbers)])
        self.pool.release(taken)
        self._release(found.pages)

    def _release(self, pages: Sequence[tuple[int, ...]]) -> None:
        self.pool.release(page for some in pages for page in some if page >= 0)


def _sharing(model: Model) -> int:
    """How many processes take memory where this one does."""
    return 1 if not isinstance(model, Decoder) or model.group is None else model.group.sharing


def pass_tokens(config: ModelConfig, prefill_chunk: int | None) -> int | None:
    """Tokens of a pass: None for all of a prompt, unless windows would have to hold pages of all of it meanwhile."""
    return prefill_chunk or (PREFILL_CHUNK if config.has_windows else None)
