"""Kernels that choose a token per row from logits [R, V], over slices of the vocabulary.

Greedy rows need `best_of_slices` and `best_of_row`. Sampling does not sort the vocabulary:

    best_of_slices   penalties and bias; the best of each slice
    count            coarse histograms of tokens and of their mass, by their depth below the row's best
    narrow_top_k     the coarse bin of the k-th most likely token; its fine histogram
    narrow_top_p     the k-th most likely token; the coarse bin in which top_p's share ends; its fine histogram
    weigh            the depth at which the filters cut; the mass that each slice keeps
    draw             the token at the row's uniform random number

`count`, `narrow_top_k` and `narrow_top_p` skip rows without filters. Kernel boundaries are the only synchronization. A
row's settings and position were set before the model ran: they are read before the wait, and the outputs of earlier
kernels, all at once, after it. All sums are over integers, so the order of atomics changes nothing, and a row gets the
same token alone or in a batch.

A sequence with drafts has WIDTH rows with one set of settings: a row for its last token, and one for each draft.
`accept` compares the tokens chosen with the drafts.

`nn/draw.py` defines depth and mass. The filters see depths in steps of 2^-16 octaves (coarse bins of 2048 fine ones):
tokens that are closer than that count as equally likely. `nn/draw.py` computes the same values on the host, so launch
these kernels with enable_fp_fusion=False: penalties are float32, each operation rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infer.backend.gpu.launch_kernels import let_next_start, wait_for_previous
from infer.backend.gpu.launcher import kernel
from infer.nn import draw as units
from infer.nn import packed

SLICE = tl.constexpr(1024)  # tokens
BINS = tl.constexpr(2048)  # of a histogram
COARSE = tl.constexpr(units.COARSE)
FINE = tl.constexpr(units.FINE)
MAX_DEPTH = tl.constexpr(packed.MAX_DEPTH)
_OCTAVE = tl.constexpr(packed.OCTAVE)
_LINE = tl.constexpr(units.LINE)
_LINE_MASK = tl.constexpr((1 << units.LINE) - 1)
_SLOPE = tl.constexpr(units.SLOPE)
_MASS = tl.constexpr(units.MASS)
_C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in units.HALVING)

# Columns of a row's settings, by the names of `engine/params.py`, which packs them.
INT_COLUMNS = (
    "flags",
    "top_k",  # 0: off
    "top_p",  # times 2^64; 0: off
    "min_p_depth",  # the last depth that min_p keeps
    "tail_depth",  # all tokens below it together are less than top_p drops
    "seed_key",
)
FLOAT_COLUMNS = ("per_temperature", "repetition", "presence", "frequency")
FLAGS, TOP_K, TOP_P, MIN_P_DEPTH, TAIL_DEPTH, SEED_KEY = map(tl.constexpr, range(len(INT_COLUMNS)))
PER_TEMPERATURE, REPETITION, PRESENCE, FREQUENCY = map(tl.constexpr, range(len(FLOAT_COLUMNS)))
INTS = tl.constexpr(8)  # columns of a row in memory
FLOATS = tl.constexpr(4)
FLAG_BITS = {"sampled": 1, "penalized": 2, "biased": 4, "filtered": 8}  # filtered: by top_k or top_p
SAMPLED, PENALIZED, BIASED, FILTERED = map(tl.constexpr, FLAG_BITS.values())

# Histograms of a row: how many tokens (int32), and their mass (int64).
COUNTS = tl.constexpr(2)  # coarse, fine of top_k
MASSES = tl.constexpr(3)  # coarse, fine of top_k, fine of top_p

# `cuts`: where the filters cut a row, from one kernel to the next.
K_BIN = tl.constexpr(0)  # coarse bin of the k-th most likely token
K_LEFT = tl.constexpr(1)  # its rank in that bin, from 1
K_MASS = tl.constexpr(2)  # mass of the bins before
K_DEPTH = tl.constexpr(3)  # the last depth that top_k keeps
P_BIN = tl.constexpr(4)  # coarse bin in which top_p's share ends
P_LEFT = tl.constexpr(5)  # the part of the share in that bin
DEPTH = tl.constexpr(6)  # the last depth that all filters keep
CUTS = tl.constexpr(8)


@kernel()
def best_of_slices(
    logits,  # [R, V]
    positions,  # [R] of the tokens to choose; below 0: the row is skipped
    best,  # [R, slices] float32: the highest logit, NaN if any is
    best_at,  # [R, slices] int32: the first token that has it
    scores,  # [R, V] float32: the logits with penalties and bias, of sampled rows that have either
    ints,  # [R, INTS] int64
    floats,  # [R, FLOATS] float32
    history,  # [R, V] int32: twice how often a token was generated, plus one if it is in the prompt
    bias,  # [R, V] float32
    counts,  # [R, COUNTS, BINS] int32, cleared here
    masses,  # [R, MASSES, BINS] int64, cleared here
    drafts,  # [R / WIDTH, WIDTH - 1] int64, or None
    V: tl.constexpr,
    WIDTH: tl.constexpr,  # rows of a sequence, which share ints, floats, history and bias
    SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,  # slices of a program
    GREEDY: tl.constexpr,  # there are no settings: all pointers after best_at are None
    CLEARED: tl.constexpr,  # bins that each program clears
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    token = _tokens(tl.program_id(0), BLOCK_S)
    inside = token < V
    position = tl.load(positions + row, cache_modifier=".cg")
    if not GREEDY:
        sequence = row // WIDTH
        flags = tl.load(ints + sequence * INTS + FLAGS)
        of_row = floats + sequence * FLOATS
        repetition = tl.load(of_row + REPETITION)
        presence, frequency = tl.load(of_row + PRESENCE), tl.load(of_row + FREQUENCY)
        seen, added = tl.zeros([BLOCK_S, SLICE], tl.int32), tl.zeros([BLOCK_S, SLICE], tl.float32)
        if (flags & PENALIZED) != 0:
            seen = tl.load(history + sequence * V + token, mask=inside, other=0)
            for i in tl.static_range(WIDTH - 1):  # the drafts before this row
                draft = tl.load(drafts + sequence * (WIDTH - 1) + i)
                seen += tl.where((token == draft) & (i < row % WIDTH), 2, 0)
        if (flags & BIASED) != 0:
            added = tl.load(bias + sequence * V + token, mask=inside, other=0.0)
    wait_for_previous(PDL)
    if position < 0:
        return
    x = tl.load(logits + row * V + token, mask=inside, other=-float("inf")).to(tl.float32)
    if not GREEDY:
        if (flags & PENALIZED) != 0:
            x = tl.where(seen > 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
            x = tl.where(seen > 1, x - (presence + frequency * (seen >> 1).to(tl.float32)), x)
        if (flags & BIASED) != 0:
            x += added
        if ((flags & SAMPLED) != 0) & ((flags & (PENALIZED | BIASED)) != 0):
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
    at = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    tl.store(best + row * SLICES + at, highest, mask=at < SLICES)
    tl.store(best_at + row * SLICES + at, first, mask=at < SLICES)


@kernel()
def best_of_row(
    positions,
    best,
    best_at,
    tokens,
    host_tokens,
    steps,
    RING: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The most likely token of each row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row, cache_modifier=".cg")
    wait_for_previous(PDL)
    if position < 0:
        return
    _, token = _best(best, best_at, row, SLICES, PADDED)
    _store_token(tokens, host_tokens, steps, row, token, RING)


@kernel()
def count(
    positions,
    logits,
    best,
    scores,
    ints,
    floats,
    counts,
    masses,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens and mass per coarse bin, for the filters that the row has."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    sequence = row // WIDTH
    flags = _flags(positions, ints, row, sequence)
    per_temperature = tl.load(floats + sequence * FLOATS + PER_TEMPERATURE)
    top_k = tl.load(ints + sequence * INTS + TOP_K)
    top_p = tl.load(ints + sequence * INTS + TOP_P)
    tail = tl.load(ints + sequence * INTS + TAIL_DEPTH)
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
    for at in range(tl.program_id(0), tl.cdiv(SLICES, BLOCK_S), tl.num_programs(0)):
        depth = _load_depth(logits, scores, flags, row, _tokens(at, BLOCK_S), highest, per_temperature, V)
        coarse = depth >> COARSE
        mass = _mass(depth)
        # Atomics only for tokens that the filters may keep: the others, most of the vocabulary, fall into few bins.
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
    ints,
    floats,
    counts,
    masses,
    cuts,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """The coarse bin of the k-th most likely token, and that bin's fine histograms."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    bins = tl.arange(0, BINS)
    sequence = row // WIDTH
    flags = _flags(positions, ints, row, sequence)
    per_temperature = tl.load(floats + sequence * FLOATS + PER_TEMPERATURE)
    top_k = tl.load(ints + sequence * INTS + TOP_K)
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
        cuts += row * CUTS
        tl.store(cuts + K_BIN, k_bin)
        tl.store(cuts + K_LEFT, top_k - tl.sum(tl.where(before, number, 0), 0))
        tl.store(cuts + K_MASS, tl.sum(tl.where(before, mass, 0), 0))
    for at in range(tl.program_id(0), tl.cdiv(SLICES, BLOCK_S), tl.num_programs(0)):
        depth = _load_depth(logits, scores, flags, row, _tokens(at, BLOCK_S), highest, per_temperature, V)
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
    ints,
    floats,
    counts,
    masses,
    cuts,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where top_k cuts; the coarse bin in which top_p's share of the kept mass ends, and its fine histogram."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    bins = tl.arange(0, BINS)
    sequence = row // WIDTH
    flags = _flags(positions, ints, row, sequence)
    per_temperature = tl.load(floats + sequence * FLOATS + PER_TEMPERATURE)
    top_k = tl.load(ints + sequence * INTS + TOP_K)
    top_p = tl.load(ints + sequence * INTS + TOP_P)
    wait_for_previous(PDL)
    if ((flags & FILTERED) == 0) | ((top_p == 0) & (tl.program_id(0) > 0)):
        return
    counts += row * COUNTS * BINS
    masses += row * MASSES * BINS
    cuts += row * CUTS
    number = tl.load(counts + BINS + bins)
    fine_mass = tl.load(masses + BINS + bins)
    coarse_mass = tl.load(masses + bins)
    k_bin, k_left, k_mass = tl.load(cuts + K_BIN), tl.load(cuts + K_LEFT), tl.load(cuts + K_MASS)
    _, highest = _highest(best, row, SLICES, PADDED)
    if top_k != 0:
        k_fine = tl.sum((tl.cumsum(number, 0) < k_left).to(tl.int64), 0)
        total = k_mass + tl.sum(tl.where(bins <= k_fine, fine_mass, 0), 0)
        if tl.program_id(0) == 0:
            tl.store(cuts + K_DEPTH, (((k_bin * BINS + k_fine) + 1) << FINE) - 1)
    else:
        total = tl.sum(coarse_mass, 0)
    if top_p != 0:
        # A token is kept if all more likely ones have less mass than this. Bins after the k-th token start with more.
        share = tl.maximum(_times_fraction(total, top_p), 1)
        before = tl.cumsum(coarse_mass, 0) - coarse_mass
        p_bin = tl.sum((before < share).to(tl.int32), 0) - 1
        if tl.program_id(0) == 0:
            tl.store(cuts + P_BIN, p_bin)
            tl.store(cuts + P_LEFT, share - tl.sum(tl.where(bins < p_bin, coarse_mass, 0), 0))
        for at in range(tl.program_id(0), tl.cdiv(SLICES, BLOCK_S), tl.num_programs(0)):
            depth = _load_depth(logits, scores, flags, row, _tokens(at, BLOCK_S), highest, per_temperature, V)
            counted = (depth >> COARSE) == p_bin
            fine = 2 * BINS + ((depth >> FINE) & (BINS - 1))
            tl.atomic_add(masses + fine, _mass(depth), mask=counted, sem="relaxed")


