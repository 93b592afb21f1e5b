"""Models from the Hugging Face hub, or the server that HF_ENDPOINT names, in the hub's own cache folder."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from infer import progress
from infer.loader.files import INDEX, SAFETENSORS, SENTENCEPIECE, TEKKEN, has_hash, read_index, split_names
from infer.loader.hub_names import GATED

# owner/name, /FILE.gguf, @revision
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/(.+\.gguf))?(?:@([\w./-]+))?")
SETTINGS = ["config.json", "generation_config.json", "tokenizer*.json", "vocab.json", "merges.txt", "*.jinja"]
SETTINGS += [TEKKEN, SENTENCEPIECE]
WEIGHTS = ["model*.safetensors", INDEX]
SECONDS = 10.0  # to wait for a byte from the hub; the hub library tries up to six times
SHA256 = re.compile("[0-9a-f]{64}")
IS_GATED = "is gated: accept its license on its hub page, then run `hf auth login` or set HF_TOKEN"


def is_hub_name(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name))


def fetch(name: str, *, weights: bool, check: bool = False, force: bool = False) -> Path:
    """The folder of `owner/name`, or the file of `owner/name/FILE.gguf`: from the cache if it is complete there.

    `@revision` after either is a branch, a tag or a commit. check: hash cached files even if size and mtime are
    unchanged. force: download again.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    repo, file, revision = _parts(name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Not enough free disk space")  # the hub library goes on
            folder = _snapshot(repo, file, revision, weights, check, force)
        if file and not (folder / file).exists():
            raise FileNotFoundError(f"{repo} has no file {file}")
        return folder / file if file else folder
    except GatedRepoError:
        raise OSError(f"{name} {IS_GATED}") from None
    except RevisionNotFoundError:
        raise FileNotFoundError(f"{repo} has no revision {revision}: {name} is not on the hub") from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(f"the hub has no model {name} that you have access to") from None
    except Exception as error:  # what a broken connection raises depends on the hub library's version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        gated = f" ({repo} {IS_GATED})" if repo in GATED else ""
        raise OSError(f"could not fetch {name} from the hub: {reason}{gated}") from None


def _snapshot(repo: str, file: str | None, revision: str | None, weights: bool, check: bool, force: bool) -> Path:
    from huggingface_hub import get_session, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    parts = split_names(file) if file else []
    patterns = parts or SETTINGS + WEIGHTS * weights

    def download(files: list[str], *, cached: bool = False, again: bool = False) -> Path:
        options: dict[str, Any] = {"local_files_only": cached, "force_download": again}
        if progress.has_listeners():
            options["tqdm_class"] = _progress_bar(repo)
        return Path(str(snapshot_download(repo, revision=revision, allow_patterns=files, **options)))

    def is_complete(folder: Path) -> bool:
        return all((folder / part).exists() for part in parts) if file else _is_complete(folder, weights)

    hooks = get_session().event_hooks["request"]
    if _limit_time not in hooks:
        hooks.append(_limit_time)
    try:
        folder = None if force else download(patterns, cached=True)
    except LocalEntryNotFoundError:
        folder = None
    if folder is None or not is_complete(folder):
        _remove_leftovers(repo)
        folder = download(patterns, again=force)
    if damaged := _damaged(folder, patterns, check):
        print(f"{', '.join(damaged)} of {repo} is damaged: fetching it again", file=sys.stderr)
        folder = download(damaged, again=True)
        if damaged := _damaged(folder, damaged, again=False):
            raise OSError(f"{', '.join(damaged)} does not match its hash on the hub")
    return folder


def _progress_bar(repo: str) -> type:
    """tqdm bars that draw nothing; the one that counts all bytes reports progress."""
    from huggingface_hub.utils.tqdm import tqdm

    bar: Any = tqdm

    class ProgressBar(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            self._bytes = 0.0  # tqdm's own count stays 0 where the hub's bars are disabled
            super().__init__(*args, **options | {"file": io.StringIO()})

        def display(self, *args: Any, **options: Any) -> None: ...

        def update(self, n: float | None = 1) -> Any:
            self._bytes += n or 0
            if self._counts and self.total:
                progress.report(progress.FETCHING, int(min(self._bytes, self.total)), int(self.total), repo)
            return super().update(n)

        def close(self) -> None:
            super().close()
            if self._counts:
                progress.report(progress.FETCHING, 1, 1, repo)

    return ProgressBar


def _parts(name: str) -> tuple[str, str | None, str | None]:
    """Repository, file, revision."""
    found = HUB_NAME.fullmatch(name)
    assert found is not None
    repo, file, revision = found.groups()
    return repo, file, revision


def _limit_time(request: Any) -> None:
    """A time limit for requests that have none: the hub library waits for ever for a list of files."""
    limits = request.extensions.get("timeout", {})
    known = {kind: seconds for kind, seconds in limits.items() if seconds is not None}
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), SECONDS) | known


