"""The structure of a model as kernels need it, and the check that its modules compute what kernels do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from infer.cache.base import ScoreOptions
from infer.config import ModelConfig
from infer.models.common import MLP, Attention, Block, Decoder, UngatedMLP
from infer.models.moe import Experts, MoE
from infer.nn.activation import ACTIVATIONS
from infer.nn.linear import Embedding, ExpertLinear, FusedLinear, Linear
from infer.nn.module import Module
from infer.nn.norm import LayerNorm, Norm, RMSNorm, ZeroCenteredRMSNorm
from infer.nn.quantized import QuantizedWeight, StackedWeight
from infer.nn.rope import Rope, query_scales
from infer.nn.sharded import ShardedEmbedding, ShardedExpertLinear, ShardedLinear, ShardedRMSNorm

# Classes the kernels implement; a monkeypatched forward disqualifies the class.
SUPPORTED = (
    *(Block, Attention, MLP, UngatedMLP, MoE, Experts, RMSNorm, ZeroCenteredRMSNorm, LayerNorm),
    *(Linear, FusedLinear, ExpertLinear, Embedding),
)
SHARDED = (ShardedLinear, ShardedExpertLinear, ShardedRMSNorm, ShardedEmbedding)
FORWARDS: dict[Any, Any] = {kind: kind.forward for kind in (*SUPPORTED, *SHARDED, QuantizedWeight, StackedWeight)}
METHODS = {name: getattr(Decoder, name) for name in ("forward", "run", "embed", "query_scales", "scale_logits")}


STEPS_AHEAD = 1  # captured steps launched before the last tokens are read; a ring can be rolled back by STEPS_AHEAD + 1
DRAFT_LEVELS = (1, 2, 4, 8)  # the most drafts of a sequence in a step: there are captured steps for each


class EmbeddingParts(NamedTuple):
    """What stands before the blocks: a token's vector, times a factor, and its position's, where they are learned."""

    tokens: Embedding
    positions: Embedding | None
    factor: float


class Routing(NamedTuple):
    """Which experts a token goes through, and with what weights."""

    router: Linear
    num_experts: int
    top_k: int
    norm_topk: bool  # whether the weights of a token's experts add up to 1


class BlockParts(NamedTuple):
    """What a block is made of. In a mixture, `up` and `down` hold the matrices of all experts, one after the other."""

    qkv: Linear
    o: Linear
    up: Linear
    down: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    activation: str
    rope_type: str | None = None
    gated: bool = True  # `up` is the fused gate_up projection
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq]: see `softmax_attention`
    multiplier: float = 1.0  # of what attention and the MLP add to the residual
    parallel: bool = False  # attention and the MLP both read the block's input
    before_attention: Norm | None = None
    before_mlp: Norm | None = None
    q_norm: Norm | None = None  # of each head, or of all together
    k_norm: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None
    routing: Routing | None = None  # of a mixture of experts

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv, self.o, self.up, self.down, *([] if self.routing is None else [self.routing.router])]

    def fit(self, hidden: int) -> bool:
        """Whether all shapes fit each other; where they do not, torch has an error for it."""
        inner, q_size = self.down.in_features, self.heads * self.head_dim
        experts = 1 if self.routing is None else self.routing.num_experts
        return (
            self.heads % self.kv_heads == 0
            and _linear_fits(self.qkv, q_size + 2 * self.kv_heads * self.head_dim, hidden)
            and _linear_fits(self.o, hidden, q_size)
            and _linear_fits(self.up, experts * inner * (2 if self.gated else 1), hidden)
            and _linear_fits(self.down, experts * hidden, inner)
            and (self.routing is None or _linear_fits(self.routing.router, experts, hidden))
            and (self.routing is None or 1 <= self.routing.top_k <= experts)
            and (self.sinks is None or self.sinks.shape == (self.heads,))
            and self._qk_norms_fit()
            and all(_norm_fits(norm, hidden) for norm in (self.before_attention, self.before_mlp))
            and all(_norm_fits(norm, hidden) for norm in (self.after_attention, self.after_mlp))
        )

    def score_options(self) -> ScoreOptions:
        options: ScoreOptions = {"scale": self.scale, "window": self.window}
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.sinks is not None:
            options["sinks"] = self.sinks
        return options

    @property
    def norms_heads_apart(self) -> bool:
        """Whether q and k are normalized head by head."""
        return self.q_norm is not None and self.q_norm.weight.shape[0] == self.head_dim

    def _qk_norms_fit(self) -> bool:
        size = self.head_dim
        if self.norms_heads_apart or self.q_norm is None:
            return _norm_fits(self.q_norm, size) and _norm_fits(self.k_norm, size)
        return _norm_fits(self.q_norm, self.heads * size) and _norm_fits(self.k_norm, self.kv_heads * size)


class HeadParts(NamedTuple):
    """The final norm, the head, and what is done to its output."""

    norm: Norm
    linear: Linear
    divisor: float = 1.0
    softcap: float | None = None

    def fit(self, hidden: int) -> bool:
        return _linear_fits(self.linear, self.linear.out_features, hidden) and _norm_fits(self.norm, hidden)


class ModelParts(NamedTuple):
    config: ModelConfig
    embedding: EmbeddingParts
    blocks: Sequence[BlockParts]
    head: HeadParts
    ropes: Mapping[str, Rope]  # by layer type
    positions_learned: int | None  # how many, where positions are

    def query_scales(self, positions: Tensor) -> Tensor | None:
        """As `Decoder.query_scales`."""
        rope = self.config.rope
        return None if rope is None or not rope.query_beta else query_scales(rope, positions)


class UnsupportedByKernels(Exception):
    """Why no kernels run a model."""


def parts_of(model: Decoder) -> ModelParts:
    """Raises UnsupportedByKernels where kernels would not compute what the modules do."""
    _check_modules(model)
    config, layers = model.config, list(model.layers)
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedByKernels(f"the model has {len(layers)} layers, and its config {config.num_hidden_layers}")
    blocks = [_block_parts(layer, i, config) for i, layer in enumerate(layers) if isinstance(layer, Block)]
    embedding = EmbeddingParts(model.embed_tokens, model.embed_positions, model.embed_scale)
    tables = [(model.embed_tokens, config.vocab_size), (model.embed_positions, config.max_position_embeddings)]
    fit = all(each is None or _embedding_fits(each, count, config.hidden_size) for each, count in tables)
    head = HeadParts(model.norm, model.lm_head, config.logits_scaling, config.final_logit_softcapping)
    fit = fit and head.fit(config.hidden_size) and all(block.fit(config.hidden_size) for block in blocks)
    if len(blocks) != len(layers) or not fit:
        raise UnsupportedByKernels("shapes of its weights do not fit each other")
    learned = None if model.embed_positions is None else model.embed_positions.weight.shape[0]
    return ModelParts(config, embedding, blocks, head, model.ropes, learned)


def _block_parts(block: Block, layer_idx: int, config: ModelConfig) -> BlockParts:
    attn, moe = block.self_attn, block.mlp if isinstance(block.mlp, MoE) else None
    mlp = block.mlp.experts if isinstance(block.mlp, MoE) else block.mlp
    if block.training and block.dropout:
        raise UnsupportedByKernels("it is in training mode, with dropout")
    if mlp.activation not in ACTIVATIONS or (attn.q_norm is None) != (attn.k_norm is None):
        raise UnsupportedByKernels(f"layer {layer_idx}: unsupported block structure")
    # The tables of a cache, and RoPE, go by the config.
    has = attn.layer_idx, attn.window, attn.rope_type, attn.num_kv_heads, attn.head_dim
    expected = layer_idx, config.window(layer_idx), config.rope_type(layer_idx), config.num_key_value_heads
    if has != (*expected, config.computed_head_dim):
        raise UnsupportedByKernels(f"layer {layer_idx} does not match the config")
    return BlockParts(
        attn.qkv_proj,
        attn.o_proj,
        mlp.first,
        mlp.down_proj,
        **block.norms()._asdict(),
        q_norm=attn.q_norm,
        k_norm=attn.k_norm,
        heads=attn.num_heads,
        kv_heads=attn.num_kv_heads,
        head_dim=attn.head_dim,
        scale=attn.scale,
        window=attn.window,
        rope_type=attn.rope_type,
        softcap=attn.softcap,
        multiplier=block.multiplier,
        parallel=block.parallel,
        activation=mlp.activation,
        gated=not isinstance(mlp, UngatedMLP),
        sinks=attn.sinks,
        routing=None if moe is None else Routing(moe.router, config.num_experts, moe.top_k, moe.norm_topk),
    )


def _check_modules(model: Decoder) -> None:
    for name, method in METHODS.items():
        if getattr(type(model), name) is not method or name in vars(model):
            raise UnsupportedByKernels(f"the model has a custom {name}")
    for name, module in _modules(model):
        known = FORWARDS.get(_kind(module))
        if type(module).forward is not known or "forward" in vars(module):
            raise UnsupportedByKernels(f"{name} has a custom forward")
        if "parametrizations" in module._modules:
            raise UnsupportedByKernels(f"{name} has parametrized weights")  # torch computes them at each access
        for weight in module._parameters.values():
            if weight is not None and (type(weight) is not nn.Parameter or not weight.is_contiguous()):
                raise UnsupportedByKernels(f"a weight of {name} is no contiguous parameter")


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """The class that kernels know, of which it may be a subclass with other parts."""
    return next((kind for kind in type(module).__mro__ if kind in FORWARDS), None)


def _modules(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """All but the model itself and its list of layers."""
    return ((name, module) for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList))


_versions = count()
_fused_steps = [0]  # of all optimizers


def _count_fused_step(optimizer: Optimizer, *_: Any) -> None:
    """torch does not count the changes that fused optimizers make in place."""
    _fused_steps[0] += any(group.get("fused") for group in optimizer.param_groups)


register_optimizer_step_post_hook(_count_fused_step)


class ModelSnapshot:
    """Tells whether a model is still what it was when a plan was made of it."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._changes, self._state = Module.changes, _state(model)
        self._methods: list[tuple[Any, str]] = [(type(model), name) for name in METHODS if isinstance(model, Decoder)]
        self._methods += [(kind, "forward") for kind in {type(m) for m in modules}]
        self._functions = self._current_methods()
        self._layers = [*model.layers] if isinstance(model, Decoder) else None
        known = (Module, nn.ModuleList) if self._layers is not None else ()
        self._counted = all(isinstance(m, known) for m in modules)  # whether `Module.changes` counts all changes
        # So that their ids are not reused. Not the model, which then would stay.
        self._strong_refs = [modules[1:], [v for m in modules for v in vars(m).values() if v is not model]]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        self._addresses = _addresses(self._weights)
        self._versioned = [t for t in dict.fromkeys(self._weights) if not t.is_inference()]  # these have no version
        self._counts, self._version = self._count(), next(_versions)

    def changed(self, model: nn.Module) -> bool:
        """Compare without a Python loop over weights: it is called often."""
        if self._changes != Module.changes or not self._counted:  # of any model
            if self._state != _state(model):
                return True
            self._changes = Module.changes
        # ModuleList does not bump `Module.changes`; assigning an attribute does.
        return (
            (self._layers is not None and self._layers != [*model.layers])  # type: ignore[misc]
            or self._addresses != _addresses(self._weights)
            or self._functions != self._current_methods()
        )

    def _current_methods(self) -> list[Any]:
        """The methods of all classes: patching a class does not change `Module.changes`."""
        return [getattr(kind, name) for kind, name in self._methods]

    def hooked(self) -> bool:
        return any(self._hooks)

    def version(self) -> int:
        """A number for the hooks and the values of the weights: no other state of this or any model has it."""
        if self._counts != (counts := self._count()):
            self._counts, self._version = counts, next(_versions)
        return self._version

    def _count(self) -> list[int]:
        """The changes of each weight in place, and the numbers of all hooks: torch gives each its own."""
        return [*map(_version, self._versioned), *chain.from_iterable(filter(None, self._hooks)), *_fused_steps]


