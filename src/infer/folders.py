"""Where files are kept between runs. Without torch: to list models must not take seconds."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where fetched models and compiled kernels are kept: $INFER_CACHE, or `infer` in the user's cache folder."""
    if folder := os.environ.get("INFER_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer"
