"""`parallel_for`: loops that several threads share; and `shm_allgather`, the exchange between processes.

A loop is cut into portions. Whichever thread is free takes the next one, the caller included. A thread that the system
has suspended delays at most its current portion; OpenMP's threads, each with a fixed share, would all spin and wait for
it. A thread without work spins, then yields its core, then sleeps. While one caller has the threads, another caller
runs its loop alone: the bits are the same.

numba's own `prange` takes the interpreter's lock at the end of each loop, and much longer to compile.
"""

from __future__ import annotations

import inspect
import platform
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.backend.cpu.jit import inline, kernel, without_literals
from infer.backend.cpu.simd import INT32, INT64, call_llvm, load_i64, operation

emit: Any = cgutils  # which has no types
POINTER = ir.IntType(8).as_pointer()
SYMBOL = "infer_parallel_for"  # by which kernels call the thread pool
RUN, WORK, SET_COUNT = range(3)  # what the pool is called for
# State that the threads share, in words that are a cache line apart. TICKET: the number of the loop, and in the lower
# half the number of its next portion.
TICKET, DONE, PORTIONS, FUNCTION, DATA, BUSY, SLEEPING, CALLS, THREADS = range(0, 72, 8)
PORTIONS_PER_THREAD = 4
SPINS, YIELDS = 2000, 10_000  # before a thread yields its core, and before it sleeps
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
WAIT, WAKE = 128, 129  # within one process
CACHE_LINE = 64  # bytes
SHM_AREA = 1 << 22  # bytes of a shared area of `shm_allgather`


def _word(builder: Any, index: Any) -> Any:
    """The address of a word of the shared state, which is a global variable of the pool."""
    module = builder.module
    if (words := module.globals.get("infer_words")) is None:
        words = ir.GlobalVariable(module, ir.ArrayType(INT64, 72), "infer_words")
        words.initializer, words.linkage, words.align = ir.Constant(words.value_type, None), "linkonce_odr", 64
    return builder.gep(words, [INT64(0), index])


def _futex(builder: Any, index: Any, futex_op: int, value: Any) -> None:
    at, nothing = builder.bitcast(_word(builder, index), POINTER), ir.Constant(POINTER, None)
    if (call := builder.module.globals.get("syscall")) is None:
        call = ir.Function(builder.module, ir.FunctionType(INT64, [INT64], var_arg=True), "syscall")
    builder.call(call, [INT64(FUTEX), at, INT64(futex_op), value, nothing, nothing, INT64(0)])


def _pause(builder: Any) -> None:
    if platform.machine() == "x86_64":
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif platform.machine() in ("aarch64", "arm64"):
        call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), INT32(1))


def _sleep(builder: Any, index: Any, value: Any) -> None:
    """Sleeps until woken, if a word still has this value."""
    if FUTEX is None:
        call_llvm(builder, "usleep", INT32, INT32(100))
    else:
        _futex(builder, index, WAIT, builder.and_(value, INT64(2**32 - 1)))


def _wake(builder: Any, index: Any) -> None:
    if FUTEX is not None:
        _futex(builder, index, WAKE, INT64(2**30))


def _compare_exchange(builder: Any, index: Any, before: Any, after: Any) -> Any:
    done = builder.cmpxchg(_word(builder, index), before, after, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(done, 1), INT64)


def _call_portion(builder: Any, function: Any, data: Any, portion: Any, portions: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [POINTER, INT64, INT64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.inttoptr(data, POINTER), portion, portions])


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT64.as_pointer())


def _copy(builder: Any, to: Any, at: Any, count: Any) -> None:
    call_llvm(builder, "memcpy", POINTER, builder.inttoptr(to, POINTER), builder.inttoptr(at, POINTER), count)


read = operation(types.int64, lambda b, i: b.load_atomic(_word(b, i), "seq_cst", 8), 1)
write = operation(types.void, lambda b, i, value: b.store_atomic(value, _word(b, i), "seq_cst", 8), 2)
add = operation(types.int64, lambda b, i, value: b.atomic_rmw("add", _word(b, i), value, "seq_cst"), 2)
compare_exchange = operation(types.int64, _compare_exchange, 3)  # 1 if the word had the value `before`
pause = operation(types.void, _pause, 0)
yield_core = operation(types.void, lambda b: call_llvm(b, "sched_yield", INT32), 0)
sleep = operation(types.void, _sleep, 2)
wake = operation(types.void, _wake, 1)
call_portion = operation(types.void, _call_portion, 4)
# Of memory that processes share. Sequentially consistent: a process that reads a word sees all writes before it.
read_shared = operation(types.int64, lambda b, at: b.load_atomic(_pointer(b, at), "seq_cst", 8), 1)
write_shared = operation(types.void, lambda b, at, value: b.store_atomic(value, _pointer(b, at), "seq_cst", 8), 2)
copy_bytes = operation(types.void, _copy, 3)


@inline
def _take_portion() -> Any:
    """Takes the next portion, if there is one, and runs it."""
    ticket = read(TICKET)
    portion = ticket & 0xFFFFFFFF
    if portion >= read(PORTIONS) or compare_exchange(TICKET, ticket, ticket + 1) == 0:
        return False
    call_portion(read(FUNCTION), read(DATA), portion, read(PORTIONS))  # unchanged until all portions are done
    add(DONE, 1)
    return True