def _state(model: nn.Module) -> list[Any]:
    """All modules with their classes, weights and attributes: constants by value, everything else by identity.

    Of modules that are not infer's, `forward` is the only attribute: others may change in each pass.
    """
    plain = (bool, int, float, str, type(None))
    return [
        (
            id(m),
            type(m),
            [
                (k, v if isinstance(v, plain) else id(v))
                for k, v in vars(m).items()
                if k == "forward" or isinstance(m, Module)
            ],
            [*map(id, m._parameters.values()), *map(id, m._buffers.values())],
        )
        for m in model.modules()
    ]


def _addresses(weights: Sequence[Tensor]) -> list[Any]:
    parts: list[Callable[[Tensor], Any]] = [Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous, _dtype]
    return [*chain.from_iterable(map(part, weights) for part in parts)]


_dtype: Callable[[Tensor], Any] = attrgetter("dtype")
_version: Callable[[Tensor], int] = attrgetter("_version")


def _embedding_fits(embedding: Embedding, count: int, size: int) -> bool:
    rows = len(embedding.vocab_range) if isinstance(embedding, ShardedEmbedding) else count
    return tuple(embedding.weight.shape) == (rows, size)


def _linear_fits(linear: Linear, rows: int, columns: int) -> bool:
    fit = (linear.out_features, linear.in_features) == (rows, columns)
    if isinstance(linear, ShardedLinear):
        rows, columns = linear.shard_shape
    stored = tuple(linear.weight.shape) == (rows, columns) and (linear.bias is None or linear.bias.shape == (rows,))
    return fit and stored


def _norm_fits(norm: Norm | None, size: int) -> bool:
    if isinstance(norm, ShardedRMSNorm) and len(norm.own) == size:
        size = sum(norm.sizes)
    return norm is None or (norm.weight.shape == (size,) and (norm.bias is None or norm.bias.shape == (size,)))
