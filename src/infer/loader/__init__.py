"""Find a checkpoint, read it, and build the model, tokenizer and chat prompts it describes."""

from infer.config import ModelConfig
from infer.loader.chat import render_chat_template
from infer.loader.find import open_checkpoint
from infer.loader.load import load_model
from infer.loader.tokenizer import Tokenizer

__all__ = ["ModelConfig", "Tokenizer", "load_model", "open_checkpoint", "read_config", "render_chat_template"]


def read_config(name_or_path: str) -> ModelConfig:
    """The config of a checkpoint, without its weights."""
    return open_checkpoint(name_or_path, weights=False).config


ModelConfig.reader = staticmethod(read_config)
