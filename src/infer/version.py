"""Which version this is."""

from __future__ import annotations


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("infer")
    except metadata.PackageNotFoundError:  # run from a folder, without being installed
        return "unknown"
