"""A mixture of experts, in the place of an MLP.

    x ──► router ──► softmax ──► top k ──┬── expert 3 (an MLP) * weight ──┐
                                         ├── expert 8 * weight ───────────┼── + ──►
                                         └── ...                          ┘

What a token gets depends on its own routing alone: equal logits go to the lower expert, and outputs are added in the
order of the experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.config import ModelConfig
from infer.nn.activation import gated
from infer.nn.linear import ExpertLinear, Linear
from infer.nn.module import Module


class Experts(Module):
    """Their weights are stacked, expert after expert."""

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        self.activation = activation
        count, size = config.num_experts, config.moe_intermediate_size or config.intermediate_size
        sizes = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ExpertLinear(config.hidden_size, count, sizes, bias=config.mlp_bias)
        self.down_proj = ExpertLinear(size, count, {"down_proj": config.hidden_size}, bias=config.mlp_bias)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, C]; chosen, weights [T, k] -> [T, C]"""
        out = torch.zeros_like(x)
        for expert in sorted({*chosen.flatten().tolist()}):
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            y = self.down_proj(gated(self.gate_up_proj(x[tokens], expert), self.activation), expert)
            out.index_add_(0, tokens, (y * weights[tokens, slots, None]).to(out.dtype))
        return out

    @property
    def first(self) -> Linear:
        return self.gate_up_proj


class MoE(Module):
    """The sum of a token's experts, weighted by the softmax of the router's logits."""

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        self.top_k, self.norm_topk = config.num_experts_per_tok, config.norm_topk_prob
        self.router = Linear(config.hidden_size, config.num_experts, bias=config.mlp_bias)
        self.experts = Experts(config, activation)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out: Tensor = self.experts(x, *self.route(x))
        return out if residual is None else out + residual

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, C] -> the experts of each token and their weights, both [T, k]."""
        logits = self.router(x).float()  # [T, E]
        chosen = logits.sort(descending=True, stable=True).indices[:, : self.top_k]
        weights = logits.softmax(-1).gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.norm_topk else weights
