"""The threads that share the loops of kernels.

A loop is cut into portions, and whichever thread is free takes the next one, the caller among them. So a thread that
the system has put aside, because something else runs too, delays at most the portion that it has; OpenMP's threads,
each with a part of its own, would all wait for it, at full speed. One that finds nothing to do looks again and again,
then lets others have its core, then sleeps.

While one caller has the threads, another goes through its loop alone: the bits are the same.
"""

from __future__ import annotations

import platform
import sys
import threading
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types

from infer.backend.cpu.simd import INT32, INT64, _call, _operation
from infer.backend.cpu.units import linked, unit

POINTER = ir.IntType(8).as_pointer()
SYMBOL = "infer_share"  # by which kernels know the unit
SHARE, WORK, USE = range(3)
# What threads have in common, in words that are a line of the cache apart. TICKET: the number of the loop, and in the
# lower half that of its next portion.
TICKET, DONE, PORTIONS, FUNCTION, DATA, TAKEN, SLEEPING, CALLS, THREADS = range(0, 72, 8)
EACH = 4  # portions for each thread
LOOKS, YIELDS = 2000, 10_000  # before a thread lets others go first, and before it sleeps
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
WAIT, WAKE = 128, 129  # within one process


def _word(builder: Any, index: Any) -> Any:
    """Its address: all words are a variable of the unit's."""
    module = builder.module
    if (words := module.globals.get("infer_words")) is None:
        words = ir.GlobalVariable(module, ir.ArrayType(INT64, 72), "infer_words")
        words.initializer, words.linkage, words.align = ir.Constant(words.value_type, None), "linkonce_odr", 64
    return builder.gep(words, [INT64(0), index])


def _futex(builder: Any, index: Any, operation: int, value: Any) -> None:
    at, nothing = builder.bitcast(_word(builder, index), POINTER), ir.Constant(POINTER, None)
    if (call := builder.module.globals.get("syscall")) is None:
        call = ir.Function(builder.module, ir.FunctionType(INT64, [INT64], var_arg=True), "syscall")
    builder.call(call, [INT64(FUTEX), at, INT64(operation), value, nothing, nothing, INT64(0)])


def _pause(builder: Any) -> None:
    if platform.machine() == "x86_64":
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif platform.machine() in ("aarch64", "arm64"):
        _call(builder, "llvm.aarch64.hint", ir.VoidType(), INT32(1))


def _sleep(builder: Any, index: Any, value: Any) -> None:
    """Until woken, if a word is still what it was."""
    if FUTEX is None:
        _call(builder, "usleep", INT32, INT32(100))
    else:
        _futex(builder, index, WAIT, builder.and_(value, INT64(2**32 - 1)))


def _wake(builder: Any, index: Any) -> None:
    if FUTEX is not None:
        _futex(builder, index, WAKE, INT64(2**30))


def _exchange(builder: Any, index: Any, before: Any, after: Any) -> Any:
    done = builder.cmpxchg(_word(builder, index), before, after, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(done, 1), INT64)


def _run(builder: Any, function: Any, data: Any, portion: Any, portions: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [POINTER, INT64, INT64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.inttoptr(data, POINTER), portion, portions])


read = _operation(types.int64, lambda b, i: b.load_atomic(_word(b, i), "seq_cst", 8), 1)
write = _operation(types.void, lambda b, i, value: b.store_atomic(value, _word(b, i), "seq_cst", 8), 2)
add = _operation(types.int64, lambda b, i, value: b.atomic_rmw("add", _word(b, i), value, "seq_cst"), 2)
exchange = _operation(types.int64, _exchange, 3)  # 1 if the word was what it is said to have been
pause = _operation(types.void, _pause, 0)
let_others = _operation(types.void, lambda b: _call(b, "sched_yield", INT32), 0)
sleep = _operation(types.void, _sleep, 2)
wake = _operation(types.void, _wake, 1)
run = _operation(types.void, _run, 4)


@linked
def _take_portion() -> Any:
    """Take the next portion, if there is one, and go through it."""
    ticket = read(TICKET)
    portion = ticket & 0xFFFFFFFF
    if portion >= read(PORTIONS) or exchange(TICKET, ticket, ticket + 1) == 0:
        return False
    run(read(FUNCTION), read(DATA), portion, read(PORTIONS))  # which stay, until all portions are done
    add(DONE, 1)
    return True


@linked
def _share(function: int, data: int, count: int) -> None:
    threads = read(THREADS)
    if threads < 2 or count < 2 or exchange(TAKEN, 0, 1) == 0:
        run(function, data, 0, 1)
        return
    portions = min(count, threads * EACH)
    write(PORTIONS, 0)
    write(FUNCTION, function)
    write(DATA, data)
    write(DONE, 0)
    write(TICKET, ((read(TICKET) >> 32) + 1) << 32)
    write(PORTIONS, portions)
    if read(SLEEPING) > 0:
        add(CALLS, 1)
        wake(CALLS)
    while read(TICKET) & 0xFFFFFFFF < portions:
        _take_portion()
    looks = 0
    while read(DONE) < portions:
        looks += 1
        if looks > LOOKS:
            let_others()
        pause()
    write(TAKEN, 0)


@linked
def _work(number: int) -> None:
    """Until fewer threads are asked for."""
    looks = 0
    while number < read(THREADS):
        calls = read(CALLS)
        if _take_portion():
            looks = 0
            continue
        looks += 1
        if looks <= LOOKS:
            pause()
        elif looks <= LOOKS + YIELDS:
            let_others()
        else:
            add(SLEEPING, 1)
            if read(TICKET) & 0xFFFFFFFF >= read(PORTIONS):
                sleep(CALLS, calls)
            add(SLEEPING, -1)
            looks = 0


@unit(types.void(*[types.int64] * 4))
def pool(what: int, function: int, data: int, count: int) -> None:
    if what == SHARE:
        _share(function, data, count)
    elif what == USE:
        write(THREADS, count)
        add(CALLS, 1)
        wake(CALLS)
    else:
        _work(count)


@cache
def start() -> None:
    """Before kernels are loaded, which call it by name."""
    binding.add_symbol(SYMBOL, pool.address)


_threads = 1  # the first is the caller's


def use_threads(count: int) -> None:
    """For all calls from now on."""
    global _threads
    if count == _threads:
        return
    start()
    pool(USE, 0, 0, count)
    for number in range(_threads, count):
        threading.Thread(target=pool, args=(WORK, 0, 0, number), name="infer kernels", daemon=True).start()
    _threads = count
