"""The inner loop of products on the CPU: a tile of several rows of W with several rows of x.

Each output is summed in eight lanes along the columns, and every lane from the first column to the last. Then the lanes
are added in one order: l0 + l4, l1 + l5, l2 + l6 and l3 + l7; of these the first two, the last two, and both. A tile
decides which outputs are computed side by side and nothing else, so the bits of an output depend on its row of W and
its row of x alone.

The loop is emitted as LLVM code, for tiles of any shape: numba would infer a type for each of dozens of variables, and
compile slowly. Vectors are as wide as the registers. One of sixteen floats (AVX-512) holds two rows of x side by side,
and meets the same eight columns of W in both halves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from infer.backend.cpu.simd import FLOAT, INT32, _all, _call, _load, _pick, _prefetch, _store, _typed_intrinsic
from infer.backend.cpu.units import linked

INT64 = ir.IntType(64)
LANES = 8


def _shape() -> tuple[int, int, int]:
    """Floats of a register; rows of W and rows of x of the largest tile whose sums fit into registers."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    if "+avx512f" in features:
        return 16, 4, 12
    return (8 if "+avx" in features else 4), 3, 4


WIDTH, W_ROWS, X_ROWS = _shape()
# Rows of x are cut into panels: as many as possible of the largest size, then smaller ones.
PANELS = (X_ROWS, *(rows for rows in ((3, 2, 1) if WIDTH == 4 else (8, 4, 2, 1)) if rows < X_ROWS))
# Bytes that loops ask for before they need them, where that helps: products and scores, and sums of values.
AHEAD, VALUES_AHEAD = {16: (1024, 1024), 8: (0, 0), 4: (0, 4096)}[WIDTH]
# Columns that `mix_tile` sums in registers, for all rows of a panel: of one with up to FEW rows, or with more.
FEW, FEW_MIXED, MIXED, LAST_MIXED = 4, 64 if WIDTH == 16 else 16, 32 if WIDTH == 16 else 16, 16


@linked
def panel_rows(rows: int) -> Any:
    """How many of these rows of x the next panel has."""
    for size in PANELS:
        if size <= rows:
            return size
    return 0


