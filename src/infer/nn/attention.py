"""Scaled dot-product attention, and the one rule that decides which keys a query sees."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from infer.machine import has_fast_matmul

# None: every query sees every key. "causal": query i sees keys 0..i. A tensor: True where visible.
Mask = Tensor | Literal["causal"] | None
Masks = dict[tuple[int, int, int | None], Mask]  # by (queries, keys, window)

BLOCK = 128  # queries at least in a block that attends to one slice of keys


def visible(q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """The rule: q_pos [..., n] and k_pos [..., S] -> bool [..., n, S]. A k_pos of -1 is an empty slot."""
    q, k = q_pos[..., :, None], k_pos[..., None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (q - k < window)


def span_mask(n: int, keys: int, window: int | None, device: torch.device) -> Mask:
    """The rule for queries at the last n of `keys` positions; no tensor if SDPA has this case built in."""
    if n == keys and (window is None or window >= n):
        return "causal"
    positions = torch.arange(keys, device=device)
    return visible(positions[keys - n :], positions, window)  # [n, keys]


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, dropout: float = 0.0) -> Tensor:
    """In plain torch: q [B, Hq, n, D] over k, v [B, Hkv, S, D] -> [B, Hq, n, D].

    Each KV head serves Hq/Hkv query heads in place.
    """
    if q.is_cuda and q.shape[2] == 1:
        # cuDNN would spend 35 ms planning for each number of keys, which changes at every step.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return _sdpa(q, k, v, scale, mask, dropout)
    return _sdpa(q, k, v, scale, mask, dropout)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, dropout: float) -> Tensor:
    if q.is_cpu and q.dtype.itemsize == 2 and not has_fast_matmul(q.dtype):
        return _sdpa(q.float(), k.float(), v.float(), scale, mask, dropout).to(q.dtype)
    causal = isinstance(mask, str)
    tensor = None if isinstance(mask, str) else mask
    return F.scaled_dot_product_attention(q, k, v, tensor, dropout, causal, scale=scale, enable_gqa=True)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    masks: Masks,
    window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, n, D] at the last n positions of k, v [B, Hkv, S, D], in order of position -> [B, Hq, n, D].

    masks: made by earlier layers of this pass, and reused. dropout: of the attention weights. softcap, sinks: see
    `softmax_attention`.
    """
    if softcap is not None or sinks is not None:  # SDPA has neither
        return softmax_attention(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)[0]
    n, keys = q.shape[2], k.shape[2]
    if n == 1:  # sees all keys in its window
        if window is not None and keys > window:
            k, v = k.narrow(2, keys - window, window), v.narrow(2, keys - window, window)
        return attention(q, k, v, scale=scale, mask=None, dropout=dropout)
    if window is None:
        return _attend_block(q, k, v, scale, window, masks, dropout)
    # A block of queries sees only its window's keys: many blocks cost less than one mask over everything.
    size = max(window, BLOCK)
    if n <= size:
        return _attend_block(q, k, v, scale, window, masks, dropout)
    out = torch.empty_like(q)
    for start in range(0, n, size):
        stop = min(start + size, n)
        last = keys - n + stop
        block = q[:, :, start:stop], k[:, :, :last], v[:, :, :last]
        out[:, :, start:stop] = _attend_block(*block, scale, window, masks, dropout)
    return out


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, masks: Masks, dropout: float
) -> Tensor:
    n, keys = q.shape[2], k.shape[2]
    if window is not None and keys > n + window - 1:
        keys = n + window - 1  # the first query looks furthest back; no query sees keys before its window
        k, v = k[:, :, -keys:], v[:, :, -keys:]
    case = n, keys, window
    if case not in masks:
        masks[case] = span_mask(n, keys, window, q.device)
    return attention(q, k, v, scale=scale, mask=masks[case], dropout=dropout)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    rows: int = 1,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`span_attention`, written out: also returns the weights of the last `rows` queries [B, Hq, rows, S].

    In blocks of queries: a long prompt needs no [S, S] matrix unless all rows are returned.
    softcap: scores become cap * tanh(scores / cap). sinks [Hq]: the score of a key without a value, one per head, which
    takes its share of the weights.
    """
    batch, heads, n, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    positions = torch.arange(keys, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(wide)[:, :, None], v.to(wide)[:, :, None]  # [B, Hkv, 1, S, D]
    outputs, kept = [], []
    for start in range(0, n, BLOCK):
        block = q[:, :, start : start + BLOCK].to(wide).reshape(batch, kv_heads, heads // kv_heads, -1, head_dim)
        seen = visible(positions[keys - n + start :][: block.shape[3]], positions, window)  # [block, S]
        scores = block @ k.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.to(wide).view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :keys]  # [B, Hkv, Hq/Hkv, block, S]
        outputs.append((weights @ v).flatten(1, 2))
        if start + BLOCK > n - rows:
            kept.append(weights.flatten(1, 2)[:, :, max(0, n - rows - start) :])
    return torch.cat(outputs, 2).to(q.dtype), torch.cat(kept, 2)


def ring_span(ring: Tensor, first: int, end: int) -> Tensor:
    """Positions first..end-1 of a ring [B, H, slots, D] in order; position p is in slot p % slots."""
    slots = ring.shape[2]
    start = first % slots
    stop = start + end - first
    if stop <= slots:
        return ring[:, :, start:stop]
    return torch.cat((ring[:, :, start:], ring[:, :, : stop - slots]), 2)
