"""The units of a draw, which the host (`ops/draw.py`) and the device (`gpu_sample.py`) share.

A token's depth says how far below the likeliest it is: log2(p_max / p), in units of 2^-25 octaves. Its mass is
2^44 * 2^-depth, rounded down. Both are whole numbers: a sum of masses does not depend on its order.

2^-depth is a shift by the whole octaves, times a polynomial in the next 12 bits of the depth (which the host looks up),
times a line in the last 13. The relative error is below 7e-9, where one unit of depth is 2e-8, and more depth is never
more mass.
"""

OCTAVE = 25  # bits of a depth below a whole octave
MAX_DEPTH = 45 << OCTAVE  # 31 nats: from there on a token has no mass
COARSE, FINE = 20, 9  # bits of a depth below its coarse and its fine bin. Of a fine bin, filters keep all or nothing

MASS = 44  # bits: the masses of 2^18 tokens fit int64
LINE = 13  # bits of a depth that the line is of
SLOPE = 181693  # 2^-x = 1 - SLOPE * x / 2^43 for x units of depth below 2^LINE
# 2^-f = 1 - f * (c1 - f * (c2 - ... f * c6)) for f from 0 to 1, in units of 2^-32
HALVING = (2977043972, 1031755803, 238330986, 41142263, 5475002, 468251)