def _damaged(folder: Path, patterns: list[str], again: bool) -> list[str]:
    """Files that do not match their hash. The hub's cache names large files by their SHA-256."""
    files = [file for file in folder.rglob("*") if file.is_symlink() and file.exists()]
    names = {str(file.relative_to(folder)): file.resolve() for file in files}
    return [
        name
        for name, blob in names.items()
        if any(fnmatch(name, pattern) for pattern in patterns)
        and SHA256.fullmatch(blob.name)
        and not has_hash(blob, blob.name, again=again)
    ]


def _remove_leftovers(repo: str) -> None:
    """Remove partial files of killed downloads, which the hub library does not resume. Running downloads hold locks."""
    from filelock import FileLock, Timeout
    from huggingface_hub.constants import HF_HUB_CACHE

    name = f"models--{repo.replace('/', '--')}"
    for part in Path(HF_HUB_CACHE, name, "blobs").glob("*.incomplete"):
        lock = Path(HF_HUB_CACHE, ".locks", name, f"{part.name.split('.')[0]}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout), FileLock(lock, timeout=0):
            part.unlink(missing_ok=True)


def remove(name: str) -> int:
    """Remove a repository, or one revision of it, from the hub's cache; returns the bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    repo, file, revision = _parts(name)
    if file:
        raise ValueError(f"{name} is one file of {repo}: remove the repository with `infer rm {repo}`")
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        raise FileNotFoundError(f"{name} is not cached") from None
    found = [
        each
        for cached in cache.repos
        if cached.repo_id == repo and cached.repo_type == "model"
        for each in cached.revisions
    ]
    chosen = [each.commit_hash for each in found if revision is None or revision in (each.commit_hash, *each.refs)]
    if not chosen:
        raise FileNotFoundError(f"{name} is not cached")
    deletion = cache.delete_revisions(*chosen)
    deletion.execute()
    return deletion.expected_freed_size


def cached_models() -> list[tuple[str, int]]:
    """Hub ids with weights in the hub's cache, with their bytes on disk; without the hub library, which is slow."""
    found = []
    for repo in _cache_folder().glob("models--*/"):
        files = [file for file in repo.glob("snapshots/*/**/*") if file.is_file()]
        if any(file.suffix in (".safetensors", ".gguf") for file in files):
            size = sum(file.stat().st_size for file in {file.resolve() for file in files})
            found.append((repo.name.split("--", 1)[1].replace("--", "/"), size))
    return sorted(found)


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expanduser(os.path.expandvars(folder)))


def _is_complete(folder: Path, weights: bool) -> bool:
    """An interrupted download leaves a folder too."""
    tokenizers = ("tokenizer.json", "merges.txt", TEKKEN, SENTENCEPIECE)
    if not any((folder / name).exists() for name in tokenizers) or not (folder / "config.json").exists():
        return False
    if not weights or (folder / SAFETENSORS).exists():
        return True
    index = folder / INDEX
    return index.exists() and all((folder / file).exists() for file in set(read_index(index).values()))
