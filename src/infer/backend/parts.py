"""A model as kernels see it: which modules stand where. And the one check that they are what kernels compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from infer.config import ModelConfig
from infer.models.common import MLP, Attention, Block, Decoder, UngatedMLP
from infer.nn.activation import ACTIVATIONS
from infer.nn.linear import Embedding, FusedLinear, Linear
from infer.nn.module import Module
from infer.nn.norm import LayerNorm, Norm, RMSNorm, ZeroCentredRMSNorm
from infer.nn.quantized import QuantizedWeight
from infer.nn.rope import Rope
from infer.nn.split import SplitEmbedding, SplitLinear

# What kernels compute, as it is defined: a class whose method was replaced is no longer among them.
KINDS = (Block, Attention, MLP, UngatedMLP, RMSNorm, ZeroCentredRMSNorm, LayerNorm, Linear, FusedLinear, Embedding)
SPLIT = (SplitLinear, SplitEmbedding)
FORWARDS: dict[Any, Any] = {kind: kind.forward for kind in (*KINDS, *SPLIT, QuantizedWeight)}
METHODS = {name: getattr(Decoder, name) for name in ("forward", "run", "embed")}


class EmbeddingParts(NamedTuple):
    """What stands before the blocks: a token's vector, times a factor, and its position's, where they are learned."""

    tokens: Embedding
    positions: Embedding | None
    factor: float


class BlockParts(NamedTuple):
    """What a block is made of."""

    qkv: Linear
    o: Linear
    up: Linear
    down: Linear
    before_attention: Norm
    before_mlp: Norm
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    activation: str
    layer_type: str = ""
    gated: bool = True  # `up` is a gate, and what it is multiplied with
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv, self.o, self.up, self.down]

    def fit(self, hidden: int) -> bool:
        """Whether all shapes fit each other; where they do not, torch has an error for it."""
        inner, q_size = self.down.in_features, self.heads * self.head_dim
        return (
            self.heads % self.kv_heads == 0
            and _linear_fits(self.qkv, q_size + 2 * self.kv_heads * self.head_dim, hidden)
            and _linear_fits(self.o, hidden, q_size)
            and _linear_fits(self.up, inner * (2 if self.gated else 1), hidden)
            and _linear_fits(self.down, hidden, inner)
            and all(_norm_fits(norm, self.head_dim) for norm in (self.q_norm, self.k_norm))
            and all(_norm_fits(norm, hidden) for norm in (self.before_attention, self.before_mlp))
            and all(_norm_fits(norm, hidden) for norm in (self.after_attention, self.after_mlp))
        )


class HeadParts(NamedTuple):
    """What stands behind the blocks."""

    norm: Norm
    linear: Linear

    def fit(self, hidden: int) -> bool:
        return _linear_fits(self.linear, self.linear.out_features, hidden) and _norm_fits(self.norm, hidden)


class ModelParts(NamedTuple):
    config: ModelConfig
    embedding: EmbeddingParts
    blocks: Sequence[BlockParts]
    head: HeadParts
    ropes: Mapping[str, Rope]  # by layer type
    positions_learned: int | None  # how many, where positions are


class NotPlain(Exception):
    """Why no kernels run a model."""


def parts_of(model: Decoder) -> ModelParts:
    """Raises NotPlain where kernels would not compute what the modules do."""
    _check_modules(model)
    config, layers = model.config, list(model.layers)
    if len(layers) != config.num_hidden_layers:
        raise NotPlain(f"the model has {len(layers)} layers, and its config {config.num_hidden_layers}")
    blocks = [_block_parts(layer, i, config) for i, layer in enumerate(layers) if isinstance(layer, Block)]
    embedding = EmbeddingParts(model.embed_tokens, model.embed_positions, model.embed_scale)
    tables = [(model.embed_tokens, config.vocab_size), (model.embed_positions, config.max_position_embeddings)]
    fit = all(each is None or _embedding_fits(each, count, config.hidden_size) for each, count in tables)
    head = HeadParts(model.norm, model.lm_head)
    fit = fit and head.fit(config.hidden_size) and all(block.fit(config.hidden_size) for block in blocks)
    if len(blocks) != len(layers) or not fit:
        raise NotPlain("shapes of its weights do not fit each other")
    learned = None if model.embed_positions is None else model.embed_positions.weight.shape[0]
    return ModelParts(config, embedding, blocks, head, model.ropes, learned)


def _block_parts(block: Block, layer_idx: int, config: ModelConfig) -> BlockParts:
    attn, mlp = block.self_attn, block.mlp
    if block.drops:
        raise NotPlain("it is in training mode, with dropout")
    if mlp.activation not in ACTIVATIONS or (attn.q_norm is None) != (attn.k_norm is None):
        raise NotPlain(f"kernels have no such block as layer {layer_idx}")
    # The tables of a cache, and RoPE, go by the config.
    has = attn.layer_idx, attn.window, attn.layer_type, attn.num_kv_heads, attn.head_dim
    expected = layer_idx, config.window(layer_idx), config.layer_types[layer_idx], config.num_key_value_heads
    if has != (*expected, config.computed_head_dim):
        raise NotPlain(f"layer {layer_idx} is not what its config says")
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
        layer_type=attn.layer_type,
        activation=mlp.activation,
        gated=isinstance(mlp, MLP),
    )


def _check_modules(model: Decoder) -> None:
    for name, method in METHODS.items():
        if getattr(type(model), name) is not method or name in vars(model):
            raise NotPlain(f"the model has a method {name} of its own")
    for name, module in _modules(model):
        known = FORWARDS.get(_kind(module))
        if type(module).forward is not known or "forward" in vars(module):
            raise NotPlain(f"{name} computes in a way of its own")
        if "parametrizations" in module._modules:
            raise NotPlain(f"{name} has parametrised weights")  # torch computes them anew at each look
        for weight in module._parameters.values():
            if weight is not None and (type(weight) is not nn.Parameter or not weight.is_contiguous()):
                raise NotPlain(f"a weight of {name} is no contiguous parameter")


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """The class that kernels know, of which it may be a subclass with other parts."""
    return next((kind for kind in type(module).__mro__ if kind in FORWARDS), None)


def _modules(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """All but the model itself and its list of layers."""
    return ((name, module) for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList))


class Watch:
    """Tells whether a model is still what it was when a plan was made of it."""

    def __init__(self, model: Decoder) -> None:
        modules = [model, *(module for _, module in _modules(model))]
        self._changes, self._state = Module.changes, _state(model)
        self._methods: list[tuple[Any, str]] = [(type(model), name) for name in METHODS]
        self._methods += [(kind, "forward") for kind in {type(m) for m in modules}]
        self._functions = self._found()
        self._layers = [*model.layers]
        self._kept = [modules[1:], [*vars(model).values()]]  # as long as they are, nothing else has their ids
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        self._places = _places(self._weights)

    def changed(self, model: Decoder) -> bool:
        """Asked at every pass: without a line of Python for each weight."""
        if self._changes != Module.changes:  # of any model
            if self._state != _state(model):
                return True
            self._changes = Module.changes
        # ModuleList does not bump `Module.changes`; assigning an attribute does.
        return (
            self._layers != [*model.layers]
            or self._places != _places(self._weights)
            or not all(map(Tensor.is_contiguous, self._weights))
            or self._functions != self._found()
        )

    def _found(self) -> list[Any]:
        """The methods of all classes: one that is patched tells no module."""
        return [getattr(kind, name) for kind, name in self._methods]

    def hooked(self) -> bool:
        return any(self._hooks)


def _state(model: Decoder) -> list[Any]:
    """All modules with their classes and attributes: constants by value, everything else by identity."""
    modules = [model, *(module for _, module in _modules(model))]
    plain = (bool, int, float, str, type(None))
    return [
        (
            id(m),
            type(m),
            [(k, v if isinstance(v, plain) else id(v)) for k, v in vars(m).items()],
            [*map(id, m._parameters.values()), *map(id, m._buffers.values())],
        )
        for m in modules
    ]


def _places(weights: Sequence[Tensor]) -> list[Any]:
    return [*map(Tensor.data_ptr, weights), *map(Tensor.numel, weights), *map(_dtype, weights)]


_dtype: Callable[[Tensor], Any] = attrgetter("dtype")


def _embedding_fits(embedding: Embedding, count: int, size: int) -> bool:
    rows = len(embedding.own) if isinstance(embedding, SplitEmbedding) else count
    return tuple(embedding.weight.shape) == (rows, size)


def _linear_fits(linear: Linear, rows: int, columns: int) -> bool:
    fit = (linear.out_features, linear.in_features) == (rows, columns)
    if isinstance(linear, SplitLinear):
        rows, columns = linear.own_shape
    whole = tuple(linear.weight.shape) == (rows, columns) and (linear.bias is None or linear.bias.shape == (rows,))
    return fit and whole


def _norm_fits(norm: Norm | None, size: int) -> bool:
    return norm is None or (norm.weight.shape == (size,) and (norm.bias is None or norm.bias.shape == (size,)))
