"""Loading peaks at 1.2 times the model's size plus its largest tensor, in every format, quantized or not."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from amount import amount
from checkpoints import gguf_metadata, gguf_tensors, reference_model, save_folder, write_gguf
from gguf import GGMLQuantizationType as Quant
from gguf import quants
from transformers import LlamaConfig, LlamaForCausalLM

# Loads a tiny model first, so that code and thread pools are in memory, then reports how far loading the large one
# lifts the process's peak.
MEASURE = """
import json, sys
from infer import load_model

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

tiny, large, form = sys.argv[1:]
options = {"quantize": form} if form.startswith("int") else {"dtype": form}
load_model(tiny, device="cpu", **options)
before = status("VmRSS")
model, _ = load_model(large, device="cpu", **options)
sizes = [tensor.nbytes for tensor in (*model.parameters(), *model.buffers())]
print(json.dumps({
    "growth": status("VmHWM") - before,
    "model": sum(sizes),
    "largest": max(sizes),
    "heavy_imports": sorted({"sympy", "torch._dynamo", "transformers"} & sys.modules.keys()),
}))
"""


def large_model() -> LlamaForCausalLM:
    """About 200 MB in float32: wide rather than deep, with a head of its own."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(0.01)
    return model


def save_quantised(model: LlamaForCausalLM, path: Path, quant: Quant) -> Path:
    """Equal rows: quantizing is slow, and the values do not matter here."""
    tensors: dict[str, Any] = {}
    for name, tensor in gguf_tensors(model).items():
        if tensor.ndim == 1:
            tensors[name] = tensor
        else:
            tensors[name] = (np.tile(quants.quantize(tensor[:1], quant), (len(tensor), 1)), quant)
    return write_gguf(path, gguf_metadata(model), tensors)


def save(model: LlamaForCausalLM, kind: str, folder: Path) -> Path:
    if kind in ("safetensors", "sharded"):
        return save_folder(model, folder, max_shard_size="50GB" if kind == "safetensors" else "60MB")
    folder.mkdir()
    return save_quantised(model, folder / "model.gguf", Quant[kind])


FORMATS = ["safetensors", "sharded", "F16", "Q8_0", "Q4_1"]
FORMS = ["float32", "bfloat16", "int4", "int8"]
PAIRS = [("sharded", "float32"), ("safetensors", "int8"), ("Q4_1", "int4")]


@pytest.fixture(scope="module")
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("memory")
    yield (
        save(reference_model(num_hidden_layers=1), request.param, folder / "tiny"),
        save(large_model(), request.param, folder / "large"),
    )
    shutil.rmtree(folder)


def measure(files: tuple[Path, Path], form: str) -> dict[str, Any]:
    command = [sys.executable, "-c", MEASURE, *map(str, files), form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    print(form, {key: f"{seen[key] / 1e6:.0f} MB" for key in ("growth", "model", "largest")})
    assert seen["growth"] > 0.9 * seen["model"]  # or nothing was measured
    return seen


needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")


@needs_linux
@pytest.mark.parametrize(
    ("files", "form"), amount(list(itertools.product(FORMATS, FORMS)), PAIRS), indirect=["files"], scope="module"
)
def test_peak_memory(files: tuple[Path, Path], form: str) -> None:
    """Of a quantized model: the largest tensor in float32 fits beside it, a second one does not."""
    seen, quantised = measure(files, form), form.startswith("int")
    assert seen["model"] > (30e6 if quantised else 100e6)
    assert seen["growth"] <= 1.2 * seen["model"] + (4 * 8192 * 1024 if quantised else seen["largest"])
    # Initialising weights on the meta device would draw in torch's decompositions: a second and 80 MB.
    assert seen["heavy_imports"] == []