@kernel()
def weigh(
    positions,
    logits,
    best,
    scores,
    ints,
    floats,
    masses,
    cuts,
    weights,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last depth that all filters keep, and the mass that each slice keeps: weights [R, slices] int64."""
    let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    bins = tl.arange(0, BINS)
    sequence = row // WIDTH
    flags = _flags(positions, ints, row, sequence)
    per_temperature = tl.load(floats + sequence * FLOATS + PER_TEMPERATURE)
    top_k = tl.load(ints + sequence * INTS + TOP_K)
    top_p = tl.load(ints + sequence * INTS + TOP_P)
    last = tl.load(ints + sequence * INTS + MIN_P_DEPTH)
    wait_for_previous(PDL)
    if (flags & SAMPLED) == 0:
        return
    cuts += row * CUTS
    k_depth, p_bin, p_left = tl.load(cuts + K_DEPTH), tl.load(cuts + P_BIN), tl.load(cuts + P_LEFT)
    mass = tl.load(masses + (row * MASSES + 2) * BINS + bins, mask=bins < tl.where(top_p != 0, BINS, 0), other=0)
    _, highest = _highest(best, row, SLICES, PADDED)
    depth = _load_depth(logits, scores, flags, row, _tokens(tl.program_id(0), BLOCK_S), highest, per_temperature, V)
    if top_k != 0:
        last = tl.minimum(last, k_depth)
    if top_p != 0:
        p_fine = tl.sum(((tl.cumsum(mass, 0) - mass) < p_left).to(tl.int64), 0) - 1
        last = tl.minimum(last, (((p_bin * BINS + p_fine) + 1) << FINE) - 1)
    if tl.program_id(0) == 0:
        tl.store(cuts + DEPTH, last)
    at = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    kept = tl.sum(tl.where(depth <= last, _mass(depth), 0), 1)
    tl.store(weights + row * SLICES + at, kept, mask=at < SLICES)


@kernel()
def draw(
    positions,
    logits,
    best,
    best_at,
    scores,
    ints,
    floats,
    cuts,
    weights,
    history,
    tokens,
    host_tokens,
    steps,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of each row: -1 if a logit is NaN, or none is above -inf. Without drafts, also added to the history."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    sequence = row // WIDTH
    position = tl.load(positions + row, cache_modifier=".cg")
    flags = tl.load(ints + sequence * INTS + FLAGS)
    per_temperature = tl.load(floats + sequence * FLOATS + PER_TEMPERATURE)
    uniform = _uniform(tl.load(ints + sequence * INTS + SEED_KEY), position)
    wait_for_previous(PDL)
    if position < 0:
        return
    of_slices = tl.arange(0, PADDED)
    weight = tl.load(weights + row * SLICES + of_slices, mask=of_slices < SLICES, other=0)
    last = tl.load(cuts + row * CUTS + DEPTH)
    valid, token = _best(best, best_at, row, SLICES, PADDED)
    _, highest = _highest(best, row, SLICES, PADDED)
    if valid & ((flags & SAMPLED) != 0):
        target = _umulhi(uniform, tl.sum(weight, 0))
        # Invert the cumulative mass. `<=` skips tokens without mass.
        passed = tl.cumsum(weight, 0) <= target
        at = tl.sum(passed.to(tl.int32), 0)
        target -= tl.sum(tl.where(passed, weight, 0), 0)
        in_slice = at * SLICE + tl.arange(0, SLICE)
        depth = _load_depth(logits, scores, flags, row, in_slice, highest, per_temperature, V)
        mass = tl.where(depth <= last, _mass(depth), 0)
        token = at * SLICE + tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    _store_token(tokens, host_tokens, steps, row, token, RING)
    if WIDTH == 1:
        if valid & ((flags & PENALIZED) != 0):
            seen = history + row * V + token
            tl.store(seen, tl.load(seen) + 2)


@kernel()
def accept(
    tokens,  # [R] int64: the last token of each sequence, set here
    positions,  # [R] int32: its position, set here; below 0: the row is skipped
    drafts,  # [R, WIDTH - 1] int64; below 0: none
    chosen,  # [R, WIDTH] int64: after the last token, and after each draft
    ints,  # None: all rows are greedy
    history,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Accept drafts up to the first that is not the token chosen before it. Launch with one warp."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position < 0:
        return
    penalized = False
    if ints is not None:
        penalized = (tl.load(ints + row * INTS + FLAGS) & PENALIZED) != 0
    token = tl.load(chosen + row * WIDTH)
    agrees, number = token >= 0, 1
    for i in tl.static_range(WIDTH):
        if ints is not None:
            tl.atomic_add(history + row * V + tl.maximum(token, 0), 2, mask=agrees & penalized)
        if i + 1 < WIDTH:
            agrees &= tl.load(drafts + row * (WIDTH - 1) + i) == token
            token = tl.where(agrees, tl.load(chosen + row * WIDTH + i + 1), token)
            number += agrees.to(tl.int32)
            agrees &= token >= 0
    tl.store(tokens + row, token)
    tl.store(positions + row, position + number)


@triton.jit
def _flags(positions, ints, row, sequence):
    """The flags of a row; 0 if the row is skipped."""
    position = tl.load(positions + row, cache_modifier=".cg")
    return tl.where(position >= 0, tl.load(ints + sequence * INTS + FLAGS), 0)


@triton.jit
def _tokens(at, BLOCK_S: tl.constexpr):
    """Token ids of a program: [BLOCK_S, SLICE]."""
    return (at * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]) * SLICE + tl.arange(0, SLICE)[None, :]


@triton.jit
def _highest(best, row, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """The highest score of each slice, and of the row."""
    at = tl.arange(0, PADDED)
    each = tl.load(best + row * SLICES + at, mask=at < SLICES, other=-float("inf"))
    # A GPU's maximum ignores NaN: without this, bins might be negative.
    return each, tl.where(tl.max((each != each).to(tl.int32), 0) > 0, float("nan"), tl.max(each, 0))


@triton.jit
def _load_depth(logits, scores, flags, row, token, highest, per_temperature, V: tl.constexpr):
    """The depth of tokens below the row's best."""
    if (flags & (PENALIZED | BIASED)) != 0:
        x = tl.load(scores + row * V + token, mask=token < V, other=-float("inf"))
    else:
        x = tl.load(logits + row * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
    return _depth(x, highest, per_temperature)


@triton.jit
def _store_token(tokens, host_tokens, steps, row, token, RING: tl.constexpr):
    """Store the token as the next step's input, and in the host's ring."""
    tl.store(tokens + row, token)
    tl.store(host_tokens + tl.load(steps) % RING * tl.num_programs(0) + row, token)


@triton.jit
def _best(best, best_at, row, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """Whether the row has valid scores, and its best token, else -1."""
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
    depth = tl.where(x == highest, 0.0, (highest - x) * per_temperature)  # the highest may be infinite
    return tl.where(depth < MAX_DEPTH, depth, MAX_DEPTH).to(tl.int32)  # also if NaN


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
    """A uniform number in [0, 1) times 2^64, with 53 bits, from splitmix64."""
    x = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11) << 11