@_typed_intrinsic
def multiply_tile(
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

    All are addresses, and strides in bytes. Rows of W are `w_row` apart, and their eights of columns `w_step`. x is a
    packed panel: eight columns of each of its rows, then the next eight. A sum can take several calls: one that is not
    the last leaves it in `carry`, where one that is not the first finds it.
    """

    return types.void(*[types.int64] * 11), _by_panel("infer_tile", lambda b, rows: _Tile(b, rows).emit)


@_typed_intrinsic
def mix_tile(
    context: Any, rows: Any, weights: Any, weights_row: Any, v: Any, v_row: Any, count: Any, out: Any, out_row: Any
) -> Any:
    """out [rows, M] += weights [rows, count] v [count, M], one v after the other; rows: one of PANELS.

    M: FEW_MIXED or MIXED, according to the rows.
    """
    make = lambda b, rows: partial(_mix, b, rows, FEW_MIXED if rows <= FEW else MIXED)  # noqa: E731
    return types.void(*[types.int64] * 8), _by_panel("infer_mix", make)


@_typed_intrinsic
def mix_last(
    context: Any, rows: Any, weights: Any, weights_row: Any, v: Any, v_row: Any, count: Any, out: Any, out_row: Any
) -> Any:
    """The same of LAST_MIXED columns."""
    make = lambda b, rows: partial(_mix, b, rows, LAST_MIXED)  # noqa: E731
    return types.void(*[types.int64] * 8), _by_panel("infer_mix_last", make)


def _by_panel(name: str, make: Callable[[Any, int], Callable[..., None]]) -> Callable[..., Any]:
    """Code that calls one of several functions, by its first argument. make: what emits that of so many rows."""

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


def _mix(
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
    before = {name: _load(b, outs[name], vector) for name in names}
    loop, end = b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    left, weights_at, v_at = (b.phi(INT64) for _ in range(3))
    sums = {name: b.phi(vector) for name in names}
    after = {}
    values = [_load(b, b.add(v_at, INT64(column * 4)), vector) for column in range(0, columns, WIDTH)]
    for line in range(0, columns * 4 if VALUES_AHEAD else 0, 64):
        _prefetch(b, b.add(v_at, INT64(VALUES_AHEAD + line)))
    for t in range(rows):
        weight = _load(b, b.add(weights_at, b.mul(weights_row, INT64(t))), FLOAT)
        first = b.insert_element(ir.Constant(vector, ir.Undefined), weight, INT32(0))
        splat = _pick(b, first, [0] * WIDTH)
        for column in range(0, columns, WIDTH):
            fma = f"llvm.fma.v{WIDTH}f32"
            after[t, column] = _call(b, fma, vector, values[column // WIDTH], splat, sums[t, column])
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
        _store(b, outs[name], after[name])


class _Tile:
    """Emits a tile's code."""

    def __init__(self, builder: Any, x_rows: int, w_rows: int = W_ROWS, width: int = WIDTH) -> None:
        if x_rows % max(1, width // LANES):  # nothing to put beside the last row
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
        before = [_load(b, self._at(carry, n * size), self.vector) for n in range(len(self.names))]
        b.branch(loop)

        b.position_at_end(loop)
        left, w_at, x_at = (self._phi(value, value, start, carried) for value in (steps, w, x))
        sums = {
            name: self._phi(_all(self.vector, 0.0), value, start, carried)
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
            _store(b, self._at(carry, n * size), after[name])
        b.branch(end)

        b.position_at_end(finish)
        for vector, outputs in self._reduce(after):
            for at in range(0, self.width, 4):
                self._store_outputs(vector, outputs[at : at + 4], at, out, out_row)
        b.branch(end)
        b.position_at_end(end)

    def _step(self, sums: dict[Any, Any], w_at: Any, w_row: Any, x_at: Any) -> dict[Any, Any]:
        """Eight columns more."""
        b, after = self.builder, dict(sums)
        rows = [b.add(w_at, b.mul(w_row, INT64(i))) for i in range(self.w_rows)]
        for part in range(self.parts):
            of_w = [self._load_weights(row, part) for row in rows]
            for t in range(0, self.x_rows, self.beside):
                of_x = _load(b, self._at(x_at, t * LANES * 4 + part * self.width * 4), self.vector)
                for i in range(self.w_rows):
                    fma = f"llvm.fma.v{self.width}f32"
                    after[i, t, part] = _call(b, fma, self.vector, of_w[i], of_x, after[i, t, part])
            # LLVM would load all parts first, and have too few registers for them.
            b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return after

    def _load_weights(self, at: Any, part: int) -> Any:
        at = self._at(at, part * self.width * 4)
        lanes = _load(self.builder, at, ir.VectorType(FLOAT, min(self.width, LANES)))
        return _pick(self.builder, lanes, list(range(LANES)) * self.beside) if self.beside > 1 else lanes

    def _reduce(self, sums: dict[Any, Any]) -> list[tuple[Any, list[tuple[int, int]]]]:
        """Vectors of outputs, and of each lane the row of W and the row of x."""
        b, many = self.builder, max(1, self.width // 4)  # outputs that a register of four lanes each holds
        if self.w_rows % 4 == 0:  # in such an order that the four outputs of a row of x come to lie side by side
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
            for one, other in _in_twos(order):
                lower, upper = (self._shuffle(sums[*one, 0], sums[*other, 0], low, high) for high in (0, 4))
                fours.append((b.fadd(lower, upper), [(i, t + n) for i, t in (one, other) for n in range(self.beside)]))
        twos = [(self._neighbours(u, v), list(zip(us, vs, strict=True))) for (u, us), (v, vs) in _in_twos(fours)]
        return [
            (self._neighbours(u, v), [output for pair in zip(us, vs, strict=True) for two in pair for output in two])
            for (u, us), (v, vs) in _in_twos(twos)
        ]

    def _neighbours(self, u: Any, v: Any) -> Any:
        """Of each four lanes: u0 + u1, u2 + u3, v0 + v1, v2 + v3."""
        evens = [at + lane for at in range(0, self.width, 4) for lane in (0, 2, self.width, self.width + 2)]
        return self.builder.fadd(self._shuffle(u, v, evens, 0), self._shuffle(u, v, evens, 1))

    def _store_outputs(self, vector: Any, outputs: list[tuple[int, int]], at: int, out: Any, out_row: Any) -> None:
        """Four lanes of a vector, from `at` on. Some outputs may be there twice."""
        b, (i, t) = self.builder, outputs[0]
        if outputs == [(i + n, t) for n in range(4)]:
            four = vector if self.width == 4 else _pick(b, vector, list(range(at, at + 4)))
            _store(b, self._output(out, out_row, i, t), four)
        else:
            for (i, t), lane in {output: at + n for n, output in enumerate(outputs)}.items():
                _store(b, self._output(out, out_row, i, t), b.extract_element(vector, INT32(lane)))

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


def _in_twos(items: list[Any]) -> list[tuple[Any, Any]]:
    """Two by two; the last one with itself, where it is alone."""
    return [(items[n], items[min(n + 1, len(items) - 1)]) for n in range(0, len(items), 2)]
