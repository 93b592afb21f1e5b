"""A draw from logits in integers, on the host. `backend/gpu/sampling_kernels.py` computes the same on a GPU.

Only integers and float32 operations that IEEE defines decide, so the two agree token for token.

A token's depth is its distance below the most likely token: log2(p_max / p), in units of 2^-25 octaves. Its mass is
2^44 * 2^-depth, rounded down. Both are integers: a sum of masses does not depend on its order.

2^-depth is a shift by the full octaves, times a polynomial in the next 12 bits of the depth (a table on the host),
times a linear function of the last 13. The relative error is below 7e-9, where one unit of depth is 2e-8, and more
depth is never more mass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.nn.packed import MAX_DEPTH, OCTAVE, U64, mix

COARSE, FINE = 20, 9  # bits of a depth below its coarse and its fine bin. Of a fine bin, filters keep all or nothing

MASS = 44  # bits: the masses of 2^18 tokens fit int64
LINE = 13  # bits of a depth that the linear function takes
SLOPE = 181693  # 2^-x = 1 - SLOPE * x / 2^43 for x units of depth below 2^LINE
# 2^-f = 1 - f * (c1 - f * (c2 - ... f * c6)) for f from 0 to 1, in units of 2^-32
HALVING = (2977043972, 1031755803, 238330986, 41142263, 5475002, 468251)

MAX_VOCAB = 2**18  # tokens: the sum of their masses fits int64
_BINS = 1 << COARSE - FINE  # fine bins of a coarse bin; there are fewer coarse bins
_BLOCK = 2**14  # tokens per chunk: temporaries of a full vocabulary would be newly mapped pages
_SUMMED = 2**10  # tokens per partial sum of masses, which a draw searches first

Floats = NDArray[np.float32]
Ints = NDArray[Any]  # int32 depths, int64 masses and tokens
Columns = Mapping[str, Any]  # of `PackedSettings`


def draw(scores: Floats, columns: Columns, at: float) -> int:
    """The token at `at`, in [0, 1), of the distribution that filters leave of scores [V], none of which is NaN."""
    tokens, mass = weights(scores, columns)
    ends = np.add.reduceat(mass, range(0, len(mass), _SUMMED)).cumsum()
    target = int(at * 2**64) * int(ends[-1]) >> 64  # exact: `at` has 53 bits
    # Tokens without mass end where they begin, so `right` passes over them.
    first = int(ends.searchsorted(target, side="right")) * _SUMMED
    within = mass[first : first + _SUMMED].cumsum()
    target -= int(ends[first // _SUMMED] - within[-1])
    return int(tokens[first + int(within.searchsorted(target, side="right"))])


def weights(scores: Floats, columns: Columns) -> tuple[Sequence[int] | Ints, Ints]:
    """Tokens, in order, and their masses after filters: 0 for tokens that a filter drops."""
    depth = depths(scores, columns["per_temperature"])
    tokens: Sequence[int] | Ints = range(len(depth))
    last, top_k, top_p = columns["min_p_depth"], columns["top_k"], columns["top_p"]
    # top_p is a share of what top_k keeps, whether min_p keeps it or not.
    kept = last if not top_p else MAX_DEPTH
    if top_k:
        kept = min(kept, _end_of_bin(_kth(depth, top_k)))
    if kept < MAX_DEPTH:
        tokens = np.flatnonzero(depth <= kept)
        depth = depth[tokens]
    mass = masses(depth)
    if len(scores) > MAX_VOCAB:  # more than a GPU's sampler takes: fewer bits of each mass, so that the sum fits int64
        mass >>= (len(scores) - 1).bit_length() - (MAX_VOCAB - 1).bit_length()
    if top_p:
        last = min(last, _top_p_depth(depth, mass, top_p))
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
        HALVINGS.take(x >> LINE & len(HALVINGS) - 1, out=out, mode="clip")  # clip: a range check costs more
        line = x & (1 << LINE) - 1
        line *= SLOPE
        line >>= 13
        out *= np.subtract(1 << 30, line, out=line)  # 2^61 at a depth of 0
        out >>= (x >> OCTAVE) + (61 - MASS)
    return mass


def _halvings() -> Ints:
    """2^-f in units of 2^-31, for the 2^12 values of f that a depth has besides full octaves and the linear part."""
    bits = OCTAVE - LINE
    f = np.arange(1 << bits)
    x = np.zeros_like(f)
    for c in reversed(HALVING):
        x = c - (x * f >> bits)
    return (1 << 31) - (x * f >> bits + 1)


HALVINGS = _halvings()


def _kth(depth: Ints, k: int) -> int:
    """The depth of the k-th most likely token, for k below the size of the vocabulary."""
    # At least k tokens are as likely as the k-th of the best of each group: few others need a look.
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
    """The bin in which this share of the mass ends, and the rest of the share in that bin."""
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
    """A number in [0, 1) keyed by (seed, position), not by earlier draws: splitmix64's finalizer over both."""
    bits = mix((mix(seed) + position * 0x9E3779B97F4A7C15) & U64)
    return (bits >> 11) / 2**53
