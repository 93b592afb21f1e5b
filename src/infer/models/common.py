"""The one forward pass that every model shares.

    tokens -> embed -> [ block ] x num_hidden_layers -> norm -> lm_head -> logits

Shapes: B rows of n new tokens, T = B * n tokens in all; Hq query heads, Hkv key/value heads, D head_dim, C hidden_size.
Activations are [T, C]: only attention cares which token belongs to which row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.cache.base import Cache, NoCache
from infer.config import ModelConfig
from infer.ops import compiled, fused, gpu_prompt
from infer.ops.activation import activated, gated
from infer.ops.linear import Embedding, FusedLinear, Linear
from infer.ops.module import Module
from infer.ops.norm import LayerNorm, Norm, RMSNorm, ZeroCentredRMSNorm
from infer.ops.parts import ACTIVATION_CODES, BlockParts, EmbeddingParts, HeadParts, Planner
from infer.ops.quantized import QuantizedWeight
from infer.ops.rope import Rope, apply_rope


class Pass(NamedTuple):
    """What all layers share in one forward pass."""

    batch: int
    n: int
    positions: Tensor  # [B, n]
    ropes: dict[str, Rope]  # by layer type; empty where positions are learned
    made: dict[str, tuple[Tensor, Tensor]]  # what `rope` has returned so far
    cache: Cache
    compiled: bool = False  # whether ops/compiled.py runs the blocks that it can
    gpu: GpuPositions | None = None  # whether ops/gpu_prompt.py does, and what it asks for

    def rope(self, layer_type: str) -> tuple[Tensor, Tensor] | None:
        """cos and sin [B, 1, n, D] for layers of this type; None where positions are learned."""
        if layer_type not in self.ropes:
            return None
        if layer_type not in self.made:
            self.made[layer_type] = self.ropes[layer_type](self.positions)
        return self.made[layer_type]


class GpuPositions(NamedTuple):
    """The positions of a pass, in the form that GPU kernels take."""

    positions: Tensor  # int32 [T]
    rope_cos_sin: dict[str, Tensor]  # by layer type: [T, 2, D]


class Attention(Module):
    """Project, norm, rotate, and leave the rest to the cache: it stores k and v and knows which keys are visible."""

    def __init__(self, config: ModelConfig, layer_idx: int, qk_norm: type[RMSNorm] | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.window = config.window(layer_idx)
        self.head_dim = config.computed_head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scale = config.attention_scale
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = None if qk_norm is None else qk_norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = None if qk_norm is None else qk_norm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, step: Pass) -> Tensor:
        heads = self.qkv_proj(x).view(step.batch, step.n, -1, self.head_dim).transpose(1, 2)  # [B, Hq + 2 Hkv, n, D]
        qk, v = heads.split_with_sizes([self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes([self.num_heads, self.num_kv_heads], 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        if (rope := step.rope(self.layer_type)) is not None:
            qk = apply_rope(qk, *rope)
        q, k = qk.split_with_sizes([self.num_heads, self.num_kv_heads], 1)
        out = step.cache.attend(self.layer_idx, q, k, v, scale=self.scale, window=self.window)  # [B, Hq, n, D]
        return self.o_proj(out.transpose(1, 2).reshape(x.shape[0], -1), residual)  # type: ignore[no-any-return]


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


class Norms(NamedTuple):
    """A block's norms by where they stand."""

    before_attention: Norm
    before_mlp: Norm
    after_attention: Norm | None = None
    after_mlp: Norm | None = None


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with a norm behind each too where the model has one.

    Where there is none, the last product of each adds the residual.
    """

    norm: type[RMSNorm] = RMSNorm
    qk_norm: type[RMSNorm] | None = None
    activation = "silu"

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = self.make_norm(config)
        self.self_attn = Attention(config, layer_idx, self.qk_norm)
        self.post_attention_layernorm = self.make_norm(config)
        self.mlp = self.make_mlp(config)
        self.dropout = config.dropout  # of what each half adds, while a model is trained
        self.planner: Planner[compiled.Plan] = Planner(PLAIN, compiled.readable)
        self.gpu_planner: Planner[gpu_prompt.BlockPlan] = Planner(PLAIN, fused.readable)

    @classmethod
    def make_norm(cls, config: ModelConfig) -> Norm:
        return cls.norm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def make_mlp(cls, config: ModelConfig) -> MLP | UngatedMLP:
        return MLP(config, cls.activation)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        if step.compiled:
            plan = self.planner(self.modules_within, self.plan)
            if plan is not None and plan.takes(x):
                return self.through_kernels(x, step, plan)
        if step.gpu is not None:
            gpu_plan = self.gpu_planner(self.modules_within, self.plan_gpu)
            if gpu_plan is not None and gpu_plan.takes(x):
                return self.through_gpu_kernels(x, step, step.gpu, gpu_plan)
        return self.plain(x, step)

    def plain(self, x: Tensor, step: Pass) -> Tensor:
        norms = self.norms()
        if norms.after_attention is None and norms.after_mlp is None and not self.drops:
            x = self.self_attn(norms.before_attention(x), x, step)
            return self.mlp(norms.before_mlp(x), x)  # type: ignore[no-any-return]
        x = x + self.added(self.self_attn(norms.before_attention(x), None, step), norms.after_attention)
        return x + self.added(self.mlp(norms.before_mlp(x), None), norms.after_mlp)

    def added(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if norm is None else norm(x)
        return F.dropout(x, self.dropout) if self.drops else x

    @property
    def drops(self) -> bool:
        return self.training and self.dropout > 0

    def norms(self) -> Norms:
        return Norms(before_attention=self.input_layernorm, before_mlp=self.post_attention_layernorm)

    def modules_within(self) -> list[nn.Module] | None:
        """All that kernels stand for in a block; None where they stand for nothing like them."""
        attn, mlp, norms = self.self_attn, self.mlp, self.norms()
        if (
            type(self).plain is not Block.plain
            or "plain" in self.__dict__
            or self.drops
            or type(attn) is not Attention
            or type(mlp) not in (MLP, UngatedMLP)
            or mlp.activation not in ACTIVATION_CODES
            or (attn.q_norm is None) != (attn.k_norm is None)
        ):
            return None
        found = [attn, mlp, attn.qkv_proj, attn.o_proj, mlp.first, mlp.down_proj, attn.q_norm, attn.k_norm, *norms]
        return [module for module in found if module is not None]

    def parts(self) -> BlockParts | None:
        """As kernels see it; None where its shapes do not fit each other."""
        attn, mlp = self.self_attn, self.mlp
        parts = BlockParts(
            attn.qkv_proj,
            attn.o_proj,
            mlp.first,
            mlp.down_proj,
            **self.norms()._asdict(),
            q_norm=attn.q_norm,
            k_norm=attn.k_norm,
            heads=attn.num_heads,
            kv_heads=attn.num_kv_heads,
            head_dim=attn.head_dim,
            scale=attn.scale,
            window=attn.window,
            activation=mlp.activation,
            gated=isinstance(mlp, MLP),
        )
        return parts if parts.fit() else None

    def plan(self) -> compiled.Plan | None:
        parts = self.parts()
        return None if parts is None else compiled.plan_block(parts)

    def plan_gpu(self) -> gpu_prompt.BlockPlan | None:
        parts = self.parts()
        return None if parts is None else gpu_prompt.plan_block(parts)

    def through_kernels(self, x: Tensor, step: Pass, plan: compiled.Plan) -> Tensor:
        """The same through the CPU's kernels, in two parts around the cache."""
        attn = self.self_attn
        heads = compiled.before_attention(plan, x, step.rope(attn.layer_type))
        heads = heads.view(step.batch, step.n, -1, attn.head_dim).transpose(1, 2)
        q, k, v = heads.split_with_sizes([attn.num_heads, attn.num_kv_heads, attn.num_kv_heads], 1)
        out = step.cache.attend(attn.layer_idx, q, k, v, scale=attn.scale, window=attn.window)
        return compiled.behind_attention(plan, out.transpose(1, 2).reshape(x.shape[0], -1), x)

    def through_gpu_kernels(self, x: Tensor, step: Pass, gpu: GpuPositions, plan: gpu_prompt.BlockPlan) -> Tensor:
        attn = self.self_attn
        heads = gpu_prompt.before_attention(plan, x, gpu.positions, gpu.rope_cos_sin.get(attn.layer_type))
        q, k, v = (each.view(step.batch, step.n, -1, attn.head_dim).transpose(1, 2) for each in heads)
        out = step.cache.attend(attn.layer_idx, q, k, v, scale=attn.scale, window=attn.window)
        return gpu_prompt.behind_attention(plan, out.transpose(1, 2).reshape(x.shape[0], -1), x)


