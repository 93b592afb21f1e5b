"""Key/value caches. `base` states the protocol; each other module is one way to store."""

from infer.cache.base import BaseCache, Cache, NoCache
from infer.cache.batch import BatchCache
from infer.cache.growing import GrowingCache
from infer.cache.simple import KVCache
from infer.cache.sliding import SlidingCache
from infer.cache.traced import TracedCache

__all__ = ["BaseCache", "BatchCache", "Cache", "GrowingCache", "KVCache", "NoCache", "SlidingCache", "TracedCache"]
