"""Options of `infer serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.cli.serve import read_keys


def test_keys_of_all_sources(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("three\n\nfour\n")
    assert read_keys(["one"], file, "two, five") == {"one", "two", "three", "four", "five"}
    assert read_keys([], None, "") == frozenset()


@pytest.mark.parametrize("variable", [" , ", ",", " ", "\n"])
def test_a_variable_without_a_key_does_not_open_the_server(variable: str) -> None:
    for given in ([], ["one"]):
        with pytest.raises(ValueError, match="INFER_API_KEY holds no key"):
            read_keys(given, None, variable)
