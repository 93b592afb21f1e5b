"""The inner loops of GEMM and attention: a tile of several rows of W with several rows of x.

Each output is summed in eight lanes along the columns, every lane from the first column to the last. Then the lanes are
added in one order: l0 + l4, l1 + l5, l2 + l6 and l3 + l7; of these the first two, the last two, and both. A tile only
decides which outputs are computed together, so the bits of an output depend on its row of W and its row of x alone.

The loop is emitted as LLVM code, for tiles of any shape: numba would infer a type for each of dozens of variables, and
compile slowly. Vectors are as wide as the registers. A vector of sixteen floats (AVX-512) holds two rows of x, and is
multiplied with the same eight columns of W in both halves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from infer.backend.cpu.jit import inline
from infer.backend.cpu.simd import (
    FLOAT,
    INT32,
    INT64,
    call_llvm,
    constant,
    emit_load,
    emit_prefetch,
    emit_store,
    shuffle,
    typed_intrinsic,
)

LANES = 8


def _shape() -> tuple[int, int, int]:
    """Floats of a register; rows of W and of x in the largest tile whose sums fit into registers."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    if "+avx512f" in features:
        return 16, 4, 12
    return (8 if "+avx" in features else 4), 3, 4


WIDTH, W_ROWS, X_ROWS = _shape()
# Rows of x are cut into panels: as many as possible of the largest size, then smaller ones.
PANELS = (X_ROWS, *(rows for rows in ((3, 2, 1) if WIDTH == 4 else (8, 4, 2, 1)) if rows < X_ROWS))
# Prefetch distances, where that helps: of weights, and of the keys and values of attention.
PREFETCH_WEIGHTS_BYTES, PREFETCH_KEYS_BYTES, PREFETCH_VALUES_BYTES = {
    16: (6144, 1024, 1024),
    8: (0, 0, 0),
    4: (0, 0, 4096),
}[WIDTH]
# Columns that `pv_tile` sums in registers, for all rows of a panel: with up to PV_FEW_ROWS rows, or with more.
PV_FEW_ROWS, PV_FEW_COLUMNS, PV_COLUMNS, PV_LAST_COLUMNS = 4, 64 if WIDTH == 16 else 16, 32 if WIDTH == 16 else 16, 16


@inline
def panel_rows(rows: int) -> Any:
    """The size of the next panel for so many rows of x."""
    for size in PANELS:
        if size <= rows:
            return size
    return 0


