"""Shards of a model by GPU kernels: together they compute what one process does, to the bit.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import pytest
import torch
from checkpoints import random_ids, reference_model, save_folder
from ranks import ThreadGroup, on_ranks
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which is there on Linux alone")

from interpreted import hurried, matrix_units, poison

from infer.backend.gpu import attention, gemm, moe, step
from infer.backend.gpu.backend import GpuBackend
from infer.backend.parts import parts_of
from infer.cache import KVCache
from infer.loader.load import load_model
from infer.models.rows import ALL, Row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
)
TURN = Lock()  # of the rank that runs: the interpreter is not made for threads


class InTurns(ThreadGroup):
    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        TURN.release()
        try:
            return super().all_gather(x, sizes)
        finally:
            TURN.acquire()

    def combine(self, x: Tensor, own: Tensor) -> Tensor:
        TURN.release()
        try:
            return super().combine(x, own)
        finally:
            TURN.acquire()


def logits(path: Path, dtype: torch.dtype, group: ThreadGroup | None = None) -> Tensor:
    """Of a prompt, whose pairs of token and expert are grouped by expert, and of two single tokens."""
    with torch.inference_mode():
        model, _ = load_model(path, device=DEVICE, dtype=dtype, group=group)
        backend = GpuBackend.of(parts_of(model), dtype)
        cache = KVCache.from_model_config(model.config, 32, dtype=dtype, device=DEVICE)
        chunks = torch.split(random_ids(1, 20), [18, 1, 1], 1)
        return torch.cat([backend.run([Row(cache, chunk, ALL)])[0][0] for chunk in chunks])


@pytest.mark.parametrize(
    ("family", "count", "dtype"), [("olmoe", 3, torch.bfloat16), ("gpt_oss", 2, torch.float32)], ids=str
)
def test_same_bits(
    family: str, count: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, attention, gemm, moe, step)
    if DEVICE.type == "cpu":
        matrix_units(monkeypatch)
        hurried(monkeypatch)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    path = save_folder(reference_model(family, **sizes), tmp_path)
    expected = logits(path, dtype)

    def part(group: ThreadGroup) -> Tensor:
        with TURN:
            return logits(path, dtype, InTurns(group.rank, group._meeting))

    for found in on_ranks(count, part):
        assert torch.equal(found, expected)
