"""Memory cache of raw shard blocks."""

from .blocks import BlockCache, CacheStats
from .policy import Lru, Policy

__all__ = ["BlockCache", "CacheStats", "Lru", "Policy"]
