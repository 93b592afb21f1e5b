"""The version, and the command that installs an extra."""

from __future__ import annotations

import shlex
import sys


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("infer")
    except metadata.PackageNotFoundError:  # run from a folder without being installed
        return "unknown"


def install(extra: str) -> str:
    """The command that installs an extra in this environment."""
    return f"{shlex.quote(sys.executable)} -m pip install 'infer[{extra}]'"
