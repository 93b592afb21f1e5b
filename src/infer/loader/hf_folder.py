"""Hugging Face folders: config.json, one or several safetensors files, tokenizer.json."""

from __future__ import annotations

import json
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
from infer.loader.hf_config import config_from_hf
from infer.loader.text_tokenizers import gpt2_tokenizer
from infer.models.registry import check_supported

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_PREFIX = re.compile(r"^((model|language_model)\.)+")
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
BLOCK_WEIGHTS = 1 << 20  # read at a time: at most 4 MB


class HFFolder(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        check_supported(str(raw.get("model_type")))
        text = raw.get("text_config")
        settings = raw | text if isinstance(text, dict) else raw
        self._declared = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
        generation = path / "generation_config.json"
        try:
            self.config = config_from_hf(raw, read_json(generation) if generation.exists() else None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from None

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Which file holds which tensor, by the name it has there."""
        index = self.path / INDEX
        if index.exists():
            names = read_json(index).get("weight_map", {})
            files = {name: self.path / file for name, file in names.items()}
        elif (self.path / SINGLE).exists():
            with open_safetensors(self.path / SINGLE) as file:
                files = dict.fromkeys(file.keys(), self.path / SINGLE)
        else:
            raise FileNotFoundError(f"{self.path} has no weights: neither {SINGLE} nor {INDEX} is there")
        for missing in sorted({file for file in files.values() if not file.exists()}):
            raise FileNotFoundError(f"{missing} is missing, but {INDEX} names it")
        return files

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names as the Decoder has them -> names in the files; of a checkpoint that also sees, the text part's."""
        if self.config.model_type == "gpt2":
            return gpt2_names.by_decoder_name(self._files, self.path)
        names = {TEXT_PREFIX.sub("", name): name for name in self._files}
        return {name: stored for name, stored in names.items() if not name.startswith(OTHER_PARTS)}

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

    def blocks(self, name: str) -> Iterator[Tensor]:
        stored = self._names[name]
        path = self._files[stored]
        transposed = self._is_transposed(name)
        with open_safetensors(path) as file:
            shape = file.get_slice(stored).get_shape()
        rows = shape[1] if transposed else shape[0]
        rows_per_block = max(1, BLOCK_WEIGHTS * rows // math.prod(shape))
        for start in range(0, rows, rows_per_block):
            end = start + rows_per_block
            # The file is opened for each block: pages of a mapping count as memory until it is closed.
            with open_safetensors(path) as file:
                weights = file.get_slice(stored)
                yield weights[:, start:end].T if transposed else weights[start:end]

    def _is_transposed(self, name: str) -> bool:
        return self.config.model_type == "gpt2" and gpt2_names.is_transposed(name)

    def tokenizer_parts(self) -> TokenizerParts:
        import tokenizers

        path = self.path / "tokenizer.json"
        if self.config.model_type == "gpt2" and not path.exists():
            return gpt2_tokenizer(self.path)
        if not path.exists():
            raise FileNotFoundError(f"{self.path} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        settings = self.path / "tokenizer_config.json"
        config = read_json(settings) if settings.exists() else {}
        return TokenizerParts(
            backend,
            self._chat_template(config),
            _content(config.get("bos_token")),
            _content(config.get("eos_token")),
        )

    def _chat_template(self, config: dict[str, Any]) -> str | None:
        path = self.path / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
        return template


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path} should hold a JSON object, not {type(contents).__name__}")
    return contents


def _content(token: str | dict[str, str] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token
