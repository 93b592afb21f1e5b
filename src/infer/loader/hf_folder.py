"""Hugging Face folders: config.json, one or several safetensors files, tokenizer.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer.loader.chat import TEMPLATES
from infer.loader.checkpoint import FLOATS, Checkpoint, RowOrder, StoredTensor, TokenizerParts
from infer.loader.files import INDEX, SAFETENSORS, SENTENCEPIECE, TEKKEN, is_there, read_index, read_json, read_text
from infer.loader.hf_config import FAMILIES, config_from_hf, model_type_of
from infer.loader.hf_experts import BLOCKS, MXFP4, SCALES, is_stacked, read_stacked, stacked_shape
from infer.loader.tensor_names import GPT2_MATRICES, by_decoder_name, from_gpt2, from_hf
from infer.loader.text_tokenizers import gpt2_tokenizer, read_tokenizer
from infer.loader.tokenizer_files import read_sentencepiece, read_tekken
from infer.machine import DTYPES
from infer.models.registry import check_supported
from infer.values import TEXT

BLOCK_WEIGHTS = 1 << 20  # read at a time: at most 4 MB
MAX_HEADER = 16 << 20  # bytes of a safetensors header; real ones have at most 1 MB


class HFFolder(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        generation = path / "generation_config.json"
        generated = self._generation = read_json(generation) if is_there(generation) else {}
        try:
            check_supported(model_type_of(raw))
            self.config = config_from_hf(raw, generated)
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from None
        text = raw.get("text_config")
        settings = raw | text if isinstance(text, dict) else raw
        self._declared = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
        if self.config.tie_word_embeddings and self._has_own_head():
            self.config = replace(self.config, tie_word_embeddings=False)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Which file holds which tensor, by the names in the files."""
        index = self.path / INDEX
        if is_there(index):
            files = {name: self.path / file for name, file in read_index(index).items()}
        elif is_there(self.path / SAFETENSORS):
            with open_safetensors(self.path / SAFETENSORS) as file:
                files = dict.fromkeys(file.keys(), self.path / SAFETENSORS)
        else:
            raise FileNotFoundError(f"{self.path} has no weights: neither {SAFETENSORS} nor {INDEX} is there")
        for missing in sorted({file for file in files.values() if not is_there(file)}):
            raise FileNotFoundError(f"{missing} is missing, but {INDEX} names it")
        return files

    def _has_own_head(self) -> bool:
        """Whether there is a head that differs from the embedding. transformers, too, leaves such a head untied."""
        try:
            if not any(name.endswith("lm_head.weight") for name in self._files):
                return False
            head, embedding = self.tensors["lm_head.weight"], self.tensors["embed_tokens.weight"]
        except (FileNotFoundError, ValueError, KeyError):  # said when the weights are loaded
            return False
        if head[1:] != embedding[1:]:
            return True
        return not all(map(torch.equal, self.blocks("lm_head.weight"), self.blocks("embed_tokens.weight")))

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:  # type: ignore[override]
        names = by_decoder_name(self._files, from_gpt2 if self.config.model_type == "gpt2" else from_hf, self.path)
        tensors = {}
        for path in dict.fromkeys(self._files[stored] for stored in names.values()):
            with open_safetensors(path) as file:
                stored_here = set(file.keys())
                for name, stored in names.items():
                    if self._files[stored] != path:
                        continue
                    if stored not in stored_here:
                        raise ValueError(f"{path} lacks {stored}, which {INDEX} says it holds")
                    weights = file.get_slice(stored)
                    dtype, shape = weights.get_dtype(), tuple(weights.get_shape())
                    is_mxfp4 = self._scales_of(stored) is not None and dtype == "U8"
                    if dtype not in FLOATS and not is_mxfp4:
                        raise ValueError(f"{path}: {stored} is in {dtype}, which is not a float dtype")
                    if is_stacked(name):
                        shape = stacked_shape(shape, stored, self.config.model_type)
                    elif self._is_transposed(name):
                        shape = shape[::-1]
                    tensors[name] = StoredTensor(stored, shape, MXFP4.name if is_mxfp4 else FLOATS[dtype])
        return tensors

    def stored_dtype(self, name: str) -> torch.dtype | str | None:
        try:
            return super().stored_dtype(name)
        except (FileNotFoundError, ValueError):  # a hub model without its weights, or Git LFS pointers
            return DTYPES.get(self._declared)

    def blocks(self, name: str, rows: range | None = None) -> Iterator[Tensor]:
        shape, family = self.tensors[name].shape, FAMILIES[self.config.model_type]
        if placed := RowOrder.of(self.config, name, shape[0], rows, family.interleaved, family.qkv_by_head):
            yield torch.cat([*self._read(name, placed.rows)])[placed.order]
        elif is_stacked(name):
            yield from self._read_experts(name, rows)
        else:
            yield from self._read(name, rows)

    def quantized(self, name: str, kind: str, rows: range | None = None) -> Iterator[Tensor]:
        if kind == self.tensors[name].dtype:
            return self._read_experts(name, rows, as_blocks=True)
        return super().quantized(name, kind, rows)

    def _read_experts(self, name: str, rows: range | None, *, as_blocks: bool = False) -> Iterator[Tensor]:
        stored, shape, _ = self.tensors[name]
        with ExitStack() as files:

            def weights(name: str) -> Any:
                return files.enter_context(open_safetensors(self._files[name])).get_slice(name)

            scales = self._scales_of(stored)
            slices = weights(stored), scales and weights(scales)
            rows = range(shape[0]) if rows is None else rows
            yield from read_stacked(*slices, stored, self.config.model_type, rows, shape[0], as_blocks=as_blocks)

    def _scales_of(self, stored: str) -> str | None:
        """The name of the scales of an MXFP4 tensor."""
        scales = stored.removesuffix(BLOCKS) + SCALES
        return scales if stored.endswith(BLOCKS) and scales in self._files else None

    def _read(self, name: str, rows: range | None) -> Iterator[Tensor]:
        """Rows as they are in the file."""
        stored, shape, _ = self.tensors[name]
        rows = range(shape[0]) if rows is None else rows
        rows_per_block = max(1, BLOCK_WEIGHTS * shape[0] // math.prod(shape))
        for start in range(rows.start, rows.stop, rows_per_block):
            end = min(start + rows_per_block, rows.stop)
            # Opened for each block: the pages of a mapped file count as memory until it is closed.
            with open_safetensors(self._files[stored]) as file:
                weights = file.get_slice(stored)
                yield weights[:, start:end].T if self._is_transposed(name) else weights[start:end]

    def _is_transposed(self, name: str) -> bool:
        """Whether the file has this tensor as [in, out]."""
        return self.config.model_type == "gpt2" and name.endswith(GPT2_MATRICES)

    def tokenizer_parts(self) -> TokenizerParts:
        path = self.path / "tokenizer.json"
        if self.config.model_type == "gpt2" and not is_there(path):
            return gpt2_tokenizer(self.path)
        settings = self.path / "tokenizer_config.json"
        config = read_json(settings) if is_there(settings) else {}
        template = self._chat_template(config, settings)
        if not is_there(path) and is_there(self.path / TEKKEN):
            parts, name = read_tekken(self.path / TEKKEN)
            return replace(parts, chat_template=template or TEMPLATES[name])
        if is_there(path):
            backend = read_tokenizer(path)
        elif is_there(self.path / SENTENCEPIECE):
            backend = read_sentencepiece(self.path / SENTENCEPIECE, config.get("added_tokens_decoder") or {})
        else:
            raise FileNotFoundError(f"{self.path} has no tokenizer.json, {TEKKEN} or {SENTENCEPIECE}")
        bos, eos = (_content(config, name, settings) for name in ("bos_token", "eos_token"))
        return TokenizerParts(backend, template, bos, eos)

    def sampling(self) -> tuple[str, dict[str, Any]]:
        return "generation_config.json", self._generation

    def _chat_template(self, config: dict[str, Any], settings: Path) -> str | None:
        path = self.path / "chat_template.jinja"
        if is_there(path):
            return read_text(path)
        template = config.get("chat_template")
        if isinstance(template, list):  # several templates with names
            named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
            template = next(named, {}).get("template")
        if template is not None:
            TEXT.check(f"{settings}: chat_template", template)
        return template


def open_safetensors(path: Path) -> Any:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > MAX_HEADER:
        raise ValueError(f"{path} is damaged: it claims a header of {header:,} bytes")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error!s:.200}") from None


def _content(config: dict[str, Any], name: str, path: Path) -> str | None:
    """A token, written as a string or as an object."""
    token = config.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None:
        TEXT.check(f"{path}: {name}", content)
    return content
