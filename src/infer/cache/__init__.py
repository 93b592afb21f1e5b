"""Key/value caches. `base` states the protocol; each other module is one way to store."""

from infer.cache.base import BaseCache, Cache, NoCache
from infer.cache.contiguous import KVCache
from infer.cache.growing import GrowingCache
from infer.cache.paged import PagedCache
from infer.cache.pool import PagePool
from infer.cache.ring import SlidingCache
from infer.cache.traced import TracedCache

__all__ = [
    "BaseCache",
    "Cache",
    "GrowingCache",
    "KVCache",
    "NoCache",
    "PagePool",
    "PagedCache",
    "SlidingCache",
    "TracedCache",
]
