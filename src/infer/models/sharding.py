"""Tensor parallelism: which heads, columns of MLPs or experts, and part of the vocabulary each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, cast

import torch

from infer.config import ModelConfig
from infer.models.common import Block, Decoder
from infer.models.moe import MoE
from infer.models.registry import build_model
from infer.nn.linear import Linear
from infer.nn.sharded import (
    Group,
    ShardedEmbedding,
    ShardedExpertLinear,
    ShardedLinear,
    ShardedRMSNorm,
    shard_ranges,
)


class Heads(NamedTuple):
    """The attention heads of a rank."""

    query: range
    key: range


def shard_heads(config: ModelConfig, world_size: int) -> list[Heads]:
    """The heads of each rank: KV heads with all their query heads. At a world size above the number of KV heads,
    several ranks share the query heads of one KV head, and each stores its keys and values.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = heads // kv_heads
    if world_size <= kv_heads:
        ranges = shard_ranges(kv_heads, world_size)
        return [Heads(range(each.start * group, each.stop * group), each) for each in ranges]
    found = []
    for key, ranks in enumerate(shard_ranges(world_size, kv_heads)):
        for part in shard_ranges(group, len(ranks)):
            query = range(key * group + part.start, key * group + part.stop)
            found.append(Heads(query, range(key, key + 1)))
    return found


def check_world_size(config: ModelConfig, world_size: int) -> None:
    """Refuse a world size that leaves a rank without work."""
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"the number of processes must be an integer of at least 1, not {world_size!r}")
    columns = min(config.intermediate_size, config.moe_intermediate_size or config.intermediate_size)
    for what, count in (("attention heads", config.num_attention_heads), ("MLP columns", columns)):
        if world_size > count:
            raise ValueError(f"a model with {count} {what} cannot be split into {world_size} shards")


class ModelShard:
    """What one rank of a group has of a model."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        check_world_size(config, group.world_size)
        self.full_config, self.group = config, group
        self.heads = shard_heads(config, group.world_size)

    @cached_property
    def config(self) -> ModelConfig:
        """Of the shard: its own heads and columns of MLPs and experts, the full hidden size and vocabulary."""
        heads, expert = self.heads[self.group.rank], self.full_config.moe_intermediate_size
        return replace(
            self.full_config,
            head_dim=self.full_config.computed_head_dim,
            num_attention_heads=len(heads.query),
            num_key_value_heads=len(heads.key),
            intermediate_size=self.sizes(self.full_config.intermediate_size)[self.group.rank],
            moe_intermediate_size=None if expert is None else self.sizes(expert)[self.group.rank],
        )

    def build(self) -> Decoder:
        """The model of this rank: o_proj, down_proj, the embedding and the head gather from all ranks, and so do norms
        of all heads together.
        """
        config, group = self.full_config, self.group
        model = build_model(self.config)
        hidden, inner = self.sizes(config.hidden_size), self.sizes(config.intermediate_size)
        expert = self.sizes(config.moe_intermediate_size or config.intermediate_size)
        queries, keys = ([self._features(each) for each in heads] for heads in zip(*self.heads, strict=True))
        with torch.device("meta"):
            full = dict(build_model(config).named_parameters())
        for layer in cast(Sequence[Block], model.layers):
            attn, mlp = layer.self_attn, layer.mlp
            attn.o_proj = ShardedLinear(group, [*map(len, queries)], hidden, bias=attn.o_proj.bias is not None)
            if attn.q_norm is not None and attn.k_norm is not None and not layer.qk_norm_per_head:
                attn.q_norm = ShardedRMSNorm(group, attn.q_norm, queries)
                attn.k_norm = ShardedRMSNorm(group, attn.k_norm, keys)
            if isinstance(mlp, MoE):
                experts, has_bias = mlp.experts, mlp.experts.down_proj.bias is not None
                experts.down_proj = ShardedExpertLinear(group, config.num_experts, expert, hidden, bias=has_bias)
            else:
                mlp.down_proj = ShardedLinear(group, inner, hidden, bias=mlp.down_proj.bias is not None)
        model.embed_tokens = ShardedEmbedding(group, config.vocab_size, config.hidden_size)
        model.lm_head = ShardedLinear(group, config.hidden_size, self.sizes(config.vocab_size))
        model.tie_weights()
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                module.unsharded_rows = len(full.get(f"{name}.weight", full["embed_tokens.weight"]))  # a tied head's
        model.group = group
        return model

    def rows(self, name: str, count: int) -> range:
        """Which of the `count` rows of a checkpoint's tensor this rank loads."""
        rank = self.group.rank
        match name.split(".")[-2:]:
            case ["q_proj", _]:
                return self._features(self.heads[rank].query)
            case ["k_proj" | "v_proj", _]:
                return self._features(self.heads[rank].key)
            case [_, "sinks"]:
                return self.heads[rank].query
            case ["gate_proj" | "up_proj" | "o_proj" | "down_proj" | "embed_tokens" | "lm_head", _]:
                return shard_ranges(count, self.group.world_size)[rank]
        return range(count)

    def sizes(self, total: int) -> list[int]:
        """The share of each rank."""
        return [*map(len, shard_ranges(total, self.group.world_size))]

    def _features(self, heads: range) -> range:
        head_dim = self.full_config.computed_head_dim
        return range(heads.start * head_dim, heads.stop * head_dim)
