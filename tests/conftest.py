"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from infer import ModelConfig, Tokenizer, load_model
from infer.cli.common import DEFAULT_MODEL
from infer.models.common import Decoder
from infer.models.registry import build_model


def make_tiny_config(**changes: Any) -> ModelConfig:
    """A Llama small enough for a test, with grouped heads."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return ModelConfig(**(values | changes))


def make_tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """Random weights; large enough that attention is far from uniform and logits are far apart."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(make_tiny_config(**changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3, generator=generator)
    return model.eval().requires_grad_(False).to(dtype)


@pytest.fixture
def tiny_config() -> Callable[..., ModelConfig]:
    return make_tiny_config


@pytest.fixture
def tiny_model() -> Callable[..., Decoder]:
    return make_tiny_model


@pytest.fixture(scope="session")
def smollm2() -> tuple[Decoder, Tokenizer]:
    """The default model in float32: fetched on first use, kept in the user's cache folder."""
    model, _ = load_model(DEFAULT_MODEL, dtype="float32", device="cpu")
    return model, Tokenizer(DEFAULT_MODEL)
