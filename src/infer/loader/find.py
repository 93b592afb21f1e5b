"""Find the checkpoint that a user names: by a path, a short name (see `infer models`), or a hub id."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from infer.config import ModelConfig
from infer.loader.builtin import BUILTIN, pull
from infer.loader.checkpoint import Checkpoint
from infer.loader.files import is_there, parse_json, read_json, read_text
from infer.loader.gguf_file import GGUFFile
from infer.loader.hf_folder import HFFolder
from infer.loader.hub import fetch, is_hub_name
from infer.loader.hub_names import HUB_MODELS, hub_id
from infer.loader.nanogpt import NanoGPTFile
from infer.values import NAME, takes

NANOGPT = "ckpt.pt"  # the name that nanoGPT gives its checkpoints


@takes(name_or_path=NAME)
def open_checkpoint(name_or_path: str | Path, *, weights: bool = True) -> Checkpoint:
    """Open a checkpoint, downloading it first if necessary. weights=False: of a hub model, only the small files."""
    path = locate(str(name_or_path), weights=weights)
    if path.is_dir() and not is_there(path / "config.json") and is_there(path / NANOGPT):
        path = path / NANOGPT
    if path.is_dir():
        if not is_there(path / "config.json"):
            raise FileNotFoundError(f"{path} is not a model folder: it has no config.json{_ggufs_in(path)}")
        return HFFolder(path)
    is_there(path)
    if path.suffix == ".gguf":
        return GGUFFile(path)
    if path.suffix in (".pt", ".pth"):
        return NanoGPTFile(path)
    raise ValueError(f"{path} is not a checkpoint: expected a folder with config.json, a .gguf file, or nanoGPT's .pt")


def read_config(name_or_path: str) -> ModelConfig:
    """The config of a checkpoint, without its weights."""
    return open_checkpoint(name_or_path, weights=False).config


ModelConfig.reader = staticmethod(read_config)


def locate(name: str, *, weights: bool, check: bool = False, force: bool = False) -> Path:
    """The path of a model, downloaded first if necessary. check, force: as for `pull`, of earlier downloads."""
    if name and Path(name).exists():
        return Path(name)
    if name in BUILTIN:
        return pull(BUILTIN[name], check=check, force=force)
    if name.endswith((".pt", ".pth")) or (name.endswith(".gguf") and Path(name).parent.is_dir()):
        raise FileNotFoundError(f"there is no file {name}")
    if name.startswith(("./", "../", "/", "~")):
        raise FileNotFoundError(f"there is no file or folder {name}")
    if is_hub_name(repo := hub_id(name)):
        if weights and ".gguf" not in repo:
            _check_settings(repo)
        return fetch(repo, weights=weights, check=check, force=force)
    near = get_close_matches(name, [*BUILTIN, *HUB_MODELS], 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise FileNotFoundError(
        f"no model {name!r}: it is neither a path, nor a name that `infer models` lists, nor a hub id "
        f"(owner/name){hint}"
    )


def _check_settings(repo: str) -> None:
    """Refuse what `infer` does not run before its weights are downloaded."""
    folder = fetch(repo, weights=False)
    if not is_there(folder / "config.json"):
        raise FileNotFoundError(f"{repo} has no config.json; to use a GGUF file of it, name the file: {repo}/FILE.gguf")
    HFFolder(folder)


def _ggufs_in(folder: Path) -> str:
    files = sorted(file.name for file in folder.glob("*.gguf"))
    return f" (to use a GGUF file, name it: {', '.join(files)})" if files else ""


# sentence-transformers' names of poolings.
_POOLINGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}


def pooling_of(name: str | Path) -> str | None:
    """Of which tokens the files of a model make the embedding of a text; None: they do not say."""
    folder = locate(str(name), weights=False)
    if not is_there(folder / "modules.json"):
        return None
    text = read_text(folder / "modules.json")
    modules: Any = parse_json(f'{{"modules": {text}}}')["modules"]
    listed = [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    found = [each for each in listed if str(each.get("type")).endswith(".Pooling")]
    if len(found) != 1:
        raise ValueError(f"{folder / 'modules.json'} has {len(found)} modules for pooling, and one is expected")
    config = read_json(folder / Path(str(found[0].get("path"))).name / "config.json")
    modes = [mode for mode, is_on in config.items() if mode.startswith("pooling_mode_") and is_on is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"the pooling of {folder} is not supported: {', '.join(modes) or 'none'}")
    return _POOLINGS[modes[0]]
