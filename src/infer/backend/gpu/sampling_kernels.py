"""Choosing a token per row from logits [R, V]: a handful of small kernels over slices of the vocabulary.

Greedy rows need `best_of_slices` and `best_of_row`. Sampling is, without sorting the vocabulary:

    best_of_slices   penalties and bias; the best of each slice
    count            coarse histograms of tokens and of their mass, by their depth below the row's best
    narrow_top_k     the coarse bin in which the k-th likeliest lies; its fine histogram
    narrow_top_p     the k-th likeliest; the coarse bin in which top_p's share ends; its fine histogram
    weigh            the depth at which the filters cut; the mass that each slice keeps
    draw             the token at the row's uniform number

The three in the middle have nothing to do in rows without filters, as plain sampling by temperature is.
Each kernel boundary is the synchronisation that the next one needs. A row's settings and its position were there before
the model ran: they are read before the wait, and then all that is waited for at once. What is summed are whole
numbers, so the order in which atomics arrive changes nothing, and a row gets the same token alone or among others.

`draw.py` says what a depth and a mass are. The filters look at depths in steps of 2^-16 octaves (coarse bins of 2048
fine ones): tokens that are closer than that count as equally likely. `nn/draw.py` computes the same numbers on the
host, so launch these kernels with enable_fp_fusion=False: the penalties are float32, each operation rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import let_next_start, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.nn import draw as units

SLICE = tl.constexpr(1024)  # tokens, of which a program takes several slices where there are many rows
BINS = tl.constexpr(2048)  # of a histogram
COARSE = tl.constexpr(units.COARSE)
FINE = tl.constexpr(units.FINE)
MAX_DEPTH = tl.constexpr(units.MAX_DEPTH)
_OCTAVE = tl.constexpr(units.OCTAVE)
_LINE = tl.constexpr(units.LINE)
_LINE_MASK = tl.constexpr((1 << units.LINE) - 1)
_SLOPE = tl.constexpr(units.SLOPE)
_MASS = tl.constexpr(units.MASS)
_C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in units.HALVING)

# Columns of the settings of a row: whole numbers, then fractions.
FLAGS = tl.constexpr(0)
TOP_K = tl.constexpr(1)  # 0: off
TOP_P = tl.constexpr(2)  # times 2^64; 0: off
MIN_P_DEPTH = tl.constexpr(3)  # the last depth that min_p keeps
TAIL_DEPTH = tl.constexpr(4)  # all tokens below it together are less than top_p leaves out
SEED_KEY = tl.constexpr(5)
WHOLE = tl.constexpr(8)
PER_TEMPERATURE = tl.constexpr(0)
REPETITION = tl.constexpr(1)
PRESENCE = tl.constexpr(2)
FREQUENCY = tl.constexpr(3)
FRACTIONS = tl.constexpr(4)
SAMPLED = tl.constexpr(1)  # flags
PENALISED = tl.constexpr(2)
BIASED = tl.constexpr(4)
FILTERED = tl.constexpr(8)  # by top_k or top_p

# Histograms of a row: how many tokens (int32), and their mass (int64).
COUNTS = tl.constexpr(2)  # coarse, fine of top_k
MASSES = tl.constexpr(3)  # coarse, fine of top_k, fine of top_p

# What kernels tell later ones about a row.
K_BIN = tl.constexpr(0)  # coarse bin of the k-th likeliest
K_LEFT = tl.constexpr(1)  # its rank in that bin, from 1
K_MASS = tl.constexpr(2)  # of the bins before
K_DEPTH = tl.constexpr(3)  # the last depth that top_k keeps
P_BIN = tl.constexpr(4)  # coarse bin in which top_p's share ends
P_LEFT = tl.constexpr(5)  # what is left of the share in that bin
DEPTH = tl.constexpr(6)  # the last depth that all filters keep
NOTES = tl.constexpr(8)


@kernel()
def best_of_slices(
    logits,  # [R, V]
    positions,  # [R] of the tokens to be chosen; below 0: nothing is done for that row
    best,  # [R, slices] float32: the highest logit, NaN if any is
    best_at,  # [R, slices] int32: the first token that has it
    scores,  # [R, V] float32: the logits with penalties and bias, of rows that are sampled and have any
    whole,  # [R, WHOLE] int64
    fractions,  # [R, FRACTIONS] float32
    history,  # [R, V] int32: twice how often a token was generated, plus one if it is in the prompt
    bias,  # [R, V] float32
    counts,  # [R, COUNTS, BINS] int32, emptied here
    masses,  # [R, MASSES, BINS] int64, emptied here
    V: tl.constexpr,
    SLICES: tl.constexpr,
    EACH: tl.constexpr,  # slices of a program
    GREEDY: tl.constexpr,  # there are no settings: all pointers behind best_at are None
    CLEARED: tl.constexpr,  # bins that each program empties
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    token = _tokens(tl.program_id(0), EACH)
    inside = token < V
    position = tl.load(positions + row, cache_modifier=".cg")
    if not GREEDY:
        flags = tl.load(whole + row * WHOLE + FLAGS)
        of_row = fractions + row * FRACTIONS
        repetition = tl.load(of_row + REPETITION)
        presence, frequency = tl.load(of_row + PRESENCE), tl.load(of_row + FREQUENCY)
        seen, added = tl.zeros([EACH, SLICE], tl.int32), tl.zeros([EACH, SLICE], tl.float32)
        if (flags & PENALISED) != 0:
            seen = tl.load(history + row * V + token, mask=inside, other=0)
        if (flags & BIASED) != 0:
            added = tl.load(bias + row * V + token, mask=inside, other=0.0)
    wait_for_previous(PDL)
    if position < 0:
        return
    x = tl.load(logits + row * V + token, mask=inside, other=-float("inf")).to(tl.float32)
    if not GREEDY:
        if (flags & PENALISED) != 0:
            x = tl.where(seen > 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
            x = tl.where(seen > 1, x - (presence + frequency * (seen >> 1).to(tl.float32)), x)
        if (flags & BIASED) != 0:
            x += added
        if ((flags & SAMPLED) != 0) & ((flags & (PENALISED | BIASED)) != 0):
            tl.store(scores + row * V + token, x, mask=inside)
        if (flags & FILTERED) != 0:
            bin = tl.program_id(0) * CLEARED + tl.arange(0, CLEARED)
            tl.store(counts + row * COUNTS * BINS + bin, 0, mask=bin < COUNTS * BINS)
            tl.store(masses + row * MASSES * BINS + bin, 0, mask=bin < MASSES * BINS)
    is_nan = x != x
    x = tl.where(is_nan, -float("inf"), x)
    highest = tl.max(x, 1)
    first = tl.min(tl.where((x == highest[:, None]) & inside, token, V), 1)
    highest = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), highest)
    at = tl.program_id(0) * EACH + tl.arange(0, EACH)
    tl.store(best + row * SLICES + at, highest, mask=at < SLICES)
    tl.store(best_at + row * SLICES + at, first, mask=at < SLICES)


@kernel()
def best_of_row(
    positions,
    best,
    best_at,
    tokens,
    sent,
    steps,
    TURNS: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of rows that are all greedy."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row, cache_modifier=".cg")
    wait_for_previous(PDL)
    if position < 0:
        return
    _, token = _best(best, best_at, row, SLICES, PADDED)
    _tell(tokens, sent, steps, row, token, TURNS)


@kernel()
def count(
    positions,
    logits,
    best,
    scores,
    whole,
    fractions,
    counts,
    masses,
    V: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens and mass per coarse bin, for the filters that the row has."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    flags = _flags(positions, whole, row)
    per_temperature = tl.load(fractions + row * FRACTIONS + PER_TEMPERATURE)
    top_k = tl.load(whole + row * WHOLE + TOP_K)
    top_p = tl.load(whole + row * WHOLE + TOP_P)
    tail = tl.load(whole + row * WHOLE + TAIL_DEPTH)
    wait_for_previous(PDL)
    if (flags & FILTERED) == 0:
        return
    each, highest = _highest(best, row, SLICES, PADDED)
    of_slices = tl.arange(0, PADDED)
    counts += row * COUNTS * BINS
    masses += row * MASSES * BINS
    # At least k tokens are as likely as the k-th best of all slices.
    in_order = tl.sort(each, descending=True)
    enough = tl.max(tl.where(of_slices >= top_k - 1, in_order, -float("inf")), 0)
    enough = _depth(enough, highest, per_temperature) >> FINE
    for at in range(tl.program_id(0), tl.cdiv(SLICES, EACH), tl.num_programs(0)):
        depth = _load_depth(logits, scores, flags, row, _tokens(at, EACH), highest, per_temperature, V)
        coarse = depth >> COARSE
        mass = _mass(depth)
        # Only tokens that may be kept are worth an atomic each: most are not, and they fall into few bins.
        if top_k != 0:
            counted = ((depth >> FINE) <= enough) & (depth < MAX_DEPTH)
            tl.atomic_add(counts + coarse, 1, mask=counted, sem="relaxed")
            if top_p != 0:
                tl.atomic_add(masses + coarse, mass, mask=counted, sem="relaxed")
        else:
            counted = depth <= tail
            tl.atomic_add(masses + coarse, mass, mask=counted, sem="relaxed")
            others = tl.sum(tl.sum(tl.where(counted, 0, mass), 1), 0)
            tl.atomic_add(masses + BINS - 1, others, sem="relaxed")


@kernel()
def narrow_top_k(
    positions,
    logits,
    best,
    scores,
    whole,
    fractions,
    counts,
    masses,
    notes,
    V: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The coarse bin of the k-th likeliest token, and that bin's fine histograms."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    bins = tl.arange(0, BINS)
    flags = _flags(positions, whole, row)
    per_temperature = tl.load(fractions + row * FRACTIONS + PER_TEMPERATURE)
    top_k = tl.load(whole + row * WHOLE + TOP_K)
    wait_for_previous(PDL)
    if ((flags & FILTERED) == 0) | (top_k == 0):
        return
    counts += row * COUNTS * BINS
    masses += row * MASSES * BINS
    number = tl.load(counts + bins)
    mass = tl.load(masses + bins)
    _, highest = _highest(best, row, SLICES, PADDED)
    before = tl.cumsum(number, 0) < top_k
    k_bin = tl.sum(before.to(tl.int32), 0)  # BINS where fewer than k tokens have mass: all are kept
    if tl.program_id(0) == 0:
        notes += row * NOTES
        tl.store(notes + K_BIN, k_bin)
        tl.store(notes + K_LEFT, top_k - tl.sum(tl.where(before, number, 0), 0))
        tl.store(notes + K_MASS, tl.sum(tl.where(before, mass, 0), 0))
    for at in range(tl.program_id(0), tl.cdiv(SLICES, EACH), tl.num_programs(0)):
        depth = _load_depth(logits, scores, flags, row, _tokens(at, EACH), highest, per_temperature, V)
        counted = (depth >> COARSE) == k_bin
        fine = BINS + ((depth >> FINE) & (BINS - 1))
        tl.atomic_add(counts + fine, 1, mask=counted, sem="relaxed")
        tl.atomic_add(masses + fine, _mass(depth), mask=counted, sem="relaxed")


@kernel()
def narrow_top_p(
    positions,
    logits,
    best,
    scores,
    whole,
    fractions,
    counts,
    masses,
    notes,
    V: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where top_k cuts; the coarse bin in which top_p's share of what that leaves ends, and its fine histogram."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    bins = tl.arange(0, BINS)
    flags = _flags(positions, whole, row)
    per_temperature = tl.load(fractions + row * FRACTIONS + PER_TEMPERATURE)
    top_k = tl.load(whole + row * WHOLE + TOP_K)
    top_p = tl.load(whole + row * WHOLE + TOP_P)
    wait_for_previous(PDL)
    if ((flags & FILTERED) == 0) | ((top_p == 0) & (tl.program_id(0) > 0)):
        return
    counts += row * COUNTS * BINS
    masses += row * MASSES * BINS
    notes += row * NOTES
    number = tl.load(counts + BINS + bins)
    fine_mass = tl.load(masses + BINS + bins)
    coarse_mass = tl.load(masses + bins)
    k_bin, k_left, k_mass = tl.load(notes + K_BIN), tl.load(notes + K_LEFT), tl.load(notes + K_MASS)
    _, highest = _highest(best, row, SLICES, PADDED)
    if top_k != 0:
        k_fine = tl.sum((tl.cumsum(number, 0) < k_left).to(tl.int64), 0)
        total = k_mass + tl.sum(tl.where(bins <= k_fine, fine_mass, 0), 0)
        if tl.program_id(0) == 0:
            tl.store(notes + K_DEPTH, (((k_bin * BINS + k_fine) + 1) << FINE) - 1)
    else:
        total = tl.sum(coarse_mass, 0)
    if top_p != 0:
        # A token is kept if the likelier ones have less than this. The bins behind the k-th likeliest begin with more.
        share = tl.maximum(_times_fraction(total, top_p), 1)
        before = tl.cumsum(coarse_mass, 0) - coarse_mass
        p_bin = tl.sum((before < share).to(tl.int32), 0) - 1
        if tl.program_id(0) == 0:
            tl.store(notes + P_BIN, p_bin)
            tl.store(notes + P_LEFT, share - tl.sum(tl.where(bins < p_bin, coarse_mass, 0), 0))
        for at in range(tl.program_id(0), tl.cdiv(SLICES, EACH), tl.num_programs(0)):
            depth = _load_depth(logits, scores, flags, row, _tokens(at, EACH), highest, per_temperature, V)
            counted = (depth >> COARSE) == p_bin
            fine = 2 * BINS + ((depth >> FINE) & (BINS - 1))
            tl.atomic_add(masses + fine, _mass(depth), mask=counted, sem="relaxed")


@kernel()
def weigh(
    positions,
    logits,
    best,
    scores,
    whole,
    fractions,
    masses,
    notes,
    weights,
    V: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last depth that all filters keep, and the mass that each slice keeps: weights [R, slices] int64."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    bins = tl.arange(0, BINS)
    flags = _flags(positions, whole, row)
    per_temperature = tl.load(fractions + row * FRACTIONS + PER_TEMPERATURE)
    top_k = tl.load(whole + row * WHOLE + TOP_K)
    top_p = tl.load(whole + row * WHOLE + TOP_P)
    last = tl.load(whole + row * WHOLE + MIN_P_DEPTH)
    wait_for_previous(PDL)
    if (flags & SAMPLED) == 0:
        return
    notes += row * NOTES
    k_depth, p_bin, p_left = tl.load(notes + K_DEPTH), tl.load(notes + P_BIN), tl.load(notes + P_LEFT)
    mass = tl.load(masses + (row * MASSES + 2) * BINS + bins, mask=bins < tl.where(top_p != 0, BINS, 0), other=0)
    _, highest = _highest(best, row, SLICES, PADDED)
    depth = _load_depth(logits, scores, flags, row, _tokens(tl.program_id(0), EACH), highest, per_temperature, V)
    if top_k != 0:
        last = tl.minimum(last, k_depth)
    if top_p != 0:
        p_fine = tl.sum(((tl.cumsum(mass, 0) - mass) < p_left).to(tl.int64), 0) - 1
        last = tl.minimum(last, (((p_bin * BINS + p_fine) + 1) << FINE) - 1)
    if tl.program_id(0) == 0:
        tl.store(notes + DEPTH, last)
    at = tl.program_id(0) * EACH + tl.arange(0, EACH)
    kept = tl.sum(tl.where(depth <= last, _mass(depth), 0), 1)
    tl.store(weights + row * SLICES + at, kept, mask=at < SLICES)


@kernel()
def draw(
    positions,
    logits,
    best,
    best_at,
    scores,
    whole,
    fractions,
    notes,
    weights,
    history,
    tokens,
    sent,
    steps,
    V: tl.constexpr,
    TURNS: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of each row, which also enters its history. -1 where a logit is NaN, or none is above -inf."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row, cache_modifier=".cg")
    flags = tl.load(whole + row * WHOLE + FLAGS)
    per_temperature = tl.load(fractions + row * FRACTIONS + PER_TEMPERATURE)
    uniform = _uniform(tl.load(whole + row * WHOLE + SEED_KEY), position)
    wait_for_previous(PDL)
    if position < 0:
        return
    of_slices = tl.arange(0, PADDED)
    weight = tl.load(weights + row * SLICES + of_slices, mask=of_slices < SLICES, other=0)
    last = tl.load(notes + row * NOTES + DEPTH)
    valid, token = _best(best, best_at, row, SLICES, PADDED)
    _, highest = _highest(best, row, SLICES, PADDED)
    if valid & ((flags & SAMPLED) != 0):
        target = _umulhi(uniform, tl.sum(weight, 0))
        # Invert the cumulative mass: tokens without any end where they begin, so `<=` passes over them.
        passed = tl.cumsum(weight, 0) <= target
        at = tl.sum(passed.to(tl.int32), 0)
        target -= tl.sum(tl.where(passed, weight, 0), 0)
        in_slice = at * SLICE + tl.arange(0, SLICE)
        depth = _load_depth(logits, scores, flags, row, in_slice, highest, per_temperature, V)
        mass = tl.where(depth <= last, _mass(depth), 0)
        token = at * SLICE + tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    _tell(tokens, sent, steps, row, token, TURNS)
    if valid & ((flags & PENALISED) != 0):
        seen = history + row * V + token
        tl.store(seen, tl.load(seen) + 2)


@triton.jit
def _flags(positions, whole, row):
    """Of a row; none where it has no token."""
    position = tl.load(positions + row, cache_modifier=".cg")
    return tl.where(position >= 0, tl.load(whole + row * WHOLE + FLAGS), 0)


@triton.jit
def _tokens(at, EACH: tl.constexpr):
    """[EACH, SLICE]"""
    return (at * EACH + tl.arange(0, EACH)[:, None]) * SLICE + tl.arange(0, SLICE)[None, :]


@triton.jit
def _highest(best, row, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """The best of each slice, and of all."""
    at = tl.arange(0, PADDED)
    each = tl.load(best + row * SLICES + at, mask=at < SLICES, other=-float("inf"))
    # A GPU's maximum passes over NaN: then scores might lie above it, and bins below 0.
    return each, tl.where(tl.max((each != each).to(tl.int32), 0) > 0, float("nan"), tl.max(each, 0))


@triton.jit
def _load_depth(logits, scores, flags, row, token, highest, per_temperature, V: tl.constexpr):
    """How far tokens lie below the row's best."""
    if (flags & (PENALISED | BIASED)) != 0:
        x = tl.load(scores + row * V + token, mask=token < V, other=-float("inf"))
    else:
        x = tl.load(logits + row * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
    return _depth(x, highest, per_temperature)


@triton.jit
def _tell(tokens, sent, steps, row, token, TURNS: tl.constexpr):
    """The token, to the next step and, in its turn, to the host."""
    tl.store(tokens + row, token)
    tl.store(sent + tl.load(steps) % TURNS * tl.num_programs(0) + row, token)


@triton.jit
def _best(best, best_at, row, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """Whether the row has a best token, and which: -1 if not."""
    at = tl.arange(0, PADDED)
    each = tl.load(best + row * SLICES + at, mask=at < SLICES, other=-float("inf"))
    token = tl.load(best_at + row * SLICES + at, mask=at < SLICES, other=0)
    is_nan = each != each
    each = tl.where(is_nan, -float("inf"), each)
    highest = tl.max(each, 0)
    first = tl.min(tl.where(each == highest, token, 0x7FFFFFFF), 0)
    valid = (tl.max(is_nan.to(tl.int32), 0) == 0) & (highest > -float("inf"))
    return valid, tl.where(valid, first, -1)


@triton.jit
def _depth(x, highest, per_temperature):
    depth = tl.where(x == highest, 0.0, (highest - x) * per_temperature)  # the likeliest may be infinite
    return tl.where(depth < MAX_DEPTH, depth, MAX_DEPTH).to(tl.int32)  # of NaN too


@triton.jit
def _mass(depth):
    depth = depth.to(tl.uint32, bitcast=True)
    f = (depth >> _LINE) << (32 - _OCTAVE + _LINE)  # the bits between the octaves and the line, as a fraction of 2^32
    x = _C5 - tl.umulhi(f, _C6)
    x = _C4 - tl.umulhi(f, x)
    x = _C3 - tl.umulhi(f, x)
    x = _C2 - tl.umulhi(f, x)
    x = _C1 - tl.umulhi(f, x)
    x = (1 << 31) - tl.umulhi(f >> 1, x)
    line = (1 << 30) - ((depth & _LINE_MASK) * _SLOPE >> 13)
    return ((x.to(tl.uint64) * line.to(tl.uint64)) >> ((depth >> _OCTAVE) + (61 - _MASS)).to(tl.uint64)).to(tl.int64)


@triton.jit
def _umulhi(x, y):
    """The upper 64 bits of a product of unsigned numbers."""
    return tl.umulhi(x.to(tl.uint64, bitcast=True), y.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


@triton.jit
def _times_fraction(number, fraction):
    """number * fraction / 2^64, rounded up."""
    return _umulhi(number, fraction) + (number * fraction != 0).to(tl.int64)


@triton.jit
def _uniform(key, position):
    """A number in [0, 1) times 2^64, of 53 bits: splitmix64's finaliser over both."""
    x = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11) << 11
