"""Find a checkpoint, read it, and build the model, tokenizer and chat prompts it describes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.config import ModelConfig
    from infer.loader.chat import render_chat_template
    from infer.loader.find import open_checkpoint, read_config
    from infer.loader.load import load_model
    from infer.loader.tokenizer import Tokenizer

__all__ = ["ModelConfig", "Tokenizer", "load_model", "open_checkpoint", "read_config", "render_chat_template"]

_HOMES = {
    "ModelConfig": "infer.loader.find",
    "Tokenizer": "infer.loader.tokenizer",
    "load_model": "infer.loader.load",
    "open_checkpoint": "infer.loader.find",
    "read_config": "infer.loader.find",
    "render_chat_template": "infer.loader.chat",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for alone: to list models, torch is not needed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
