"""Sampling settings as numbers that a draw computes with, the same on host and GPU. Needs no torch and no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

OCTAVE = 25  # bits of a depth below a whole octave
MAX_DEPTH = 45 << OCTAVE  # 31 nats: from there on a token has no mass
U64 = 2**64 - 1


class PackedSettings(NamedTuple):
    """The settings of one sequence. Columns and flags are those of `backend/gpu/sampling_kernels.py`, by name."""

    columns: Mapping[str, int | float]
    flags: frozenset[str]  # none: the token with the highest logit is chosen
    logit_bias: Mapping[int, float]


def to_depth(octaves: float) -> int:
    """How far below the most likely token, in units of 2^-OCTAVE octaves."""
    return int(min(octaves * 2**OCTAVE, MAX_DEPTH))


def mix(x: int) -> int:
    """64 bits in, 64 bits out: splitmix64's finalizer."""
    x = (x + 0x9E3779B97F4A7C15) & U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)
