"""Tensor parallelism: which heads, MLP columns and part of the vocabulary each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch

from infer.config import ModelConfig
from infer.models.common import MLP, Block, Decoder
from infer.models.registry import MODELS, build_model
from infer.nn.linear import Linear
from infer.nn.sharded import Group, ShardedEmbedding, ShardedLinear, shard_ranges


@dataclass(frozen=True)
class Heads:
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
    if config.num_experts and world_size > 1:
        raise ValueError(f"a mixture of experts cannot be split into {world_size} shards: run it in one process")
    for what, count in (("attention heads", config.num_attention_heads), ("MLP columns", config.intermediate_size)):
        if world_size > count:
            raise ValueError(f"a model with {count} {what} cannot be split into {world_size} shards")
    if world_size > 1 and not MODELS[config.model_type].block.qk_norm_per_head:
        raise ValueError(
            f"{config.model_type} runs in one process: a norm of q, or of k, spans the heads of all shards"
        )


class ModelShard:
    """What one rank of a group has of a model."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        check_world_size(config, group.world_size)
        self.full_config, self.group = config, group
        self.heads = shard_heads(config, group.world_size)
        self.intermediate, self.hidden, self.vocabulary = (
            shard_ranges(size, group.world_size)
            for size in (config.intermediate_size, config.hidden_size, config.vocab_size)
        )

    @cached_property
    def config(self) -> ModelConfig:
        """Of the shard: its own heads and MLP columns, the full hidden size and vocabulary."""
        heads = self.heads[self.group.rank]
        return replace(
            self.full_config,
            head_dim=self.full_config.computed_head_dim,
            num_attention_heads=len(heads.query),
            num_key_value_heads=len(heads.key),
            intermediate_size=len(self.intermediate[self.group.rank]),
        )

    def build(self) -> Decoder:
        """The model of this rank: o_proj, down_proj, the embedding and the head gather from all ranks."""
        config, group = self.full_config, self.group
        model = build_model(self.config)
        hidden, intermediate, vocabulary = (
            [len(each) for each in ranges] for ranges in (self.hidden, self.intermediate, self.vocabulary)
        )
        queries = [len(heads.query) * config.computed_head_dim for heads in self.heads]
        with torch.device("meta"):
            full = dict(build_model(config).named_parameters())
        for layer in cast(Sequence[Block], model.layers):
            layer.self_attn.o_proj = ShardedLinear(group, queries, hidden, bias=layer.self_attn.o_proj.bias is not None)
            mlp = cast(MLP, layer.mlp)
            mlp.down_proj = ShardedLinear(group, intermediate, hidden, bias=mlp.down_proj.bias is not None)
        model.embed_tokens = ShardedEmbedding(group, config.vocab_size, config.hidden_size)
        model.lm_head = ShardedLinear(group, config.hidden_size, vocabulary)
        model.tie_weights()
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                module.unsharded_rows = len(full.get(f"{name}.weight", full["embed_tokens.weight"]))  # a tied head's
        model.group = group
        return model

    def rows(self, name: str, count: int) -> range:
        """Which of the `count` rows of a checkpoint's tensor this rank loads."""
        rank, head_dim = self.group.rank, self.full_config.computed_head_dim
        match name.split(".")[-2]:
            case "q_proj" | "k_proj" | "v_proj" as part:
                heads = self.heads[rank].query if part == "q_proj" else self.heads[rank].key
                return range(heads.start * head_dim, heads.stop * head_dim)
            case "gate_proj" | "up_proj":
                return self.intermediate[rank]
            case "o_proj" | "down_proj":
                return self.hidden[rank]
            case "embed_tokens" | "lm_head":
                return self.vocabulary[rank]
        return range(count)