@inline
def _run(function: int, data: int, count: int) -> None:
    threads = read(THREADS)
    if threads < 2 or count < 2 or compare_exchange(BUSY, 0, 1) == 0:
        call_portion(function, data, 0, 1)
        return
    portions = min(count, threads * PORTIONS_PER_THREAD)
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
    spins = 0
    while read(DONE) < portions:
        spins += 1
        if spins > SPINS:
            yield_core()
        pause()
    write(BUSY, 0)


@inline
def _work(number: int) -> None:
    """The loop of a thread; it ends when fewer threads are set."""
    spins = 0
    while number < read(THREADS):
        calls = read(CALLS)
        if _take_portion():
            spins = 0
            continue
        spins += 1
        if spins <= SPINS:
            pause()
        elif spins <= SPINS + YIELDS:
            yield_core()
        else:
            add(SLEEPING, 1)
            if read(TICKET) & 0xFFFFFFFF >= read(PORTIONS):
                sleep(CALLS, calls)
            add(SLEEPING, -1)
            spins = 0


@kernel(types.void(*[types.int64] * 4), symbol=SYMBOL)
def thread_pool(what: int, function: int, data: int, count: int) -> None:
    if what == RUN:
        _run(function, data, count)
    elif what == SET_COUNT:
        write(THREADS, count)
        add(CALLS, 1)
        wake(CALLS)
    else:
        _work(count)


thread_count = 1  # the caller's thread included
COUNT = np.ones(1, np.int64)  # the same, for kernels


def use_threads(count: int) -> None:
    """Sets the number of threads for all calls from now on."""
    global thread_count
    if count == thread_count:
        return
    thread_pool(SET_COUNT, 0, 0, count)
    for number in range(thread_count, count):
        threading.Thread(target=thread_pool, args=(WORK, 0, 0, number), name="infer kernels", daemon=True).start()
    thread_count = COUNT[0] = count


def parallel_for(function: Any) -> Any:
    """Called with a count and more, it calls function(i, ...) for each i below the count.

    function: a Python function, or an `inline` one, whose code is then shared with its other callers.
    """
    body = function if hasattr(function, "py_func") else inline(function, forceinline=True)

    def definition(context: Any, count: Any, *arguments: Any) -> Any:
        given = types.int64, *without_literals(arguments)
        body.get_call_template(given, {})
        return types.void(*given), partial(_emit_loop, body.overloads[given])

    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(body.py_func).parameters.values()
    definition.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(definition)


def _emit_loop(body: Any, context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that has the pool's threads call what `_emit_portion` emits, with the arguments in memory."""
    job = emit.alloca_once_value(builder, emit.pack_struct(builder, args))
    function = _emit_portion(body, context, builder.module, job.type)
    pool_type = ir.FunctionType(ir.VoidType(), [INT64] * 4)
    pool = emit.get_or_insert_function(builder.module, pool_type, SYMBOL)
    builder.call(pool, [INT64(RUN), builder.ptrtoint(function, INT64), builder.ptrtoint(job, INT64), args[0]])
    return context.get_dummy_value()


def _emit_portion(body: Any, context: Any, module: Any, job_type: Any) -> Any:
    """A function that runs one of `portions` equal portions of a loop, and calls the loop's body for each index."""
    function_type = ir.FunctionType(ir.VoidType(), [POINTER, INT64, INT64])
    name = module.get_unique_name(f"portion_{body.fndesc.qualname}")
    function = ir.Function(module, function_type, emit.normalize_ir_text(name))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    data, portion, portions = function.args
    count, *arguments = emit.unpack_tuple(builder, builder.load(builder.bitcast(data, job_type)))
    following = builder.add(portion, INT64(1))
    start, stop = (builder.sdiv(builder.mul(count, each), portions) for each in (portion, following))
    context.add_linking_libs([body.library])
    callee = context.declare_function(module, body.fndesc)
    with emit.for_range_slice(builder, start, stop, INT64(1)) as (index, _):
        given = [index, *arguments]
        context.call_conv.call_function(builder, callee, types.void, body.signature.args, given)
    builder.ret_void()
    return function


@inline
def _barrier(words: int, count: int, number: int, spins: int) -> Any:
    """Whether all processes have written something for this exchange, after at most so many spins."""
    for rank in range(count):
        while read_shared(words + rank * CACHE_LINE) < number:
            spins -= 1
            if spins < 0:
                return False
            if spins > YIELDS:
                pause()
            else:
                yield_core()
    return True


@kernel(types.void(*[types.int64] * 11))
def shm_allgather(
    words: int, areas: int, rank: int, count: int, number: int, own: int, rows: int, widths: int, out: int, spins: int,
    done: int,
) -> None:  # fmt: skip
    """own: rows of widths[rank] bytes -> out: rows with the parts of all processes side by side, in shared memory.

    Each process has a word, which counts what it has written, and two areas, which it writes in turn: when it comes to
    an area again, all processes have read it, since they have written something after it. number: of this exchange,
    counted from 1. done: becomes 1; or 0 after so many spins, and the kernel may then be called again.
    """
    turn = areas + number % 2 * SHM_AREA
    copy_bytes(turn + rank * 2 * SHM_AREA, own, rows * load_i64(widths + rank * 8))
    write_shared(words + rank * CACHE_LINE, number)
    if not _barrier(words, count, number, spins):
        write_shared(done, 0)
        return
    total = 0
    for other in range(count):
        total += load_i64(widths + other * 8)
    for other in range(count):
        width = load_i64(widths + other * 8)
        for row in range(rows):
            copy_bytes(out + row * total, turn + other * 2 * SHM_AREA + row * width, width)
        out += width
    write_shared(done, 1)
