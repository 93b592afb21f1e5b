"""Scaled dot-product attention, and the one rule that decides which keys a query sees."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.ops import decode

# None: every query sees every key. "causal": query i sees keys 0..i. A tensor: True where visible.
Mask = Tensor | Literal["causal"] | None


def visible(q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """The rule: q_pos [..., n] and k_pos [..., S] -> bool [..., n, S]. A k_pos of -1 is an empty slot."""
    q, k = q_pos[..., :, None], k_pos[..., None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (q - k < window)


def span_mask(start: int, n: int, first_key: int, window: int | None, device: torch.device) -> Mask:
    """The rule for queries start..start+n-1 over keys first_key..start+n-1; no tensor where SDPA has the case."""
    end = start + n
    if start == first_key and (window is None or window >= n):
        return "causal"
    q_pos = torch.arange(start, end, device=device)
    k_pos = torch.arange(first_key, end, device=device)
    return visible(q_pos, k_pos, window)  # [n, S]


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask) -> Tensor:
    """q [B, Hq, n, D] over k, v [B, Hkv, S, D] -> [B, Hq, n, D]; each KV head serves Hq/Hkv query heads in place."""
    if mask is None and decode.can_attend(q, k, v):
        return decode.attend(q, k, v, scale)
    if isinstance(mask, str):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