@typed_intrinsic
def gemm_tile(
    context: Any,
    x_rows: Any,
    w: Any,
    w_row: Any,
    w_step: Any,
    x: Any,
    steps: Any,
    carry: Any,
    first: Any,
    last: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """out [x_rows, W_ROWS] = x W^T, with 8 * steps columns, at least 8; x_rows: one of PANELS.

    All are addresses, and strides in bytes. Rows of W are `w_row` apart, and their groups of eight columns `w_step`.
    x is a packed panel: eight columns of each of its rows, then the next eight. A sum can take several calls: all but
    the last store it in `carry`, and all but the first continue from there.
    """
    return types.void(*[types.int64] * 11), _by_panel("infer_tile", lambda b, rows: _GemmTile(b, rows).emit)


@typed_intrinsic
def pv_tile(
    context: Any, rows: Any, weights: Any, weights_row: Any, v: Any, v_row: Any, count: Any, out: Any, out_row: Any
) -> Any:
    """P V of attention: out [rows, M] += weights [rows, count] v [count, M], one v after the other; rows: of PANELS.

    M: PV_FEW_COLUMNS with up to PV_FEW_ROWS rows, otherwise PV_COLUMNS.
    """
    make = lambda b, rows: partial(_emit_pv, b, rows, PV_FEW_COLUMNS if rows <= PV_FEW_ROWS else PV_COLUMNS)  # noqa: E731
    return types.void(*[types.int64] * 8), _by_panel("infer_mix", make)


@typed_intrinsic
def pv_last_tile(
    context: Any, rows: Any, weights: Any, weights_row: Any, v: Any, v_row: Any, count: Any, out: Any, out_row: Any
) -> Any:
    """The same for PV_LAST_COLUMNS columns."""
    make = lambda b, rows: partial(_emit_pv, b, rows, PV_LAST_COLUMNS)  # noqa: E731
    return types.void(*[types.int64] * 8), _by_panel("infer_mix_last", make)


def _by_panel(name: str, make: Callable[[Any, int], Callable[..., None]]) -> Callable[..., Any]:
    """Code that calls the function for a number of rows, its first argument. make: emits the function for some rows."""

    def emitted(module: Any, rows: int, arity: int) -> Any:
        if (made := module.globals.get(f"{name}_{rows}")) is None:
            made = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * arity), f"{name}_{rows}")
            made.linkage = "linkonce_odr"
            made.attributes.add("noinline")
            builder = ir.IRBuilder(made.append_basic_block())
            make(builder, rows)(*made.args)
            builder.ret_void()
        return made

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        end = builder.append_basic_block()
        choice = builder.switch(args[0], end)
        for rows in PANELS:
            block = builder.append_basic_block()
            choice.add_case(INT64(rows), block)
            builder.position_at_end(block)
            builder.call(emitted(builder.module, rows, len(args) - 1), args[1:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return codegen


def _emit_pv(
    b: Any,
    rows: int,
    columns: int,
    weights: Any,
    weights_row: Any,
    v: Any,
    v_row: Any,
    count: Any,
    out: Any,
    out_row: Any,
) -> None:
    vector, start = ir.VectorType(FLOAT, WIDTH), b.block
    names = [(t, column) for t in range(rows) for column in range(0, columns, WIDTH)]
    outs = {(t, column): b.add(b.add(out, b.mul(out_row, INT64(t))), INT64(column * 4)) for t, column in names}
    before = {name: emit_load(b, outs[name], vector) for name in names}
    loop, end = b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    left, weights_at, v_at = (b.phi(INT64) for _ in range(3))
    sums = {name: b.phi(vector) for name in names}
    after = {}
    values = [emit_load(b, b.add(v_at, INT64(column * 4)), vector) for column in range(0, columns, WIDTH)]
    for line in range(0, columns * 4 if PREFETCH_VALUES_BYTES else 0, 64):
        emit_prefetch(b, b.add(v_at, INT64(PREFETCH_VALUES_BYTES + line)))
    for t in range(rows):
        weight = emit_load(b, b.add(weights_at, b.mul(weights_row, INT64(t))), FLOAT)
        first = b.insert_element(ir.Constant(vector, ir.Undefined), weight, INT32(0))
        splat = shuffle(b, first, [0] * WIDTH)
        for column in range(0, columns, WIDTH):
            fma = f"llvm.fma.v{WIDTH}f32"
            after[t, column] = call_llvm(b, fma, vector, values[column // WIDTH], splat, sums[t, column])
    fewer = b.sub(left, INT64(1))
    for phi, value, following in (
        (left, count, fewer),
        (weights_at, weights, b.add(weights_at, INT64(4))),
        (v_at, v, b.add(v_at, v_row)),
        *((sums[name], before[name], after[name]) for name in names),
    ):
        phi.add_incoming(value, start)
        phi.add_incoming(following, loop)
    b.cbranch(b.icmp_signed(">", fewer, INT64(0)), loop, end)
    b.position_at_end(end)
    for name in names:
        emit_store(b, outs[name], after[name])


class _GemmTile:
    """Emits the code of a `gemm_tile`."""

    def __init__(self, builder: Any, x_rows: int, w_rows: int = W_ROWS, width: int = WIDTH) -> None:
        if x_rows % max(1, width // LANES):  # the last row would be alone in its register
            width = LANES
        self.builder, self.w_rows, self.x_rows, self.width = builder, w_rows, x_rows, width
        self.beside = max(1, width // LANES)  # rows of x in a register
        self.parts = max(1, LANES // width)  # registers that eight lanes take
        self.vector = ir.VectorType(FLOAT, width)
        self.names = [
            (i, t, part) for i in range(w_rows) for t in range(0, x_rows, self.beside) for part in range(self.parts)
        ]

    def emit(
        self,
        w: Any,
        w_row: Any,
        w_step: Any,
        x: Any,
        steps: Any,
        carry: Any,
        first: Any,
        last: Any,
        out: Any,
        out_row: Any,
    ) -> None:
        b, size = self.builder, self.width * 4
        start = b.block
        carried, loop, done, keep, finish, end = (
            b.append_basic_block(name) for name in ("carried", "loop", "done", "keep", "finish", "end")
        )
        b.cbranch(b.icmp_signed("!=", first, INT64(0)), loop, carried)
        b.position_at_end(carried)
        before = [emit_load(b, self._at(carry, n * size), self.vector) for n in range(len(self.names))]
        b.branch(loop)

        b.position_at_end(loop)
        left, w_at, x_at = (self._phi(value, value, start, carried) for value in (steps, w, x))
        sums = {
            name: self._phi(constant(self.vector, 0.0), value, start, carried)
            for name, value in zip(self.names, before, strict=True)
        }
        after = self._step(sums, w_at, w_row, x_at)
        fewer = b.sub(left, INT64(1))
        left.add_incoming(fewer, loop)
        w_at.add_incoming(b.add(w_at, w_step), loop)
        x_at.add_incoming(self._at(x_at, self.x_rows * LANES * 4), loop)
        for name in self.names:
            sums[name].add_incoming(after[name], loop)
        b.cbranch(b.icmp_signed(">", fewer, INT64(0)), loop, done)

        b.position_at_end(done)
        b.cbranch(b.icmp_signed("!=", last, INT64(0)), finish, keep)
        b.position_at_end(keep)
        for n, name in enumerate(self.names):
            emit_store(b, self._at(carry, n * size), after[name])
        b.branch(end)

        b.position_at_end(finish)
        for vector, outputs in self._reduce(after):
            for at in range(0, self.width, 4):
                self._store_outputs(vector, outputs[at : at + 4], at, out, out_row)
        b.branch(end)
        b.position_at_end(end)

    def _step(self, sums: dict[Any, Any], w_at: Any, w_row: Any, x_at: Any) -> dict[Any, Any]:
        """The next eight columns."""
        b, after = self.builder, dict(sums)
        rows = [b.add(w_at, b.mul(w_row, INT64(i))) for i in range(self.w_rows)]
        for part in range(self.parts):
            of_w = [self._load_weights(row, part) for row in rows]
            for t in range(0, self.x_rows, self.beside):
                of_x = emit_load(b, self._at(x_at, t * LANES * 4 + part * self.width * 4), self.vector)
                for i in range(self.w_rows):
                    fma = f"llvm.fma.v{self.width}f32"
                    after[i, t, part] = call_llvm(b, fma, self.vector, of_w[i], of_x, after[i, t, part])
            # Otherwise LLVM loads all parts first, and runs out of registers.
            b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return after

    def _load_weights(self, at: Any, part: int) -> Any:
        at = self._at(at, part * self.width * 4)
        lanes = emit_load(self.builder, at, ir.VectorType(FLOAT, min(self.width, LANES)))
        return shuffle(self.builder, lanes, list(range(LANES)) * self.beside) if self.beside > 1 else lanes

    def _reduce(self, sums: dict[Any, Any]) -> list[tuple[Any, list[tuple[int, int]]]]:
        """Vectors of outputs, and for each lane its row of W and its row of x."""
        b, many = self.builder, max(1, self.width // 4)  # outputs of a register, four lanes each
        if self.w_rows % 4 == 0:  # an order in which the four outputs of a row of x become adjacent
            order = [
                (i, t)
                for group in range(0, self.x_rows, many)
                for i in range(self.w_rows)
                for t in range(group, min(group + many, self.x_rows), self.beside)
            ]
        else:
            order = [(i, t) for i in range(self.w_rows) for t in range(0, self.x_rows, self.beside)]
        fours: list[tuple[Any, list[Any]]] = []
        if self.parts > 1:
            fours = [(b.fadd(sums[i, t, 0], sums[i, t, 1]), [(i, t)]) for i, t in order]
        else:
            low = [lane for lane in range(2 * self.width) if lane % LANES < 4]
            for one, other in _pairs(order):
                lower, upper = (self._shuffle(sums[*one, 0], sums[*other, 0], low, high) for high in (0, 4))
                fours.append((b.fadd(lower, upper), [(i, t + n) for i, t in (one, other) for n in range(self.beside)]))
        twos = [(self._add_neighbors(u, v), list(zip(us, vs, strict=True))) for (u, us), (v, vs) in _pairs(fours)]
        return [
            (self._add_neighbors(u, v), [output for pair in zip(us, vs, strict=True) for two in pair for output in two])
            for (u, us), (v, vs) in _pairs(twos)
        ]

    def _add_neighbors(self, u: Any, v: Any) -> Any:
        """For each four lanes: u0 + u1, u2 + u3, v0 + v1, v2 + v3."""
        evens = [at + lane for at in range(0, self.width, 4) for lane in (0, 2, self.width, self.width + 2)]
        return self.builder.fadd(self._shuffle(u, v, evens, 0), self._shuffle(u, v, evens, 1))

    def _store_outputs(self, vector: Any, outputs: list[tuple[int, int]], at: int, out: Any, out_row: Any) -> None:
        """Stores four lanes of a vector, from `at` on. Some outputs may occur twice."""
        b, (i, t) = self.builder, outputs[0]
        if outputs == [(i + n, t) for n in range(4)]:
            four = vector if self.width == 4 else shuffle(b, vector, list(range(at, at + 4)))
            emit_store(b, self._output(out, out_row, i, t), four)
        else:
            for (i, t), lane in {output: at + n for n, output in enumerate(outputs)}.items():
                emit_store(b, self._output(out, out_row, i, t), b.extract_element(vector, INT32(lane)))

    def _output(self, out: Any, out_row: Any, i: int, t: int) -> Any:
        return self._at(self.builder.add(out, self.builder.mul(out_row, INT64(t))), i * 4)

    def _at(self, address: Any, offset: int) -> Any:
        return self.builder.add(address, INT64(offset))

    def _phi(self, value: Any, other: Any, block: Any, other_block: Any) -> Any:
        phi = self.builder.phi(value.type)
        phi.add_incoming(value, block)
        phi.add_incoming(other, other_block)
        return phi

    def _shuffle(self, u: Any, v: Any, lanes: list[int], offset: int) -> Any:
        mask = ir.Constant(ir.VectorType(INT32, len(lanes)), [lane + offset for lane in lanes])
        return self.builder.shuffle_vector(u, v, mask)


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs; an odd last item is paired with itself."""
    return [(items[n], items[min(n + 1, len(items) - 1)]) for n in range(0, len(items), 2)]
