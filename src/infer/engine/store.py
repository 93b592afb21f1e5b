"""Pages in files: what names them, how they are written, and a folder that keeps those of long prompts."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

VERSION = "1"
STALE = 3600.0  # seconds after which an incomplete file is deleted
STORE_BYTES = 8 * 10**9


class CorruptFile(ValueError):
    """A file that is not as it was written."""


def page_keys(start: str, tokens: Sequence[int], page: int) -> list[str]:
    """Hashes of full pages, each of all tokens up to its end."""
    keys, found = [], hashlib.blake2b(start.encode(errors="surrogatepass"), digest_size=16)
    for end in range(page, len(tokens) + 1, page):
        found.update(np.asarray(tokens[end - page : end], np.int64).tobytes())
        keys.append(found.hexdigest())
    return keys


def write(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file atomically, beside its place. Only a regular file is replaced."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(f"{path} is not a regular file: choose another name")
    metadata = {"format": kind, "version": VERSION, **header}
    metadata["checksum"] = _checksum(metadata, tensors)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False) as part:
        pass
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part.name, metadata)
        with open(part.name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part.name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part.name)
        if isinstance(error, SafetensorError):  # a full disk, for one
            raise OSError(f"{path} cannot be written: {error}") from None
        raise


def remove_leftovers(folder: Path, name: str) -> None:
    """What a process that was killed has not completed. name: a pattern, of the files that were to be."""
    for left in folder.glob(f".{name}.*.part"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()


def read(path: Path, kind: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of a file that `write` has written. Raises ValueError for any other."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not an infer {kind} file")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != kind:
                raise ValueError(f"{path} is not a valid infer {kind} file")
            if header.get("version") != VERSION:
                raise ValueError(f"{path} was written by another version of infer: {header.get('version')!r:.20}")
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError:
        raise CorruptFile(f"{path} is not a valid infer {kind} file") from None
    except RuntimeError as error:  # torch's own, of a file that was there a moment ago
        raise OSError(f"{path} cannot be read: {error}") from None
    if header.pop("checksum", None) != _checksum(header, tensors):
        raise CorruptFile(f"{path} is damaged: its checksum does not fit")
    return header, tensors


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    found = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        found = zlib.crc32(f"{name} {list(tensor.shape)} {tensor.dtype}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


class PrefixStore:
    """A folder of pages, each in a file named after the tokens it ends: several processes may use it at once.

    A file is written beside its place and then moved there. When the folder is full, those used least recently go.
    """

    def __init__(self, folder: str | Path, most: int = STORE_BYTES) -> None:
        """most: bytes that it may take."""
        self.folder, self.most = Path(folder), most
        if not str(folder) or self.folder.is_file():
            raise ValueError(f"{str(folder)!r} cannot be a prefix store: it is not a folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be a prefix store: {error.strerror}") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ValueError(f"{folder} cannot be a prefix store: it cannot be written to")
        remove_leftovers(self.folder, "*.page")
        self._known: dict[str, int] = {}  # how many groups of layers each page has that was saved or found here
        self._size = sum(size for _, size, _ in self._files())

    def has(self, key: str, groups: int) -> bool:
        """Whether it holds such a page, of at least this many groups of layers."""
        path = self._path(key)
        if key not in self._known:
            if not path.is_file():  # opening a FIFO would block
                return False
            with (
                suppress(OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError),
                safe_open(path, "pt") as file,
            ):
                header = file.metadata()
                self._known[key] = len(json.loads(header["groups"])) if header["key"] == key else 0
        return self._known.get(key, 0) >= groups and path.exists()

    def save(self, key: str, groups: Sequence[int], pages: Tensor) -> None:
        """One page for each of these groups of layers. What cannot be written is left out: it can be computed."""
        path = self._path(key)
        before = _size_of(path)
        with suppress(OSError):
            write(path, "page", {"pages": pages.cpu()}, {"key": key, "groups": json.dumps([*groups])})
            self._known[key] = len(groups)
            self._size += _size_of(path) - before
        if self._size > self.most:
            self._evict()

    def load(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[int], Tensor] | None:
        """Groups of layers and their pages, each of this shape; None where there is no such page, or it is damaged."""
        path = self._path(key)
        try:
            header, tensors = read(path, "page")
            groups, pages = json.loads(header["groups"]), tensors["pages"]
            fits = pages.shape == (len(groups), *shape) and pages.dtype is dtype
            are_groups = len(set(groups)) == len(groups) and all(type(group) is int for group in groups)
            if not (fits and are_groups and header["key"] == key):  # another key: the file was renamed
                raise CorruptFile
        except (CorruptFile, KeyError, TypeError, RecursionError, json.JSONDecodeError):
            with suppress(OSError):
                path.unlink()
            return None
        except (OSError, ValueError):  # no such file, or one of another format version
            return None
        self._known[key] = len(groups)
        return groups, pages

    def touch(self, keys: Sequence[str]) -> None:
        """Mark as used, in reverse: a page is useless without its predecessors, so later pages are evicted first."""
        for key in reversed(keys):
            with suppress(OSError):
                os.utime(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.page"

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.glob("*.page"):
            with suppress(OSError):  # another process has taken it away
                status = path.stat()
                if S_ISREG(status.st_mode):
                    found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _evict(self) -> None:
        """To nine tenths: not a file at a time."""
        files = self._files()
        self._size = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._size <= self.most * 0.9:
                break
            with suppress(OSError):
                path.unlink()
            self._size -= size


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
