"""Hugging Face folders: config.json, one or several safetensors files, tokenizer.json."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer.loader import gpt2_names
from infer.loader.checkpoint import Checkpoint, TokenizerParts
from infer.loader.files import is_there, read_json, read_text
from infer.loader.hf_config import config_from_hf
from infer.loader.shards import INDEX, SINGLE, read_index
from infer.loader.text_tokenizers import gpt2_tokenizer, read_tokenizer
from infer.models.registry import check_supported
from infer.values import TEXT

TEXT_PREFIX = re.compile(r"^((model|language_model)\.)+")
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
BLOCK_WEIGHTS = 1 << 20  # read at a time: at most 4 MB
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_HEADER = 16 << 20  # bytes of a safetensors file that name its tensors: real ones have at most 1 MB


class HFFolder(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        generation = path / "generation_config.json"
        generated = self._generation = read_json(generation) if is_there(generation) else {}
        try:
            check_supported(raw.get("model_type"))
            self.config = config_from_hf(raw, generated)
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from None
        text = raw.get("text_config")
        settings = raw | text if isinstance(text, dict) else raw
        self._declared = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Which file holds which tensor, by the name it has there."""
        index = self.path / INDEX
        if is_there(index):
            files = {name: self.path / file for name, file in read_index(index).items()}
        elif is_there(self.path / SINGLE):
            with open_safetensors(self.path / SINGLE) as file:
                files = dict.fromkeys(file.keys(), self.path / SINGLE)
        else:
            raise FileNotFoundError(f"{self.path} has no weights: neither {SINGLE} nor {INDEX} is there")
        for missing in sorted({file for file in files.values() if not is_there(file)}):
            raise FileNotFoundError(f"{missing} is missing, but {INDEX} names it")
        return files

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names as the Decoder has them -> names in the files; of a checkpoint that also sees, the text part's."""
        if self.config.model_type == "gpt2":
            return gpt2_names.by_decoder_name(self._files, self.path)
        names: dict[str, str] = {}
        for stored in self._files:
            name = TEXT_PREFIX.sub("", stored)
            if not name.startswith(OTHER_PARTS) and names.setdefault(name, stored) != stored:
                raise ValueError(f"{self.path} holds {names[name]} and {stored}, which are the same weight")
        return names

    @cached_property
    def _headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape of each tensor, and what its elements are, by the name that the Decoder has for it."""
        by_file: dict[Path, list[str]] = {}
        for name, stored in self._names.items():
            by_file.setdefault(self._files[stored], []).append(name)
        headers = {}
        for path, names in by_file.items():
            with open_safetensors(path) as file:
                stored_here = set(file.keys())
                for name in names:
                    if self._names[name] not in stored_here:
                        raise ValueError(f"{path} lacks {self._names[name]}, which {INDEX} promises")
                    weights = file.get_slice(self._names[name])
                    if weights.get_dtype() not in FLOATS:
                        raise ValueError(f"{path}: {self._names[name]} is in {weights.get_dtype()}, which is no float")
                    shape = tuple(weights.get_shape())
                    headers[name] = shape[::-1] if self._is_transposed(name) else shape, weights.get_dtype()
        return headers

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self._headers.items()}

    def is_bfloat16(self, name: str) -> bool | None:
        try:
            headers = self._headers
        except (FileNotFoundError, ValueError):  # of a model on the hub, whose small files alone are here, or pointers
            return self._declared == "bfloat16"
        return headers[name][1] == "BF16" if name in headers else None

    def blocks(self, name: str, rows: range | None = None) -> Iterator[Tensor]:
        stored = self._names[name]
        path = self._files[stored]
        transposed = self._is_transposed(name)
        with open_safetensors(path) as file:
            shape = file.get_slice(stored).get_shape()
        count = shape[1] if transposed else shape[0]
        rows = range(count) if rows is None else rows
        rows_per_block = max(1, BLOCK_WEIGHTS * count // math.prod(shape))
        for start in range(rows.start, rows.stop, rows_per_block):
            end = min(start + rows_per_block, rows.stop)
            # The file is opened for each block: pages of a mapping count as memory until it is closed.
            with open_safetensors(path) as file:
                weights = file.get_slice(stored)
                yield weights[:, start:end].T if transposed else weights[start:end]

    def _is_transposed(self, name: str) -> bool:
        return self.config.model_type == "gpt2" and gpt2_names.is_transposed(name)

    def tokenizer_parts(self) -> TokenizerParts:
        path = self.path / "tokenizer.json"
        if self.config.model_type == "gpt2" and not is_there(path):
            return gpt2_tokenizer(self.path)
        if not is_there(path):
            raise FileNotFoundError(f"{self.path} has no tokenizer.json")
        settings = self.path / "tokenizer_config.json"
        config = read_json(settings) if is_there(settings) else {}
        bos, eos = (_content(config, name, settings) for name in ("bos_token", "eos_token"))
        return TokenizerParts(read_tokenizer(path), self._chat_template(config, settings), bos, eos)

    def sampling(self) -> tuple[str, dict[str, Any]]:
        return "generation_config.json", self._generation

    def _chat_template(self, config: dict[str, Any], settings: Path) -> str | None:
        path = self.path / "chat_template.jinja"
        if is_there(path):
            return read_text(path)
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
            template = next(named, {}).get("template")
        if template is not None:
            TEXT.check(f"{settings}: chat_template", template)
        return template


def open_safetensors(path: Path) -> Any:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > MAX_HEADER:
        raise ValueError(f"{path} is damaged: it has {header:,} bytes of names and shapes, by its own account")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error!s:.200}") from None


def _content(config: dict[str, Any], name: str, path: Path) -> str | None:
    """A token, given as such or as an object."""
    token = config.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None:
        TEXT.check(f"{path}: {name}", content)
    return content
