"""Which part of a model each of several processes has: some heads, some columns of the MLP, some of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch

from infer.config import ModelConfig
from infer.models.common import Block, Decoder
from infer.models.registry import build_model
from infer.nn.linear import Linear
from infer.nn.split import Group, SplitEmbedding, SplitLinear, shares


@dataclass(frozen=True)
class Heads:
    """The attention heads of a process: all queries of one key/value head, or some of them, or of several heads."""

    query: range
    key: range


def share_heads(config: ModelConfig, count: int) -> list[Heads]:
    """Each process has whole groups of queries with their key/value head. Where there are more processes than such
    groups, several share one: each then keeps its keys and values.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = heads // kv_heads
    if count <= kv_heads:
        return [Heads(range(each.start * group, each.stop * group), each) for each in shares(kv_heads, count)]
    found = []
    for key, processes in enumerate(shares(count, kv_heads)):
        for part in shares(group, len(processes)):
            query = range(key * group + part.start, key * group + part.stop)
            found.append(Heads(query, range(key, key + 1)))
    return found


def check_split(config: ModelConfig, count: int) -> None:
    """Refuse a number of processes that leaves one without work."""
    if type(count) is not int or count < 1:
        raise ValueError(f"a model runs in a whole number of processes, 1 or more, not {count!r}")
    for what, there in (("attention heads", config.num_attention_heads), ("MLP columns", config.intermediate_size)):
        if count > there:
            raise ValueError(f"a model with {there} {what} cannot be split into {count} parts")


class Part:
    """What one process of a group has of a model."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        check_split(config, group.count)
        self.whole, self.group = config, group
        self.heads = share_heads(config, group.count)
        self.inner = shares(config.intermediate_size, group.count)
        self.hidden = shares(config.hidden_size, group.count)
        self.vocabulary = shares(config.vocab_size, group.count)

    @cached_property
    def config(self) -> ModelConfig:
        """Of the part: its own heads and MLP columns; what all have is whole."""
        own = self.heads[self.group.rank]
        return replace(
            self.whole,
            head_dim=self.whole.computed_head_dim,
            num_attention_heads=len(own.query),
            num_key_value_heads=len(own.key),
            intermediate_size=len(self.inner[self.group.rank]),
        )

    def build(self) -> Decoder:
        """The model of this part: its products that end a half of a block, and the head, gather from all."""
        config, group, head_dim = self.whole, self.group, self.whole.computed_head_dim
        model = build_model(self.config)
        hidden, inner = _lengths(self.hidden), _lengths(self.inner)
        queries = [len(heads.query) * head_dim for heads in self.heads]
        with torch.device("meta"):
            whole = dict(build_model(config).named_parameters())
        for layer in cast(Sequence[Block], model.layers):
            layer.self_attn.o_proj = SplitLinear(group, queries, hidden, bias=config.attention_bias)
            layer.mlp.down_proj = SplitLinear(group, inner, hidden, bias=config.mlp_bias)
        model.embed_tokens = SplitEmbedding(group, config.vocab_size, config.hidden_size)
        model.lm_head = SplitLinear(group, config.hidden_size, _lengths(self.vocabulary))
        model.tie_weights()
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                module.whole_rows = len(whole.get(f"{name}.weight", whole["embed_tokens.weight"]))  # a tied head's
        model.group = group
        return model

    def rows(self, name: str, count: int) -> range:
        """Which rows of a checkpoint's tensor are this part's, of `count` in all."""
        rank, head_dim = self.group.rank, self.whole.computed_head_dim
        heads = self.heads[rank]
        match name.split(".")[-2]:
            case "q_proj":
                return _times(heads.query, head_dim)
            case "k_proj" | "v_proj":
                return _times(heads.key, head_dim)
            case "gate_proj" | "up_proj":
                return self.inner[rank]
            case "o_proj" | "down_proj":
                return self.hidden[rank]
            case "embed_tokens" | "lm_head":
                return self.vocabulary[rank]
        return range(count)


def _lengths(ranges: Sequence[range]) -> list[int]:
    return [len(each) for each in ranges]


def _times(some: range, size: int) -> range:
    return range(some.start * size, some.stop * size)
