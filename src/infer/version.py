"""The version, and the command that installs an extra."""

from __future__ import annotations

import shlex
import sys

DISTRIBUTION = "infer-kv"  # its name on package indexes, where `infer` is another package


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from a folder without being installed
        return "unknown"


def install(extra: str) -> str:
    """The command that installs an extra in this environment."""
    return f"{shlex.quote(sys.executable)} -m pip install '{DISTRIBUTION}[{extra}]'"
