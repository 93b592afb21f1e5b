"""Stand-ins for what a unit test should not depend on: mock models, and slow references in plain formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infer import GrowingCache, KVCache, ModelConfig, SlidingCache
from infer.cache import BaseCache, Cache, NoCache, PagedCache
from infer.cache.int8 import decode, encode
from infer.models.common import Decoder

# Every cache goes through the same contract tests; a further one joins them here.
CACHES = [KVCache, GrowingCache, SlidingCache, PagedCache]
# And so does every way to lay one out, as `from_model_config` takes it.
LAYOUTS: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {}) for cls in CACHES),
    *((SlidingCache, {"prefill_chunk": chunk}) for chunk in (1, 3)),
    *((PagedCache, {"page_size": page}) for page in (1, 3)),
]
LAYOUT_NAMES = ["-".join([cls.__name__, *(f"{k}={v}" for k, v in options.items())]) for cls, options in LAYOUTS]
# In what a cache may store the keys and values of a float32 model.
STORED = ["float32", "int8"]


def as_stored(x: Tensor, cache: BaseCache) -> Tensor:
    """What comes back of x [..., D] from a cache like this one."""
    return decode(encode(x), x.dtype) if cache.quantized else x


class RoundingNoCache(NoCache):
    """Keeps nothing, but attends to keys and values as an int8 cache would return them: its reference."""

    def _store(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return decode(encode(k), k.dtype), decode(encode(v), v.dtype)

    attend = BaseCache.attend


class MockModel:
    """Answers with the given tokens in turn, then with the last of them; ignores the cache and counts its calls."""

    def __init__(self, *tokens: int, vocab_size: int = 10, device: str = "cpu", **config: Any) -> None:
        self.config = ModelConfig(
            model_type="llama",
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            **({"max_position_embeddings": 64} | config),
        )
        self.tokens = tokens
        self.weight = nn.Parameter(torch.zeros(1, device=device))
        self.fed: list[list[int]] = []

    @property
    def calls(self) -> int:
        return len(self.fed)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter([self.weight])

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor:
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        logits[:, -1, self.tokens[min(self.calls, len(self.tokens) - 1)]] = 10.0
        self.fed.append(input_ids[0].tolist())
        return logits


class UniformMockModel(MockModel):
    """Finds every token equally likely."""

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor:
        self.fed.append(input_ids[0].tolist())
        return torch.zeros(*input_ids.shape, self.config.vocab_size)


class MockTokenizer:
    """Decodes, and does nothing else."""

    def __init__(self, words: Sequence[str] = "abcdefghij") -> None:
        self.words = words

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.words[i] for i in token_ids)


class Letters:
    """A letter for each token, however many there are."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in token_ids)


def sees(q_pos: int, k_pos: int, window: int | None) -> bool:
    """The visibility rule for one pair."""
    if k_pos < 0 or k_pos > q_pos:
        return False
    return window is None or q_pos - k_pos < window


def naive_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Full attention over a whole sequence from position 0: q [B, Hq, S, D], k and v [B, Hkv, S, D]."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    seen = torch.tensor([[sees(i, j, window) for j in range(length)] for i in range(length)])
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def naive_logits(model: Decoder, input_ids: Tensor) -> Tensor:
    """The logits [B, S, V] from a model's weights and textbook formulas; RoPE unscaled, or linearly."""
    config = model.config
    batch, length = input_ids.shape
    head_dim = config.computed_head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    gemma = config.model_type == "gemma3"

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        if gemma:
            weight = weight + 1
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def turn(x: Tensor, layer_type: str) -> Tensor:
        local = gemma and layer_type == "sliding_attention"
        theta = config.local_rope.theta if local else config.rope.theta
        factor = config.rope.factor if config.rope.scaling == "linear" and not local else 1.0
        first, second = x.chunk(2, dim=-1)
        inv_freq = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]) / factor
        angles = torch.arange(length)[:, None] * inv_freq  # [S, D/2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def split(x: Tensor, count: int) -> Tensor:
        return x.view(batch, length, count, head_dim).transpose(1, 2)  # [B, H, S, D]

    def linear(x: Tensor, product: nn.Module) -> Tensor:
        y = x @ product.weight.T
        return y if product.bias is None else y + product.bias

    def activation(x: Tensor) -> Tensor:
        if gemma:
            return 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())
        return x * x.sigmoid()

    x = model.embed_tokens.weight[input_ids]
    if gemma:
        x = x * config.hidden_size**0.5
    for i, layer in enumerate(model.layers):
        attn = layer.self_attn
        y = linear(norm(x, layer.input_layernorm.weight), attn.qkv_proj)
        q, k, v = y.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
        q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
        if config.model_type != "llama":
            q, k = norm(q, attn.q_norm.weight), norm(k, attn.k_norm.weight)
        q, k = turn(q, config.layer_types[i]), turn(k, config.layer_types[i])
        scale = (config.query_pre_attn_scalar or head_dim) ** -0.5
        y = naive_attention(q, k, v, scale=scale, window=config.window(i))
        y = linear(y.transpose(1, 2).reshape(batch, length, -1), attn.o_proj)
        x = x + (norm(y, layer.post_attention_layernorm.weight) if gemma else y)
        before_mlp = layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
        gate, up = linear(norm(x, before_mlp.weight), layer.mlp.gate_up_proj).chunk(2, dim=-1)
        y = linear(activation(gate) * up, layer.mlp.down_proj)
        x = x + (norm(y, layer.post_feedforward_layernorm.weight) if gemma else y)
    return norm(x, model.norm.weight) @ model.lm_head.weight.T
