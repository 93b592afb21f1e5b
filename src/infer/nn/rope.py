"""Rotary position embedding, in the rotate-half layout.

Dimension i of a head is paired with dimension i + D/2, and each pair is rotated by the angle
`position * inv_freq[i]`. A dot product of two rotated vectors then depends only on the distance of their positions.

Checkpoints that pair other dimensions, or rotate only some, are loaded with the rows of q and k in this order
(`file_order`): a dot product of q and k does not depend on it. Dimensions that are not rotated have frequency 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from infer.config import RopeConfig

COMPUTED_AT_ONCE = 1024  # elements: torch may split more over threads, and round differently where they meet


class Rope:
    """cos and sin for any positions, in float32: bf16 cannot tell position 1000 from 1001.

    On a CPU they come from a table, computed in pieces that always start at the same positions: the bits that torch
    gives an element may depend on its place in the tensor.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        inv_freq = inverse_frequencies(config, head_dim)
        self.attention_factor = config.attention_factor
        self.inv_freq = torch.cat((inv_freq, inv_freq))  # [D]
        self.factor = torch.where(self.inv_freq > 0, config.attention_factor, 1.0)
        self.sign = torch.cat((-torch.ones_like(inv_freq), torch.ones_like(inv_freq))) * self.factor
        self._table = torch.empty(2, 0, head_dim, device="cpu")  # cos and sin of positions 0, 1, ...

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, D]; sin carries the sign of rotate-half."""
        if (device := positions.device) != self.inv_freq.device:
            self.inv_freq, self.factor, self.sign = (x.to(device) for x in (self.inv_freq, self.factor, self.sign))
        if not positions.is_cpu:
            return self._cos_sin(positions)
        cos, sin = self.table(int(positions.max()) + 1)[:, positions]
        return cos, sin

    def table(self, count: int) -> Tensor:
        """cos and sin [2, P, D] of P >= count positions, on the CPU; the same tensor until it has to grow."""
        if count > self._table.shape[1]:
            self._table = self._extended(count)
        return self._table

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None] * self.inv_freq  # in float32
        return angles.cos().mul_(self.factor), angles.sin().mul_(self.sign)

    def _extended(self, count: int) -> Tensor:
        """The table with at least `count` positions; it doubles, so that it seldom grows."""
        step = max(1, COMPUTED_AT_ONCE // len(self.inv_freq))
        known = self._table.shape[1]
        starts = range(known, max(count, 2 * known), step)
        pieces = [torch.stack(self._cos_sin(torch.arange(start, start + step, device="cpu"))) for start in starts]
        return torch.cat([self._table, *pieces], 1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by cos, sin [T, D]: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (x2, x1)
    # Not addcmul: whether it rounds the product before the sum depends on an element's place in the tensor.
    return (x * cos[:, None] + swapped * sin[:, None]).to(x.dtype)


def query_scales(config: RopeConfig, positions: Tensor) -> Tensor:
    """What queries at these positions [T] are multiplied by. It grows with each multiple of the original context."""
    steps = positions // config.original_max_position_embeddings
    scales = [1 + config.query_beta * math.log1p(step) for step in range(int(steps.max()) + 1)]
    return torch.tensor(scales, device=positions.device)[steps]


def file_order(head_dim: int, rotated: int, interleaved: bool) -> Tensor:
    """Where a checkpoint has each dimension of a head.

    It rotates the first `rotated` ones; if interleaved, each with the next one, else with the one half of them further.
    """
    dims = torch.arange(rotated, device="cpu")
    first, second = (dims[::2], dims[1::2]) if interleaved else dims.view(2, -1)
    rest = torch.arange(rotated, head_dim, device="cpu").view(2, -1)
    return torch.cat((first, rest[0], second, rest[1]))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[D/2], float32, on the CPU even while a model is built on the meta device. 0: not rotated."""
    dim = config.dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    inv_freq = 1.0 / config.theta**exponents
    if config.scaling == "linear":
        inv_freq = inv_freq / config.factor
    elif config.scaling == "llama3":
        inv_freq = _llama3(inv_freq, config)
    elif config.scaling == "yarn":
        inv_freq = _yarn(inv_freq, config, dim)
    if config.divisors:
        if len(config.divisors) != len(inv_freq):
            raise ValueError(f"{len(config.divisors)} RoPE divisors for {len(inv_freq)} frequencies")
        inv_freq = inv_freq / torch.tensor(config.divisors, dtype=torch.float32, device="cpu")
    if not inv_freq.isfinite().all():
        raise ValueError(f"RoPE settings give frequencies that are not finite: theta {config.theta}, {config.scaling}")
    return torch.nn.functional.pad(inv_freq, (0, (head_dim - dim) // 2))


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Keep high frequencies, divide low ones by `factor`, interpolate between: as Llama 3.1 and later were trained."""
    wavelength = 2 * math.pi / inv_freq
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_max_position_embeddings / wavelength  # over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unchanged, 0: divided
    return keep * inv_freq + (1 - keep) * inv_freq / config.factor


def _yarn(inv_freq: Tensor, config: RopeConfig, dim: int) -> Tensor:
    """Keep frequencies that turn often over the original context, divide those that turn seldom, blend between."""

    def dimension(turns: float) -> float:
        """Whose frequency turns so often."""
        length = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    divided = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / ((high - low) or 0.001)
    divided = divided.clamp(0, 1)
    return inv_freq / config.factor * divided + inv_freq * (1 - divided)
