"""Find a checkpoint, read it, and build the model, tokenizer and chat prompts it describes."""

from infer.loader.chat import render_chat_template
from infer.loader.find import open_checkpoint
from infer.loader.load import load_model
from infer.loader.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_model", "open_checkpoint", "render_chat_template"]
