"""The columns of the table that tells kernels where a cache keeps a layer's keys and values, one line for each row.

Addresses of keys and values, bytes from one head to the next, positions kept (position p lies in slot p % SLOTS),
positions filled, and bits of a number.
"""

K, V, STRIDE, SLOTS, FILLED, BITS = range(6)
COLUMNS = 6
