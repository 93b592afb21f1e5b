"""How much is tested: `make test` covers each choice once, `make test-all` (INFER_TEST_ALL=1) all of them together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, combinations, product
from types import MappingProxyType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Choices = Mapping[str, Iterable[Any]]
ALL = os.environ.get("INFER_TEST_ALL") == "1"


everything = pytest.mark.skipif(not ALL, reason="in `make test-all`")


def amount(everything: T, enough: T) -> T:
    return everything if ALL else enough


def pairs(joint: Choices = MappingProxyType({}), /, **choices: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of these choices; in `make test` by enough of it that each two choices meet.

    joint: choices of several parameters at once, by their names: {"cls, options": [(KVCache, {}), ...]}.
    """
    return _parametrize(dict(joint) | choices, covering)


def once(joint: Choices = MappingProxyType({}), /, **choices: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of these choices; in `make test` by enough of it that each choice occurs."""
    return _parametrize(
        dict(joint) | choices, lambda sizes: [tuple(i % size for size in sizes) for i in range(max(sizes))]
    )


def _parametrize(
    choices: Mapping[str, Iterable[Any]], enough: Callable[[Sequence[int]], list[tuple[int, ...]]]
) -> pytest.MarkDecorator:
    columns = [[value if "," in names else (value,) for value in column] for names, column in choices.items()]
    sizes = [len(column) for column in columns]
    rows = list(product(*map(range, sizes))) if ALL else enough(sizes)
    names = [name.strip() for each in choices for name in each.split(",")]
    values = [tuple(chain(*(column[i] for column, i in zip(columns, row, strict=True)))) for row in rows]
    return pytest.mark.parametrize(names, values)


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows with an index below each size, such that any two indices of any two columns meet in one of them."""
    columns = list(combinations(range(len(sizes)), 2))
    missing = {(a, b, i, j) for a, b in columns for i, j in product(range(sizes[a]), range(sizes[b]))}
    rows: list[tuple[int, ...]] = []
    while missing:
        row = _seeded(min(missing), sizes, missing)
        missing -= {(a, b, row[a], row[b]) for a, b in columns}
        rows.append(row)
    return rows


def _seeded(
    pair: tuple[int, int, int, int], sizes: Sequence[int], missing: set[tuple[int, int, int, int]]
) -> tuple[int, ...]:
    """A row with this pair, and in its other columns, one after the other, what meets most that it has not met yet."""
    a, b, i, j = pair
    row = {a: i, b: j}
    for column in range(len(sizes)):
        if column not in row:
            row[column] = max(
                range(sizes[column]),
                key=lambda index: sum(
                    ((other, column, row[other], index) if other < column else (column, other, index, row[other]))
                    in missing
                    for other in row
                ),
            )
    return tuple(row[column] for column in range(len(sizes)))
