"""Numbers drawn by a counter: each depends on its key alone, not on what was drawn before."""

from __future__ import annotations

U64 = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) keyed by (seed, position): splitmix64's finaliser over both."""
    bits = mix((mix(seed & U64) + position * 0x9E3779B97F4A7C15) & U64)
    return (bits >> 11) / 2**53


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)
