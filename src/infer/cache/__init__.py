"""Key/value caches. `base` states the protocol; each other module is one way to store."""

from infer.cache.base import BaseCache, Cache, NoCache
from infer.cache.growing import GrowingCache
from infer.cache.simple import KVCache

__all__ = ["BaseCache", "Cache", "GrowingCache", "KVCache", "NoCache"]
