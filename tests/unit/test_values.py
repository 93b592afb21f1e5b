"""Types and ranges of what files say."""

from __future__ import annotations

from typing import Any

import pytest

from infer.values import ABOVE_0, FLAG, TEXT, TOKEN_IDS, Kind, checked, integer, list_of, short_repr

SIZE = integer(1, 100)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (SIZE, [1, 100], [0, 101, True, 1.0, "1", None, [1], 10**5000]),
        (ABOVE_0, [1, 0.5, 1e29], [0, -1, float("nan"), float("inf"), True, "1", 10**400, 1j]),
        (FLAG, [True, False], [0, 1, None, "true"]),
        (TEXT, ["", "x\0é🦙"], [None, b"x", 1, ["x"], "\ud800"]),
        (list_of(SIZE, 2), [[], [1], (1, 2)], [[1, 2, 3], [0], [[1]], "1", {1: 1}, None]),
        (TOKEN_IDS, [0, [1, 2]], [-1, [-1], True, "x", None, [None]]),
    ],
    ids=["whole", "number", "flag", "text", "list", "either"],
)
def test_kinds(kind: Kind, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        kind.check("x", value)
    for value in bad:
        with pytest.raises(ValueError, match=r"^x must be .*, not "):
            kind.check("x", value)


def test_what_is_read_of_a_file() -> None:
    raw = {"a": 1, "b": None, "c": "unknown here"}
    assert checked(raw, {"a": SIZE, "b": SIZE, "d": SIZE}) == {"a": 1}
    with pytest.raises(ValueError, match=r"^c must be a positive integer up to 100, not 'unknown here'$"):
        checked(raw, {"c": SIZE})


def test_values_in_messages_are_short() -> None:
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]  # 2**60 entries, if all were shown
    for value in ("x" * 10**6, [0] * 10**6, {i: i for i in range(10**5)}, 10**5000, -(10**5000), nested, float("nan")):
        assert len(short_repr(value)) < 200
    assert (short_repr("a"), short_repr(None), short_repr([16]), short_repr(-1)) == ("'a'", "None", "[16]", "-1")