# What the kernels stand for.
PLAIN: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (
        Block,
        Attention,
        MLP,
        UngatedMLP,
        RMSNorm,
        ZeroCentredRMSNorm,
        LayerNorm,
        Linear,
        FusedLinear,
        QuantizedWeight,
    )
}


class Decoder(Module):
    """A decoder-only transformer. Parameters are named as in Hugging Face checkpoints, fused ones apart."""

    block: type[Block] = Block

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.block(config, i) for i in range(config.num_hidden_layers))
        self.norm = self.block.make_norm(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.planned: list[nn.Module] = []
        self.step_planner: Planner[compiled.Plan] = Planner(PLAIN, compiled.readable)
        self.head_planner: Planner[compiled.Plan] = Planner(PLAIN, compiled.readable)
        self.fused_planner: Planner[fused.Plan] = Planner(PLAIN, fused.readable)
        self.gpu_head_planner: Planner[gpu_prompt.HeadPlan] = Planner(PLAIN, fused.readable)
        self.ropes = {kind: Rope(rope, config.computed_head_dim) for kind, rope in config.ropes().items()}
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head share the embedding's weights where the config says so; again after they are replaced."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor:
        """input_ids [B, n] -> logits: [B, n, V] without a cache, [B, 1, V] of the last position with one.

        all_logits: of all n positions with a cache too.
        """
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            kind = f"{str(input_ids.dtype).removeprefix('torch.')} of shape {list(input_ids.shape)}"
            raise ValueError(f"input_ids must be whole numbers [batch, tokens], not {kind}")
        batch, n = input_ids.shape
        if not input_ids.numel():
            raise ValueError(f"there are no tokens in input_ids of shape {list(input_ids.shape)}")
        dropout = self.config.dropout if self.training else 0.0
        cache = NoCache(batch, input_ids.device, dropout) if kv_cache is None else kv_cache
        positions = cache.positions(n)
        if positions.shape[0] != batch:
            raise ValueError(f"input_ids have a batch of {batch}, but the cache one of {positions.shape[0]}")
        x = self.embed(input_ids.flatten(), positions.flatten()).to(self.dtype)  # [T, C]
        step = Pass(batch, n, positions, self.ropes, {}, cache, compiled.available(x, PLAIN))
        if n == 1 and (step.compiled or x.is_cuda) and (logits := self.decode(x, step)) is not None:
            cache.advance(1)
            return logits[:, None]
        step = step._replace(gpu=self._gpu_positions(x, positions))
        for layer in self.layers:
            x = layer(x, step)
        cache.advance(n)
        if kv_cache is not None and not all_logits:
            x = x.view(batch, n, -1)[:, -1].contiguous()  # [B, C]: generation samples from the last position alone
        return self.head(x, step).view(batch, -1, self.config.vocab_size)

    def _gpu_positions(self, x: Tensor, positions: Tensor) -> GpuPositions | None:
        """None where there are no kernels, or something other than them must run."""
        if not fused.available(x.device, PLAIN):
            return None
        at = positions.flatten().to(torch.int32)
        return GpuPositions(at, {kind: gpu_prompt.turns(rope.inv_freq, at) for kind, rope in self.ropes.items()})

    def decode(self, x: Tensor, step: Pass) -> Tensor | None:
        """Logits [B, V] for the next token of each row, in one call; None where the modules or the cache must run."""
        if x.is_cuda:
            fused_plan = self.fused_plan()
            if fused_plan is None or not fused_plan.takes(x) or (tables := step.cache.table(self.config, x)) is None:
                return None
            return fused.step(fused_plan, x, tables)
        plan = self.cpu_plan()
        if plan is None or not plan.takes(x) or (tables := step.cache.table(self.config, x)) is None:
            return None
        rows = {kind: compiled.addresses(step.rope(kind)) for kind in dict.fromkeys(self.config.layer_types)}
        ropes = np.array([rows[kind] for kind in self.config.layer_types])
        return compiled.step(plan, x, ropes, tables)

    def cpu_plan(self) -> compiled.Plan | None:
        """A decode step for the kernels of a CPU; None where they stand for nothing like this model."""
        self._look_at_layers()
        return self.step_planner(self.modules_within, self.plan)

    def _look_at_layers(self) -> None:
        if self.planned != [*self.layers]:  # ModuleList does not bump `Module.changes`; assigning an attribute does
            self.planned = [*self.layers]

    def modules_within(self) -> list[nn.Module] | None:
        """All that kernels stand for in a step, but the embedding; None where they stand for nothing like them."""
        config = self.config
        found: list[nn.Module] = [self.norm, self.lm_head]
        if len(self.layers) != config.num_hidden_layers or type(self).head is not Decoder.head or "head" in vars(self):
            return None
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Block) or (within := layer.modules_within()) is None:
                return None
            attn = layer.self_attn
            # The cache's tables, and the ropes, go by the config.
            if (attn.layer_idx, attn.window, attn.layer_type) != (i, config.window(i), config.layer_types[i]):
                return None
            if (attn.num_kv_heads, attn.head_dim) != (config.num_key_value_heads, config.computed_head_dim):
                return None
            found += [layer, *within]
        return found

    def parts(self) -> tuple[list[BlockParts], HeadParts] | None:
        """As kernels see it; None where its shapes do not fit each other."""
        blocks = [layer.parts() for layer in self.layers if isinstance(layer, Block)]
        fitting = [block for block in blocks if block is not None]
        head = HeadParts(self.norm, self.lm_head)
        return (fitting, head) if len(fitting) == len(self.layers) and head.fit() else None

    def plan(self) -> compiled.Plan | None:
        parts = self.parts()
        return None if parts is None else compiled.plan_step(*parts)

    def fused_plan(self) -> fused.Plan | None:
        """For the kernels of a GPU; None where there are none, or they stand for nothing like this model."""
        if not fused.available(self.device, PLAIN):
            return None
        self._look_at_layers()
        return self.fused_planner(self.modules_within, self._plan_fused)

    def _plan_fused(self) -> fused.Plan | None:
        parts = self.parts()
        frequencies = {kind: rope.inv_freq for kind, rope in self.ropes.items()}
        ropes = [frequencies.get(kind) for kind in self.config.layer_types]
        return None if parts is None else fused.plan(*parts, ropes)

    def head(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, C] -> logits [T, V]"""
        if step.compiled:
            plan = self.head_planner(lambda: (self.norm, self.lm_head), self.plan_head)
            if plan is not None and plan.takes(x):
                return compiled.head(plan, x)
        if step.gpu is not None:
            gpu_plan = self.gpu_head_planner(lambda: (self.norm, self.lm_head), self.plan_gpu_head)
            if gpu_plan is not None and gpu_plan.takes(x):
                return gpu_prompt.head(gpu_plan, x)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]

    def plan_gpu_head(self) -> gpu_prompt.HeadPlan | None:
        head = HeadParts(self.norm, self.lm_head)
        return gpu_prompt.plan_head(head) if head.fit() else None

    def plan_head(self) -> compiled.Plan | None:
        head = HeadParts(self.norm, self.lm_head)
        return compiled.plan_head(head) if head.fit() else None

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Both [T] -> [T, C]"""
        tokens, learned, factor = self.embedding_parts()
        x: Tensor = tokens(input_ids).to(self.dtype)  # quantised: float32
        if factor != 1:
            x = x * factor
        if learned is not None:
            x = x + learned(positions)
        return F.dropout(x, self.config.dropout) if self.training else x

    def embedding_parts(self) -> EmbeddingParts:
        return EmbeddingParts(self.embed_tokens)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype  # weights may be quantised, norms are not
