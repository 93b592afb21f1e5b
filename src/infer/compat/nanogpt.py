"""nanoGPT's `GPT` and `GPTConfig`, for scripts written for its model.py: the model inside is `infer.models.gpt2`.

`forward` returns one value more than nanoGPT's: the keys and values of all layers, to hand back as `past_kv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.cache.base import Cache, NoCache
from infer.cache.contiguous import KVCache
from infer.cache.debug import debugged
from infer.cache.growing import GrowingCache
from infer.config import ModelConfig
from infer.engine.model import check_mode, step
from infer.engine.params import SamplingParams
from infer.loader.load import load_model
from infer.loader.nanogpt import config_from_nanogpt
from infer.loader.tensor_names import from_gpt2, to_gpt2
from infer.models.gpt2 import GPT2

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
KeysValues = Sequence[tuple[Tensor, Tensor]]  # of each layer k and v, both [B, n_head, T, n_embd / n_head]


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
    def __init__(self, config: GPTConfig, decoder: GPT2 | None = None) -> None:
        """decoder: a loaded model; None: a new one with random weights."""
        super().__init__()
        self.config = config
        self.decoder = GPT2(config_from_nanogpt(asdict(config))) if decoder is None else decoder

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
        decoder = GPT2(own)
        decoder.load_state_dict(load_model(name, dtype="float32", device="cpu")[0].state_dict())
        sizes = own.max_position_embeddings, own.vocab_size, own.num_hidden_layers, own.num_attention_heads
        return cls(GPTConfig(*sizes, own.hidden_size, own.dropout, own.attention_bias), decoder)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, past_kv: KeysValues | None = None, use_cache: bool = False
    ) -> tuple[Tensor, Tensor | None, KeysValues | None]:
        """idx [B, T] -> logits, loss, keys and values.

        With targets [B, T]: logits of all positions, and their loss (a target of -1 does not count). Without: logits
        of the last position [B, 1, V], and None. Keys and values of past_kv and idx are returned if one of past_kv and
        use_cache is given.
        """
        cache: Cache = NoCache(len(idx), idx.device, self.config.dropout if self.training else 0.0)
        if past_kv is not None or use_cache:
            cache = self._cache_with(past_kv or (), idx)
        logits = self.decoder(idx, kv_cache=cache, all_logits=targets is not None)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss, tuple(zip(cache.k, cache.v, strict=True)) if isinstance(cache, GrowingCache) else None

    def _cache_with(self, past_kv: KeysValues, idx: Tensor) -> GrowingCache:
        """A cache that holds past_kv and keeps gradients."""
        check_mode(self.decoder)
        cache: GrowingCache = self._empty(GrowingCache, idx, self.config.block_size)
        lengths = {tensor.shape[-2] for pair in past_kv for tensor in pair}
        if past_kv and (len(past_kv) != self.config.n_layer or len(lengths) != 1):
            raise ValueError(f"past_kv must be (k, v) of each of {self.config.n_layer} layers, all of one length")
        for layer_idx, (k, v) in enumerate(past_kv):
            cache.update(layer_idx, k, v)
        cache.advance(lengths.pop() if past_kv else 0)
        return cache

    def _empty(self, kind: Any, idx: Tensor, positions: int) -> Any:
        config, dtype = self.decoder.config, self.decoder.dtype
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

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """With nanoGPT's names, as in its ckpt.pt."""
        return {to_gpt2(name): weight for name, weight in self.decoder.state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        named = {from_gpt2(name): weight for name, weight in state_dict.items()}
        return self.decoder.load_state_dict({name: weight for name, weight in named.items() if name}, strict, assign)
