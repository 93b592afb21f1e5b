"""nanoGPT's `GPT` and `GPTConfig`, for scripts written for its model.py: the model inside is `infer.models.gpt2`.

Modules and weights have nanoGPT's names, in its order, so checkpoints and optimizer states fit in both directions.
`forward` returns one value more than nanoGPT's: the keys and values of all layers, to hand back as `kv_cache`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.cache.base import NoCache
from infer.cache.contiguous import KVCache
from infer.cache.debug import debugged
from infer.cache.growing import GrowingCache
from infer.config import ModelConfig
from infer.engine.model import check_mode, step
from infer.engine.params import SamplingParams
from infer.loader.load import load_model
from infer.loader.nanogpt import config_from_nanogpt
from infer.loader.tensor_names import from_gpt2, to_gpt2
from infer.models import gpt2
from infer.models.common import Block, UngatedMLP
from infer.nn.linear import Embedding
from infer.nn.module import is_autocast

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
A100_FLOPS = 312e12  # in bfloat16
# Of each layer k and v, both [B, n_head, T, n_embd / n_head]; GPT adds their number of positions T.
KeysValues = Sequence[tuple[Tensor, Tensor]]
KVCaches = Sequence[tuple[Tensor, Tensor, int]]


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class GPT(nn.Module):
    decoder: gpt2.GPT2

    def __init__(self, config: GPTConfig, decoder: gpt2.GPT2 | None = None) -> None:
        """decoder: a loaded model; None: a new one with random weights."""
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        self.config = config
        decoder = gpt2.GPT2(config_from_nanogpt(asdict(config))) if decoder is None else decoder
        object.__setattr__(self, "decoder", decoder)  # not registered: its modules are, by nanoGPT's names
        blocks = [_named(block) for block in cast(Iterable[Block], decoder.layers)]
        positions = cast(Embedding, decoder.embed_positions)
        ends = {"wte": decoder.embed_tokens, "wpe": positions}
        self.transformer = nn.ModuleDict({**ends, "h": nn.ModuleList(blocks), "ln_f": decoder.norm})
        self.lm_head = decoder.lm_head

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: Mapping[str, Any] | None = None) -> GPT:
        """An OpenAI model by nanoGPT's name, or any GPT-2 that `load_model` finds. It can be trained."""
        overrides = override_args or {}
        if overrides.keys() - {"dropout"}:
            raise ValueError(f"of a trained model only dropout can be overridden, not {', '.join(overrides)}")
        name = f"openai-community/{model_type}" if model_type in PRETRAINED else model_type
        own = replace(ModelConfig.from_pretrained(name), dropout=overrides.get("dropout", 0.0))
        if own.model_type != "gpt2":
            raise ValueError(f"{model_type} is a model of type {own.model_type}, not gpt2: use infer.load_model")
        decoder = gpt2.GPT2(own)
        decoder.load_state_dict(load_model(name, dtype="float32", device="cpu")[0].state_dict())
        sizes = own.max_position_embeddings, own.vocab_size, own.num_hidden_layers, own.num_attention_heads
        return cls(GPTConfig(*sizes, own.hidden_size, own.dropout, own.attention_bias), decoder)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: KVCaches | None = None
    ) -> tuple[Tensor, Tensor | None, KVCaches | None]:
        """idx [B, T] -> logits, loss, and of each layer (k, v, positions): of kv_cache, then of idx.

        With targets [B, T]: logits of all positions, and their loss (a target of -1 does not count). Without: logits
        of the last position [B, 1, V], and None. A step of training, with targets in training mode, keeps nothing:
        the third is None, unless kv_cache is given. The tensors of kv_cache are not written to.
        """
        keeps = kv_cache is not None or targets is None or not self.training
        logits, kept = self._run(idx, kv_cache or () if keeps else None, all_logits=targets is not None)
        caches = None if kept is None else [(k, v, k.shape[2]) for k, v in kept]
        return logits, _loss(logits, targets), caches

    def _run(self, idx: Tensor, past: Sequence[Any] | None, *, all_logits: bool) -> tuple[Tensor, KeysValues | None]:
        """past: of each layer k, v and maybe a number of positions; () keeps those of idx alone, None nothing."""
        dropout = self.config.dropout if self.training else 0.0
        if idx.shape[1] > self.config.block_size:
            raise ValueError(f"{idx.shape[1]} tokens exceed the block_size of {self.config.block_size}")
        if past is None:
            return self.decoder(idx, kv_cache=NoCache(len(idx), idx.device, dropout), all_logits=all_logits), None
        cache = self._cache_with(past, idx)
        cache.dropout = dropout
        logits = self.decoder(idx, kv_cache=cache, all_logits=all_logits)
        return logits, list(zip(cache.k, cache.v, strict=True))

    def _cache_with(self, past: Sequence[Any], idx: Tensor) -> GrowingCache:
        """A cache that holds the past and keeps gradients."""
        cache: GrowingCache = self._empty(GrowingCache, idx, self.config.block_size)
        if not past:
            return cache
        check_mode(self.decoder)
        if any(len(layer) not in (2, 3) for layer in past):
            raise ValueError("keys and values must be (k, v) or (k, v, cache_pos) of each layer")
        pairs = [_filled(*layer) for layer in past]
        lengths = {tensor.shape[-2] for pair in pairs for tensor in pair}
        if len(pairs) != self.config.n_layer or len(lengths) != 1:
            raise ValueError(f"keys and values must be of each of {self.config.n_layer} layers, all of one length")
        for layer_idx, (k, v) in enumerate(pairs):
            cache.update(layer_idx, k, v)
        cache.advance(lengths.pop())
        return cache

    def _empty(self, kind: Any, idx: Tensor, positions: int) -> Any:
        config, dtype = self.decoder.config, self.decoder.dtype
        if is_autocast(idx.device) and kind is GrowingCache:
            dtype = torch.get_autocast_dtype(idx.device.type)
        return kind.from_model_config(config, positions, batch_size=len(idx), dtype=dtype, device=idx.device)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """idx [B, T] -> [B, T + max_new_tokens], sampled by torch's generator; a temperature of 0 is greedy.

        The cache changes no token. Beyond block_size each step recomputes the last block_size tokens: cropping moves
        every token to another position, so cached keys are no longer valid.
        """
        top_k = SamplingParams(temperature=temperature, top_k=top_k).top_k  # raises on invalid values
        check_mode(self.decoder)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
        block, vocabulary = self.config.block_size, self.config.vocab_size
        if idx.numel() and not 0 <= int(idx.min()) <= int(idx.max()) < vocabulary:
            raise ValueError(f"idx has token ids outside the vocabulary 0..{vocabulary - 1}")
        capacity = min(idx.shape[1] + max_new_tokens, block)
        cache = debugged(
            self._empty(KVCache if use_cache else NoCache, idx, capacity), self.decoder.config.num_hidden_layers
        )
        for _ in range(max_new_tokens):
            if idx.shape[1] > block:
                cache = debugged(NoCache(len(idx), idx.device), self.decoder.config.num_hidden_layers)
            logits = step(self.decoder, cache, idx[:, cache.seq_len :][:, -block:])  # [B, V]
            if top_k:
                least = logits.topk(min(top_k, vocabulary)).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial((logits.float() / temperature).softmax(-1), 1)
            idx = torch.cat((idx, chosen), 1)
        return idx

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.AdamW:
        """AdamW that decays matrices and embeddings, not biases and norms."""
        decayed = [weight for weight in self.parameters() if weight.dim() >= 2]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type == "cuda")

    @property
    def _positions(self) -> nn.Parameter:
        return cast(nn.Parameter, cast(Embedding, self.decoder.embed_positions).weight)

    def get_num_params(self, non_embedding: bool = True) -> int:
        """Of the model; non_embedding: without the position embeddings. The head shares the token embeddings."""
        count = sum(weight.numel() for weight in self.parameters())
        return count - self._positions.numel() if non_embedding else count

    def estimate_mfu(self, fwdbwd_per_iter: float, dt: float) -> float:
        """The share of an A100's peak that fwdbwd_per_iter sequences of block_size tokens in dt seconds come to.

        A token takes 6 operations per weight, and 12 per layer, dimension and position in attention (PaLM, appendix B).
        """
        config = self.config
        attention = 12 * config.n_layer * config.n_embd * config.block_size
        per_sequence = (6 * self.get_num_params() + attention) * config.block_size
        return per_sequence * fwdbwd_per_iter / dt / A100_FLOPS

    def crop_block_size(self, block_size: int) -> None:
        """Drop the position embeddings from block_size on."""
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size must be from 1 to {self.config.block_size}, not {block_size}")
        self.config.block_size = block_size
        self.decoder.config = replace(self.decoder.config, max_position_embeddings=block_size)
        cast(Embedding, self.decoder.embed_positions).weight = nn.Parameter(self._positions[:block_size].clone())

    def train(self, mode: bool = True) -> Self:
        self.decoder.train(mode)
        return super().train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Also with the prefix of torch.compile, without `transformer.`, and with the masks of older checkpoints."""
        named = {from_gpt2(name): weight for name, weight in state_dict.items()}
        return super().load_state_dict({to_gpt2(name): named[name] for name in named if name}, strict, assign)


class GPT2(GPT):
    """The `GPT2` of lessons on caching: modules without `transformer`, logits of all positions, past_kv of (k, v)."""

    def forward(  # type: ignore[override]
        self, idx: Tensor, targets: Tensor | None = None, past_kv: KeysValues | None = ()
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, KeysValues]:
        """idx [B, T] -> logits [B, T, V] and loss; with past_kv (None: no past yet), also (k, v) of each layer."""
        keeps = past_kv is None or len(past_kv) > 0
        logits, present_kv = self._run(idx, past_kv or () if keeps else None, all_logits=True)
        loss = _loss(logits, targets)
        return (logits, loss) if present_kv is None else (logits, loss, present_kv)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transformer, name) if name in ("wte", "wpe", "h", "ln_f") else super().__getattr__(name)


def _named(block: Block) -> nn.ModuleDict:
    """A block's modules by nanoGPT's names, in the order of the computation."""
    attention, mlp, norms = block.self_attn, cast(UngatedMLP, block.mlp), block.norms()
    assert norms.before_attention is not None
    assert norms.before_mlp is not None
    return nn.ModuleDict(
        {
            "ln_1": norms.before_attention,
            "attn": nn.ModuleDict({"c_attn": attention.qkv_proj, "c_proj": attention.o_proj}),
            "ln_2": norms.before_mlp,
            "mlp": nn.ModuleDict({"c_fc": mlp.up_proj, "c_proj": mlp.down_proj}),
        }
    )


def _filled(k: Tensor, v: Tensor, positions: int | None = None) -> tuple[Tensor, Tensor]:
    """The filled positions of buffers."""
    if positions is None:
        return k, v
    if not 0 <= positions <= k.shape[-2]:
        raise ValueError(f"cache_pos is {positions}, but k and v have {k.shape[-2]} positions")
    return k[..., :positions, :], v[..., :positions, :]


def _loss(logits: Tensor, targets: Tensor | None) -> Tensor | None:
    return None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
