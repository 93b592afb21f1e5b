"""Whether a file in a cache is still the one that was fetched."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from infer.folders import cache_folder


def has_hash(file: Path, sha256: str, *, again: bool = False) -> bool:
    """Hashes the file if its size or time is not what it was when the hash was last found right, or if asked again."""
    stat = file.stat()
    seen = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    record = cache_folder() / "checked" / sha256
    with suppress(OSError, ValueError):
        if not again and record.read_text() == seen:
            return True
    with file.open("rb") as source:
        if hashlib.file_digest(source, "sha256").hexdigest() != sha256:
            return False
    with suppress(OSError):  # a cache that may only be read is hashed each time
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(seen)
    return True
