"""The one forward pass that every model shares, in plain torch.

    tokens -> embed -> [ block ] x num_hidden_layers -> norm -> lm_head -> logits

Shapes: T tokens of all rows; Hq query heads, Hkv key/value heads, D head_dim, C hidden_size. Activations are [T, C]:
only attention cares which token belongs to which row. How a model runs fast is decided in `infer.backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.cache.base import AttendOptions, Cache, NoCache
from infer.cache.debug import debugged
from infer.config import ModelConfig
from infer.models.moe import MoE
from infer.models.rows import ALL, LAST, HiddenStates, PackedBatch, Row, pack
from infer.nn.activation import activated, gated
from infer.nn.linear import Embedding, FusedLinear, Linear
from infer.nn.module import Module, is_autocast
from infer.nn.norm import LayerNorm, Norm, RMSNorm
from infer.nn.quantized import QuantizedWeight, describe_kinds
from infer.nn.rope import Rope, apply_rope, query_scales
from infer.nn.sharded import Group
from infer.values import value_or_type

Run = Callable[[Sequence[Row]], list[Tensor]]
T = TypeVar("T")


class ForwardContext(NamedTuple):
    """What all layers share in one forward pass."""

    rows: PackedBatch
    rope_cos_sin: Mapping[str, tuple[Tensor, Tensor]]  # by layer type: each [T, D]; empty where positions are learned
    query_scales: Tensor | None = None  # [T]


class Attention(Module):
    """Project, norm, rotate, and leave the rest to the cache: it stores k and v and knows which keys are visible."""

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        qk_norm: type[RMSNorm] | None = None,
        *,
        per_head: bool = True,
        sinks: bool = False,
    ) -> None:
        """per_head: whether q and k are normalized head by head. sinks: see `softmax_attention`."""
        super().__init__()
        self.layer_idx = layer_idx
        self.rope_type = config.rope_type(layer_idx)
        self.window = config.window(layer_idx)
        self.softcap = config.attn_logit_softcapping
        self.head_dim = config.computed_head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scale = config.attention_scale / (layer_idx + 1 if config.scale_attn_by_inverse_layer_idx else 1)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
        )
        output_bias = config.attention_output_bias
        output_bias = config.attention_bias if output_bias is None else output_bias
        self.o_proj = Linear(q_size, config.hidden_size, bias=output_bias)
        sizes = (self.head_dim, self.head_dim) if per_head else (q_size, kv_size)
        self.q_norm = None if qk_norm is None else qk_norm(sizes[0], config.rms_norm_eps)
        self.k_norm = None if qk_norm is None else qk_norm(sizes[1], config.rms_norm_eps)
        self.sinks: Tensor | None
        self.register_parameter("sinks", nn.Parameter(torch.zeros(self.num_heads)) if sinks else None)

    def forward(self, x: Tensor, residual: Tensor | None, forward_pass: ForwardContext) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        qk, v = heads.split_with_sizes([self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes([self.num_heads, self.num_kv_heads], 1)
            qk = torch.cat((_normed_heads(q, self.q_norm), _normed_heads(k, self.k_norm)), 1)
        if self.rope_type is not None:
            qk = apply_rope(qk, *forward_pass.rope_cos_sin[self.rope_type])
        q, k = qk.split_with_sizes([self.num_heads, self.num_kv_heads], 1)
        if forward_pass.query_scales is not None:
            q = (q * forward_pass.query_scales[:, None, None]).to(q.dtype)
        options: AttendOptions = {"scale": self.scale, "window": self.window}
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.sinks is not None:
            options["sinks"] = self.sinks
        out = forward_pass.rows.attend(self.layer_idx, q, k, v, **options)  # [T, Hq D]
        return self.o_proj(out, residual)  # type: ignore[no-any-return]


def _normed_heads(x: Tensor, norm: RMSNorm) -> Tensor:
    """x [T, H, D], each head or all of them together normalized."""
    return norm(x) if norm.weight.shape[0] == x.shape[2] else norm(x.flatten(1)).view_as(x)  # type: ignore[no-any-return]


class MLP(Module):
    """down(activation(gate(x)) * up(x)): SwiGLU with a SiLU, GeGLU with a GELU."""

    def __init__(self, config: ModelConfig, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        size = config.intermediate_size
        self.gate_up_proj = FusedLinear(config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.down_proj(gated(self.gate_up_proj(x), self.activation), residual)  # type: ignore[no-any-return]

    @property
    def first(self) -> Linear:
        return self.gate_up_proj


class UngatedMLP(Module):
    """down(activation(up(x)))"""

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.down_proj(activated(self.up_proj(x), self.activation), residual)  # type: ignore[no-any-return]

    @property
    def first(self) -> Linear:
        return self.up_proj


class Norms(NamedTuple, Generic[T]):
    """A block's norms, or their names, by where they stand."""

    before_attention: T | None = None
    before_mlp: T | None = None
    after_attention: T | None = None
    after_mlp: T | None = None


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with a norm before or after each, or both.

    If there is nothing after a GEMM, it adds the residual.
    """

    # What differs between families.
    norm: type[Norm] = RMSNorm
    norm_names = Norms[str](before_attention="input_layernorm", before_mlp="post_attention_layernorm")
    qk_norm: type[RMSNorm] | None = None
    qk_norm_per_head = True
    sinks = False  # of attention
    gated = True  # the MLP
    activation = "silu"  # unless the config has one

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        # In the order of the computation: optimizers number parameters by it.
        first, *others = self.norm_names
        if first is not None:
            setattr(self, first, self.make_norm(config))
        self.self_attn = Attention(config, layer_idx, self.qk_norm, per_head=self.qk_norm_per_head, sinks=self.sinks)
        for name in filter(None, others):
            setattr(self, name, self.make_norm(config))
        activation = config.hidden_act or self.activation
        dense = MLP if self.gated else UngatedMLP
        self.mlp: MLP | UngatedMLP | MoE = (MoE if config.has_experts(layer_idx) else dense)(config, activation)
        self.dropout = config.dropout  # of the output of each half, in training
        self.multiplier, self.parallel = config.residual_multiplier, config.parallel_residual

    @classmethod
    def make_norm(cls, config: ModelConfig) -> Norm:
        size, eps = config.hidden_size, config.rms_norm_eps
        return LayerNorm(size, eps, bias=config.norm_bias) if cls.norm is LayerNorm else cls.norm(size, eps)

    def norms(self) -> Norms[Norm]:
        return Norms(*(name and getattr(self, name) for name in self.norm_names))

    def forward(self, x: Tensor, forward_pass: ForwardContext) -> Tensor:
        norms, dropout = self.norms(), self.dropout if self.training else 0.0
        if norms.after_attention is norms.after_mlp is None and self.multiplier == 1 and not dropout:
            y = self.self_attn(_normed(x, norms.before_attention), x, forward_pass)
            return self.mlp(_normed(x if self.parallel else y, norms.before_mlp), y)  # type: ignore[no-any-return]

        def added(x: Tensor, norm: Norm | None) -> Tensor:
            x = _normed(x, norm) * self.multiplier
            return F.dropout(x, dropout) if dropout else x

        y = x + added(self.self_attn(_normed(x, norms.before_attention), None, forward_pass), norms.after_attention)
        return y + added(self.mlp(_normed(x if self.parallel else y, norms.before_mlp), None), norms.after_mlp)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Decoder(Module):
    """A decoder-only transformer. Parameters are named as in Hugging Face checkpoints, fused ones apart."""

    block: type[Block] = Block
    embed_positions: Embedding | None = None  # learned positions
    group: Group | None = None  # the processes that have a shard of the model each, if there are several
    # What runs a model that is called: `infer.backend` sets it to the model's kernels, where they compute the same.
    run_of: ClassVar[Callable[[Decoder], Run]] = lambda model: model.run
    backend_of: ClassVar[Callable[[Decoder], str]] = lambda _: "torch"  # its name; `infer.backend` sets this, too
    name = ""  # or path that it was loaded by

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.block(config, i) for i in range(config.num_hidden_layers))
        self.norm = self.block.make_norm(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.ropes = {kind: Rope(rope, config.computed_head_dim) for kind, rope in config.ropes().items()}
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's weights with the head if the config says so; again after they are replaced."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        kv_cache: Cache | None = None,
        *,
        all_logits: bool = False,
        hidden: HiddenStates | None = None,
    ) -> Tensor:
        """input_ids [B, n] -> logits: [B, n, V] without a cache, [B, 1, V] of the last position with one.

        all_logits: of all n positions with a cache too. hidden: filled with hidden states.
        """
        if not isinstance(input_ids, Tensor):
            raise TypeError(f"input_ids must be a tensor of token ids [batch, tokens], not {value_or_type(input_ids)}")
        if isinstance(kv_cache, Tensor):
            raise TypeError(
                "the second argument is a KV cache, and a tensor was given: for a loss, pass the targets to "
                "F.cross_entropy(model(X).flatten(0, 1), Y.flatten()), or train a GPT of infer.compat.nanogpt"
            )
        if self.group is not None:
            raise TypeError("this process has a shard of the model: run it by `LLM`, `generate` or `generate_batch`")
        if kv_cache is None:
            batch = input_ids.shape[0] if input_ids.dim() else 1
            dropout = self.config.dropout if self.training else 0.0
            kv_cache, all_logits = NoCache(batch, input_ids.device, dropout), True
        row = Row(debugged(kv_cache, self.config.num_hidden_layers), input_ids, ALL if all_logits else LAST, hidden)
        # Both act on torch's operations, of which kernels have none.
        plain = torch.compiler.is_compiling() or is_autocast(self.device)
        return (self.run if plain else type(self).run_of(self))([row])[0]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad and any(isinstance(module, QuantizedWeight) for module in self.modules()):
            raise ValueError('quantized weights cannot be trained: load the model with dtype="float32"')
        return super().requires_grad_(requires_grad)

    def __repr__(self) -> str:
        """In one line; `print(model)` lists its modules."""
        return f"{type(self).__name__}({self.summary()})"

    def __str__(self) -> str:
        return super().__repr__()

    def summary(self) -> str:
        """Its name, size, dtype, device and backend."""
        quantized = [module for module in self.modules() if isinstance(module, QuantizedWeight)]
        count = sum(weight.numel() for weight in self.parameters())
        count += sum(weight.rows * weight.columns for weight in quantized)
        dtype, stored = _name_of(self.dtype), _name_of(next(self.parameters()).dtype)
        if quantized:
            stored = describe_kinds((weight.kind, weight.rows * weight.columns) for weight in quantized)
        facts = [
            f"{count / 1e6:,.1f}M parameters" + (f" in {stored}" if stored != dtype else ""),
            f"{dtype} on {self.device}",
            f"backend {type(self).backend_of(self)}",
        ]
        if self.group is not None:
            facts.insert(0, f"shard {self.group.rank} of {self.group.world_size}")
        return ", ".join([self.name, *facts] if self.name else facts)

    def extra_repr(self) -> str:
        config, dtype = self.config, _name_of(self.dtype)
        part = "" if self.group is None else f", shard {self.group.rank} of {self.group.world_size}"
        size = f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}"
        return f"{config.model_type}, {size}, computes in {dtype} on {self.device}{part}"

    def _apply(self, *how: Any, **more: Any) -> Any:
        if self.group is not None:
            raise TypeError("this process has a shard of the model: load it again with another dtype or device")
        return super()._apply(*how, **more)

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        """One forward pass over rows of any lengths, in plain torch. Returns the logits of each, [B, k, V]."""
        learned = None if self.embed_positions is None else self.embed_positions.weight.shape[0]
        packed = pack(rows, self.device, learned, self.embed_tokens)
        x = self.embed(packed.ids, packed.positions)  # [T, C]
        cos_sin = {kind: rope(packed.positions) for kind, rope in self.ropes.items()}
        forward_pass = ForwardContext(packed, cos_sin, self.query_scales(packed.positions))
        for i, layer in enumerate(self.layers):
            x = layer(x, forward_pass)
            packed.return_layer(i, x)
        packed.return_final(x, self.norm)
        logits = self.scale_logits(self.lm_head(self.norm(packed.select(x))))
        packed.advance()
        return packed.split(logits)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Both [T] -> [T, C]"""
        x: Tensor = self.embed_tokens(ids).to(self.dtype)  # quantized: float32
        if (scale := self.embed_scale) != 1:
            x = x * scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        return F.dropout(x, self.config.dropout) if self.training else x

    def query_scales(self, positions: Tensor) -> Tensor | None:
        """Positions [T] -> what queries are multiplied by [T]; None: 1."""
        rope = self.config.rope
        return None if rope is None or not rope.query_beta else query_scales(rope, positions)

    def scale_logits(self, logits: Tensor) -> Tensor:
        if (divisor := self.config.logits_scaling) != 1:
            logits = logits / divisor
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def embed_scale(self) -> float:
        return self.config.embedding_multiplier

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype  # weights may be quantized, norms are not
