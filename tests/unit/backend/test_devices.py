"""Devices of torch's that have no kernels, as mps and xpu: every command on one that is made up (`fake_device`)."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from amount import amount

PROGRAM = """
import contextlib, io, json, sys
if sys.argv[1] == "fake":
    import fake_device
    fake_device.register()
import infer
from infer.cli import main

answers = []
for args in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*args, "--device", sys.argv[1]])
        except SystemExit as ending:
            answers.append((ending.code, out.getvalue(), err.getvalue()))
for model in sys.argv[2:]:
    network, _ = infer.load_model(model, device=sys.argv[1], dtype="float32")
    params = infer.SamplingParams(max_new_tokens=4, temperature=1.0, seed=1)
    batch = infer.generate_batch(network, infer.Tokenizer(model), [[1, 2, 3], [4] * 40], params)
    answers.append((0, json.dumps([row.token_ids for row in batch]), ""))
print(json.dumps(answers))
"""


OPTIONS: list[list[str]] = [
    [],
    ["--cache-dtype", "int8"],
    ["--no-kv-cache"],
    ["--prefill-chunk", "2"],
    ["--temperature", "1", "--seed", "1"],
]


def answers(device: str, commands: list[list[str]], *models: Path) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, device, *map(str, models)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "INFER_KERNELS": "0", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout)]


def test_every_command(folder: Path, windowed: Path, tmp_path: Path) -> None:
    """In plain torch nothing differs from a CPU, which is what computes here."""
    prompts, text = tmp_path / "prompts.txt", tmp_path / "text.txt"
    prompts.write_text(amount("hello world\n", "hello me\n"))
    text.write_text("hello world, this is a text " * 3)
    few = ["--max-new-tokens", "3"]
    compared = [
        ["generate", "hello", *few, "--json", "--model", str(model), "--dtype", dtype, *options]
        for model, dtype, options in amount(
            list(product((folder, windowed), ("float32", "float16", "bfloat16"), OPTIONS)),
            [
                (folder, "float32", ["--temperature", "1", "--seed", "1"]),
                (windowed, "float16", ["--cache-dtype", "int8", "--prefill-chunk", "2"]),
                (folder, "bfloat16", ["--no-kv-cache"]),
            ],
        )
    ]
    others = [
        ["info", str(folder)],
        ["trace", "hello", *few, "--model", str(windowed)],
        ["explain", "hello", *few, "--model", str(folder)],
        ["bench", "--prompt-tokens", "5", "--new-tokens", "3", "--trials", "1", "--model", str(folder)],
        ["perplexity", str(folder), "--text", str(text), "--context", "32", "--cache-dtype", "int8"],
        ["verify", str(windowed), "--prompts", str(prompts), "--max-new-tokens", "2", "--dtype", "float32"],
    ]
    refused = [
        ["generate", "hello", *few, "--model", str(folder), "--dtype", "float64"],
        ["generate", "hello", *few, "--model", str(folder), "--quantize", "int4"],
    ]
    found = answers("fake", [*compared, *others, *refused], folder, windowed)
    expected = answers("cpu", compared, folder, windowed)
    for ours, theirs in zip(found[: len(compared)], expected, strict=False):
        assert ours[0] == 0, ours
        assert json.loads(ours[1])["token_ids"] == json.loads(theirs[1])["token_ids"]
    for command, (status, _, err) in zip(others, found[len(compared) :], strict=False):
        assert status == 0, (command, err)
    info = found[len(compared)][1]
    assert "backend                torch: there are no kernels for fake" in info
    assert "in bfloat16 on fake:0" in info
    no_float64, no_int4 = found[len(compared) + len(others) : -2]
    assert no_float64 == (2, "", "error: models run in float32, bfloat16 or float16 on fake:0, not in float64\n")
    assert no_int4[0] == 2
    assert found[-2:] == expected[-2:]  # batches


@pytest.mark.parametrize("device", ["mps", "xpu", "xpu:1"])
def test_devices_that_are_not_here(device: str) -> None:
    from infer.machine import resolve_device

    if torch.accelerator.is_available():
        pytest.skip("this machine may have it")
    with pytest.raises(ValueError, match=f"device '{device}' is not available, torch has no {device} here: use cpu"):
        resolve_device(device)
