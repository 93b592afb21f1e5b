"""One fresh process, from its start to its first tokens; `compare_gpu.py` runs it and reads the JSON that it prints.

The time to build random weights is measured and subtracted. With --again, more requests follow, each with one other
setting, and the kernels that Triton compiled for it are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import SAMPLING, SHAPES, NoText, build, random_prompt, synchronize

from infer.engine.generate import generate_batch, stream
from infer.engine.params import SamplingParams
from infer.machine import DTYPES
from infer.models.common import Decoder


def compiled() -> int:
    """Entries in Triton's cache folder."""
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def second_token(model: Decoder, lengths: list[int], **sampling: Any) -> float:
    """Seconds from the request, of one or several rows, until each row has two tokens."""
    params = SamplingParams(ignore_eos=True, max_new_tokens=2, **sampling)
    prompts = [random_prompt(model.config, length, seed=1 + i) for i, length in enumerate(lengths)]
    started = time.perf_counter()
    if len(prompts) == 1:
        list(stream(model, NoText(), prompts[0], params))
    else:
        generate_batch(model, NoText(), prompts, params)
    return time.perf_counter() - started


def again(model: Decoder, length: int) -> list[dict[str, Any]]:
    cases: dict[str, tuple[list[int], dict[str, Any]]] = {
        "the same again": ([length], {}),
        "another prompt length": ([length + length // 3], {}),
        "batch 2": ([length, length // 2], {}),
        "batch 8": ([length + i for i in range(8)], {}),
        "sampling": ([length], SAMPLING),
        "other sampling": ([length], {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.3, "seed": 2}),
        "sampling, batch 8": ([length + i for i in range(8)], SAMPLING),
    }
    rows = []
    for case, (lengths, sampling) in cases.items():
        before = compiled()
        seconds = second_token(model, lengths, **sampling)
        rows.append({"case": case, "second_s": seconds, "compiled": compiled() - before})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--started", type=float, required=True, help="start of the process, by time.time()")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    torch.zeros(1, device=args.device)
    synchronize(args.device)
    ready = time.time()
    model = build(args.shape, args.device, DTYPES[args.dtype])
    synchronize(args.device)
    weights_s = time.time() - ready
    prompt = random_prompt(model.config, args.prompt_tokens)
    params = SamplingParams(ignore_eos=True, max_new_tokens=8)
    moments = [time.time() - args.started - weights_s for _ in stream(model, NoText(), prompt, params)]
    row = {
        "ready_s": ready - args.started,
        "weights_s": weights_s,
        "first_s": moments[0],
        "second_s": moments[1],
        "eighth_s": moments[7],
        "compiled": compiled(),
    }
    print(json.dumps({"start": row, "again": again(model, args.prompt_tokens) if args.again else []}))


if __name__ == "__main__":
    main()
