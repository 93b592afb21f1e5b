"""Models through kernels that numba compiles, on the CPU in float32.

Each part stands beside its reference in plain torch: the modules of a block, and `attention`. A step should be compiled
as a whole: numba's threads and torch's are two pools, and while one of them works the other's still spin.

The kernels hold the GIL, so that no two Python threads run them at once. A process forked after their first use cannot
run them (GNU OpenMP): start it with spawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from infer import kernels
from infer.ops.linear import Linear
from infer.ops.norm import Norm
from infer.ops.parts import ACTIVATION_CODES, BlockParts, HeadParts
from infer.ops.quantized import QuantizedWeight
from infer.ops.rowwise import WEIGHT_KINDS


def expected() -> bool:
    """Whether there should be kernels; to know, they would have to be compiled."""
    return kernels.has_cpu()


def prepare() -> bool:
    """Compile the kernels, or read what was compiled; False where there are none."""
    return kernels.cpu() is not None


def available(x: Tensor, forwards: Mapping[type[nn.Module], Any]) -> bool:
    """Whether x [T, C] is float32 on the CPU, no gradient is asked of it, and the kernels are there.

    forwards: of the classes that the kernels stand for; if one has been replaced, they no longer do.
    """
    if not _readable(x) or torch.is_grad_enabled() or kernels.cpu() is None:
        return False
    if any(kind.forward is not forward for kind, forward in forwards.items()):
        return False
    kernels.cpu().use_threads(torch.get_num_threads())
    return True


def _readable(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()


class Plan(NamedTuple):
    """Modules as the kernels take them."""

    record: Any
    hidden: int  # C

    def takes(self, x: Tensor) -> bool:
        return x.shape[1] == self.hidden and _readable(x)


def readable(weight: Tensor) -> bool:
    """Whether the kernels can read such a weight: in float32, packed, or a matrix of 16 bits."""
    return weight.is_cpu and (
        weight.dtype in (torch.float32, torch.uint8) or (weight.dtype in WEIGHT_KINDS and weight.dim() == 2)
    )


def plan_step(blocks: Sequence[BlockParts], head: HeadParts) -> Plan:
    """Of a whole decode step."""
    record = np.concatenate([block_record(block) for block in blocks]), head_record(*head)
    return Plan(record, head.linear.weight.shape[1])


def plan_block(parts: BlockParts) -> Plan:
    return Plan(block_record(parts), parts.qkv.weight.shape[1])


def plan_head(parts: HeadParts) -> Plan:
    return Plan(head_record(*parts), parts.linear.weight.shape[1])


def block_record(parts: BlockParts) -> np.ndarray[Any, Any]:
    """A block as the kernels take it."""
    made = np.zeros(1, kernels.cpu().BLOCK)
    for name, part in parts._asdict().items():
        if isinstance(part, Linear):
            made[name] = _weight(part)
        elif isinstance(part, Norm):
            made[name] = _norm(part)
    made["heads"], made["kv_heads"], made["head_dim"] = parts.heads, parts.kv_heads, parts.head_dim
    made["scale"], made["window"], made["activation"] = (
        parts.scale,
        parts.window or 0,
        ACTIVATION_CODES[parts.activation],
    )
    return made


def head_record(norm: Norm | None, linear: Linear) -> np.ndarray[Any, Any]:
    made = np.zeros(1, kernels.cpu().HEAD)
    made["weight"] = _weight(linear)
    if norm is not None:
        made["norm"] = _norm(norm)
    return made


def _weight(linear: Linear) -> tuple[int, ...]:
    if isinstance(linear.weight, QuantizedWeight):
        return linear.weight.record(linear.bias)
    return WEIGHT_KINDS[linear.weight.dtype], linear.weight.data_ptr(), _address(linear.bias), *linear.weight.shape


def _norm(norm: Norm) -> tuple[int, int, float, float, bool]:
    return norm.weight.data_ptr(), _address(norm.bias), norm.eps, norm.offset, norm.centred


def _address(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.data_ptr()


def step(plan: Plan, x: Tensor, ropes: np.ndarray[Any, Any], tables: np.ndarray[Any, Any]) -> Tensor:
    """Logits [B, V] of the next token of each row, x [B, C], whose keys and values go where `tables` says.

    ropes: addresses of cos and sin [B, D] for each layer.
    """
    blocks, head = plan.record
    out = _empty(x.shape[0], int(head["weight"]["rows"][0]))
    kernels.cpu().step(blocks, head, x.numpy(), ropes, tables, out.numpy())
    return out


def head(plan: Plan, x: Tensor) -> Tensor:
    """x [T, C] -> [T, rows]: norm and product."""
    out = _empty(x.shape[0], int(plan.record["weight"]["rows"][0]))
    kernels.cpu().head(plan.record, x.numpy(), out.numpy())
    return out


def before_attention(plan: Plan, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """x [T, C] -> q, k and v [T, (Hq + 2 Hkv) D], normed and rotated."""
    out = _empty(x.shape[0], int(plan.record["qkv"]["rows"][0]))
    kernels.cpu().before_attention(plan.record, x.numpy(), np.array([addresses(rope)]), out.numpy())
    return out


def behind_attention(plan: Plan, attended: Tensor, residual: Tensor) -> Tensor:
    """attended [T, Hq D], residual [T, C] -> [T, C]: output product and MLP, with their norms and residuals."""
    out = _empty(*residual.shape)
    kernels.cpu().behind_attention(plan.record, attended.contiguous().numpy(), residual.numpy(), out.numpy())
    return out


def addresses(rope: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    """Of cos and sin, as the kernels take them."""
    return (0, 0) if rope is None else (rope[0].data_ptr(), rope[1].data_ptr())


def _empty(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float32, device="cpu")
