"""Processes that exchange what they have computed in memory that they share.

Each has a word there, which counts what it has given, and two areas, which it writes by turns: when it comes to one
again, all have taken what was there, since they have given something after it.
"""

from __future__ import annotations

from typing import Any

from numba import types

from infer.backend.cpu.pool import POINTER, YIELDS, let_others, pause
from infer.backend.cpu.simd import INT64, _call, _operation, load_integer
from infer.backend.cpu.units import linked, unit

LINE = 64  # bytes from one word to the next: a line of the cache
AREA = 1 << 22  # bytes of an area


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT64.as_pointer())


def _copy(builder: Any, to: Any, at: Any, count: Any) -> None:
    _call(builder, "memcpy", POINTER, builder.inttoptr(to, POINTER), builder.inttoptr(at, POINTER), count)


# In order with all other reads and writes: what a process has written before its word, another sees behind it.
read_word = _operation(types.int64, lambda b, at: b.load_atomic(_word(b, at), "seq_cst", 8), 1)
write_word = _operation(types.void, lambda b, at, value: b.store_atomic(value, _word(b, at), "seq_cst", 8), 2)
copy_bytes = _operation(types.void, _copy, 3)


@linked
def _met(words: int, count: int, number: int, looks: int) -> Any:
    """Whether all have given something for this exchange, by the last of so many looks."""
    for rank in range(count):
        while read_word(words + rank * LINE) < number:
            looks -= 1
            if looks < 0:
                return False
            if looks > YIELDS:
                pause()
            else:
                let_others()
    return True


@unit(types.void(*[types.int64] * 11))
def gather_rows(
    words: int, areas: int, rank: int, count: int, number: int, own: int, rows: int, widths: int, out: int, looks: int,
    met: int,
) -> None:  # fmt: skip
    """own: rows of widths[rank] bytes -> out: rows with those of all processes beside each other.

    number: of this exchange, counted from 1. met: becomes 1 when that is done; 0 after so many looks in vain: it may
    then be called again.
    """
    turn = areas + number % 2 * AREA
    copy_bytes(turn + rank * 2 * AREA, own, rows * load_integer(widths + rank * 8))
    write_word(words + rank * LINE, number)
    if not _met(words, count, number, looks):
        write_word(met, 0)
        return
    total = 0
    for other in range(count):
        total += load_integer(widths + other * 8)
    for other in range(count):
        width = load_integer(widths + other * 8)
        for row in range(rows):
            copy_bytes(out + row * total, turn + other * 2 * AREA + row * width, width)
        out += width
    write_word(met, 1)
