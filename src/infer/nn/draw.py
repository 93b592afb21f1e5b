"""A draw from logits in whole numbers, on the host. `backend/gpu/sampling_kernels.py` computes the same on a GPU.

All that decides is whole numbers, and float32 operations that IEEE defines: so the two agree token for token.

A token's depth says how far below the likeliest it is: log2(p_max / p), in units of 2^-25 octaves. Its mass is
2^44 * 2^-depth, rounded down. Both are whole numbers: a sum of masses does not depend on its order.

2^-depth is a shift by the whole octaves, times a polynomial in the next 12 bits of the depth (which the host looks up),
times a line in the last 13. The relative error is below 7e-9, where one unit of depth is 2e-8, and more depth is never
more mass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OCTAVE = 25  # bits of a depth below a whole octave
MAX_DEPTH = 45 << OCTAVE  # 31 nats: from there on a token has no mass
COARSE, FINE = 20, 9  # bits of a depth below its coarse and its fine bin. Of a fine bin, filters keep all or nothing

MASS = 44  # bits: the masses of 2^18 tokens fit int64
LINE = 13  # bits of a depth that the line is of
SLOPE = 181693  # 2^-x = 1 - SLOPE * x / 2^43 for x units of depth below 2^LINE
# 2^-f = 1 - f * (c1 - f * (c2 - ... f * c6)) for f from 0 to 1, in units of 2^-32
HALVING = (2977043972, 1031755803, 238330986, 41142263, 5475002, 468251)

U64 = 2**64 - 1
MAX_VOCAB = 2**18  # tokens whose masses certainly fit int64 together
_BINS = 1 << COARSE - FINE  # fine ones of a coarse one; there are not as many coarse ones
_BLOCK = 2**14  # tokens to compute with at a time: a vocabulary's temporaries would be new pages from the system
_SUMMED = 2**10  # tokens whose masses are added up before a draw looks at each

Floats = NDArray[np.float32]
Ints = NDArray[Any]  # int32 depths, int64 masses and tokens


class Filters(NamedTuple):
    """Temperature and filters in the units of a draw."""

    per_temperature: float  # from logits to depths
    top_k: int  # 0: off
    top_p: int  # times 2^64; 0: off
    min_p_depth: int  # the last depth that min_p keeps

    @classmethod
    def of(cls, temperature: float, top_k: int | None, top_p: float, min_p: float) -> Filters:
        temperature = min(max(temperature, 1e-30), 1e30)  # the factor is then a normal float32
        return cls(
            per_temperature=2**OCTAVE / math.log(2) / temperature,
            top_k=top_k or 0,
            top_p=max(int(top_p * 2**64), 1) if top_p < 1 else 0,
            min_p_depth=to_depth(-math.log2(min_p)) if min_p > 0 else MAX_DEPTH,
        )


def is_sampled(temperature: float, top_k: int | None) -> bool:
    """Otherwise the first of the likeliest tokens is taken."""
    return temperature > 0 and top_k != 1


def to_depth(octaves: float) -> int:
    return int(min(octaves * 2**OCTAVE, MAX_DEPTH))


def draw(scores: Floats, filters: Filters, at: float) -> int:
    """The token at `at`, in [0, 1), of the distribution that the filters leave of scores [V]. None of them is NaN."""
    tokens, mass = weights(scores, filters)
    ends = np.add.reduceat(mass, range(0, len(mass), _SUMMED)).cumsum()
    target = int(at * 2**64) * int(ends[-1]) >> 64  # exact: `at` has 53 bits
    # Tokens without mass end where they begin, so `right` passes over them.
    first = int(ends.searchsorted(target, side="right")) * _SUMMED
    within = mass[first : first + _SUMMED].cumsum()
    target -= int(ends[first // _SUMMED] - within[-1])
    return int(tokens[first + int(within.searchsorted(target, side="right"))])


def weights(scores: Floats, filters: Filters) -> tuple[Sequence[int] | Ints, Ints]:
    """Tokens, in order, and the mass of each that the filters leave: 0 for those that they drop."""
    depth = depths(scores, filters.per_temperature)
    tokens: Sequence[int] | Ints = range(len(depth))
    last = filters.min_p_depth
    # top_p's share is one of what top_k leaves, whether min_p leaves it or not.
    looked_at = last if not filters.top_p else MAX_DEPTH
    if filters.top_k:
        looked_at = min(looked_at, _end_of_bin(_kth(depth, filters.top_k)))
    if looked_at < MAX_DEPTH:
        tokens = np.flatnonzero(depth <= looked_at)
        depth = depth[tokens]
    mass = masses(depth)
    if len(scores) > MAX_VOCAB:  # more than a device takes: fewer bits of each, so that they still fit together
        mass >>= (len(scores) - 1).bit_length() - (MAX_VOCAB - 1).bit_length()
    if filters.top_p:
        last = min(last, _top_p_depth(depth, mass, filters.top_p))
        mass[depth > last] = 0
    return tokens, mass


def log_mass(scores: Floats) -> float:
    """The logarithm of the sum of e^(score - highest), over scores [V]. None of them is NaN."""
    depth = depths(scores, 2**OCTAVE / math.log(2))
    total = sum(int(masses(depth[part]).sum()) for part in _blocks(len(depth)))
    return math.log(total) - MASS * math.log(2)


def depths(scores: Floats, per_temperature: float) -> Ints:
    highest = scores.max()
    if highest == np.inf:  # infinite scores are equally likely, and no others are
        return np.where(scores == highest, np.int32(0), np.int32(MAX_DEPTH))
    depth = np.empty(len(scores), np.int32)
    factor, limit = np.float32(per_temperature), np.float32(MAX_DEPTH)
    with np.errstate(over="ignore"):
        for part in _blocks(len(depth)):
            x = highest - scores[part]
            x *= factor
            depth[part] = np.minimum(x, limit, out=x)
    return depth


def masses(depth: Ints) -> Ints:
    """2^MASS * 2^-depth, rounded down."""
    mass = np.empty(len(depth), np.int64)
    for part in _blocks(len(depth)):
        x, out = depth[part], mass[part]
        HALVINGS.take(x >> LINE & len(HALVINGS) - 1, out=out, mode="clip")  # none is outside; a check costs more
        line = x & (1 << LINE) - 1
        line *= SLOPE
        line >>= 13
        out *= np.subtract(1 << 30, line, out=line)  # 2^61 at a depth of 0
        out >>= (x >> OCTAVE) + (61 - MASS)
    return mass


def _halvings() -> Ints:
    """2^-f in units of 2^-31, for the 2^12 values of f that a depth has beside whole octaves and the line."""
    bits = OCTAVE - LINE
    f = np.arange(1 << bits)
    x = np.zeros_like(f)
    for c in reversed(HALVING):
        x = c - (x * f >> bits)
    return (1 << 31) - (x * f >> bits + 1)


HALVINGS = _halvings()


def _kth(depth: Ints, k: int) -> int:
    """The depth of the k-th likeliest token."""
    if k >= len(depth):
        return MAX_DEPTH
    # At least k tokens are as likely as the k-th of the best of each group: few others are worth looking at.
    size = min(64, len(depth) // (4 * k))
    if size > 1:
        groups = len(depth) // size
        best = depth[: size * groups].reshape(size, groups).min(0)
        depth = depth[depth <= np.partition(best, k - 1)[k - 1]]
    return int(np.partition(depth, k - 1)[k - 1])


def _top_p_depth(depth: Ints, mass: Ints, top_p: int) -> int:
    """The last depth that top_p keeps: that of the fine bin in which its share of the mass ends."""
    share = max(-(-int(mass.sum()) * top_p >> 64), 1)  # rounded up
    coarse = depth >> COARSE
    coarse_bin, left = _bin_at(coarse, mass, share)
    within = np.flatnonzero(coarse == coarse_bin)
    fine_bin, _ = _bin_at(depth[within] >> FINE & _BINS - 1, mass[within], left)
    return _end_of_bin(coarse_bin << COARSE | fine_bin << FINE)


def _bin_at(bins: Ints, mass: Ints, share: int) -> tuple[int, int]:
    """The bin in which this share of the mass ends, and what is left of the share in that bin."""
    total = np.zeros(_BINS, np.int64)
    for part in _blocks(len(bins)):
        for shift in (0, 23):  # bincount adds up in float64: 23 bits of each mass at a time, so that no sum is rounded
            bits = mass[part] >> shift & (1 << 23) - 1
            total += np.bincount(bins[part], weights=bits, minlength=_BINS).astype(np.int64) << shift
    before = total.cumsum() - total
    found = int(np.count_nonzero(before < share)) - 1
    return found, share - int(before[found])


def _end_of_bin(depth: int) -> int:
    """The last depth of the same fine bin."""
    return depth | (1 << FINE) - 1


def _blocks(length: int) -> Iterator[slice]:
    return (slice(first, first + _BLOCK) for first in range(0, length, _BLOCK))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) keyed by (seed, position), not by what was drawn before: splitmix64's finaliser over both."""
    bits = mix((mix(seed) + position * 0x9E3779B97F4A7C15) & U64)
    return (bits >> 11) / 2**53


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)
