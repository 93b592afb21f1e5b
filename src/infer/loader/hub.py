"""Models on the Hugging Face hub, or wherever HF_ENDPOINT points, kept in the hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from infer.loader.hf_folder import INDEX, SINGLE, read_json

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
SETTINGS = ["config.json", "generation_config.json", "tokenizer*.json", "vocab.json", "merges.txt", "*.jinja"]
WEIGHTS = ["model*.safetensors", INDEX]


def is_hub_name(name: str) -> bool:
    return bool(HUB_ID.fullmatch(name) or HUB_GGUF.fullmatch(name))


def fetch(name: str, *, weights: bool) -> Path:
    """The folder of `owner/name`, or the file of `owner/name/FILE.gguf`: from the cache if it is all there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    gguf = HUB_GGUF.fullmatch(name)
    repo, file = gguf.groups() if gguf else (name, None)
    patterns = [file] if file else SETTINGS + WEIGHTS * weights

    def complete(folder: Path) -> bool:
        return (folder / file).exists() if file else _is_complete(folder, weights)

    try:
        try:
            folder = Path(snapshot_download(repo, allow_patterns=patterns, local_files_only=True))
        except LocalEntryNotFoundError:
            folder = None
        if folder is None or not complete(folder):
            folder = Path(snapshot_download(repo, allow_patterns=patterns))
        if file and not (folder / file).exists():
            raise FileNotFoundError(f"{repo} has no file {file}")
        return folder / file if file else folder
    except GatedRepoError:
        raise OSError(f"{name} is gated: accept its terms on its hub page, then run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(f"the hub has no model {name} that you may read") from None
    except Exception as error:  # what a broken connection raises depends on the hub library's version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(f"could not fetch {name} from the hub: {reason}") from None


def cached_models() -> list[tuple[str, int]]:
    """Hub ids that the hub's cache holds weights of, with their bytes on disk."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((repo.repo_id, repo.size_on_disk) for repo in repos if _has_weights(repo))


def _has_weights(repo: Any) -> bool:
    names = (file.file_name for revision in repo.revisions for file in revision.files)
    return any(name.endswith((".safetensors", ".gguf")) for name in names)


def _is_complete(folder: Path, weights: bool) -> bool:
    """A fetch that was interrupted leaves a folder too."""
    tokenizer = (folder / "tokenizer.json").exists() or (folder / "merges.txt").exists()
    if not tokenizer or not (folder / "config.json").exists():
        return False
    if not weights or (folder / SINGLE).exists():
        return True
    index = folder / INDEX
    return index.exists() and all(
        (folder / file).exists() for file in set(read_json(index).get("weight_map", {}).values())
    )
