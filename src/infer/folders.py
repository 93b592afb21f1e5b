"""The cache folder. Without torch, so that listing models is fast."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of downloaded models and compiled kernels: $INFER_CACHE, or `infer` in the user's cache folder."""
    if folder := os.environ.get("INFER_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer"
