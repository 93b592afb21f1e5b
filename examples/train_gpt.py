"""Train a small character-level GPT on a text file, a minute or two on a CPU.

    python examples/train_gpt.py --text FILE
    infer generate --model out/ckpt.pt --temperature 0.8 --on-full recompute "Once"

Writes a checkpoint as nanoGPT does: ckpt.pt, and meta.pkl with the characters.
"""

from __future__ import annotations

import argparse
import math
import pickle
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from infer import SamplingParams, Tokenizer, generate, load_model
from infer.loader.nanogpt import config_from_nanogpt
from infer.loader.tensor_names import to_gpt2
from infer.models.common import Decoder
from infer.models.registry import build_model


def main(args: list[str] | None = None) -> None:
    options = parse(args)
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"cannot read {options.text}: {error}") from None
    characters = sorted(set(text))
    ids = {character: i for i, character in enumerate(characters)}
    data = torch.tensor([ids[character] for character in text])
    split = int(0.9 * len(data))
    training, validation = data[:split], data[split:]
    if len(validation) <= options.block_size:
        needed = 10 * options.block_size + 1
        raise SystemExit(
            f"{options.text} has {len(text)} characters and needs at least {needed}: "
            "find more text, or lower --block-size"
        )
    torch.manual_seed(options.seed)

    model_args = {
        "n_layer": options.layers,
        "n_head": options.heads,
        "n_embd": options.width,
        "block_size": options.block_size,
        "vocab_size": len(characters),
        "dropout": options.dropout,
        "bias": False,
    }
    if options.rope:
        model_args["model_type"] = "rope_gpt"
    try:
        model = build_model(config_from_nanogpt(model_args))
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise SystemExit(f"cannot train that: {error}") from None
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{len(text):,} characters, {len(characters)} different; {size:,} weights")

    losses = train(model, training, options)
    validation_loss = evaluate(model, validation, options)
    print(chart(losses))
    print(f"validation loss {validation_loss:.3f}, where guessing would give {math.log(len(characters)):.3f}")

    weights = {to_gpt2(name): tensor for name, tensor in model.state_dict().items()}
    checkpoint = options.out / "ckpt.pt"
    torch.save(
        {
            "model": weights,
            "model_args": model_args,
            "iter_num": options.steps,
            "best_val_loss": validation_loss,
            "config": {"dataset": options.text.stem},
        },
        checkpoint,
    )
    meta = {"vocab_size": len(characters), "stoi": ids, "itos": dict(enumerate(characters))}
    (options.out / "meta.pkl").write_bytes(pickle.dumps(meta))

    # Generate from the written file, as `infer generate` does.
    trained, _ = load_model(checkpoint)
    tokenizer = Tokenizer(checkpoint)
    params = SamplingParams(temperature=0.8, seed=options.seed, max_new_tokens=300)
    sample = generate(trained, tokenizer, tokenizer.encode(text[:8]), params, on_full="recompute")
    print(f"\n{text[:8]}{sample.text}\n\nwritten to {checkpoint}")


def train(model: Decoder, data: Tensor, options: argparse.Namespace) -> list[float]:
    """AdamW with warm-up and cosine decay. A training step is a plain forward pass: no cache is involved."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.1)
    warm_up = max(1, options.steps // 20)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / options.steps))),
    )
    losses = []
    for _ in track(range(options.steps), description="training"):
        loss = batch_loss(model, data, options)
        if not loss.isfinite():
            raise SystemExit(f"the loss is {loss.item()} after {len(losses)} steps: lower --lr")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model: Decoder, data: Tensor, options: argparse.Namespace) -> float:
    model.eval()
    return sum(batch_loss(model, data, options).item() for _ in range(10)) / 10


def batch_loss(model: Decoder, data: Tensor, options: argparse.Namespace) -> Tensor:
    """Cross-entropy of the next character, over random slices of the text."""
    starts = torch.randint(len(data) - options.block_size, (options.batch_size,))
    slices = torch.stack([data[start : start + options.block_size + 1] for start in starts])  # [B, T + 1]
    logits = model(slices[:, :-1])  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), slices[:, 1:].flatten())


def chart(losses: list[float], width: int = 72, height: int = 8) -> str:
    """The loss over the steps; each column is the mean of several steps."""
    columns = min(width, len(losses))
    edges = [len(losses) * i // columns for i in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    rows = [round((mean - low) / (high - low or 1) * (height - 1)) for mean in means]
    labels = {height - 1: f"{high:.2f}", 0: f"{low:.2f}"}
    lines = [
        f"{labels.get(level, ''):>6} │{''.join('•' if row == level else ' ' for row in rows)}".rstrip()
        for level in reversed(range(height))
    ]
    return "\n".join(["  loss", *lines, f"       └{'─' * columns} {len(losses)} steps"])


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level GPT on a text file.")
    parser.add_argument("--text", type=Path, required=True, help="the training text, in UTF-8")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for ckpt.pt and meta.pkl")
    parser.add_argument("--rope", action="store_true", help="rotate positions (RoPE) instead of learning them")
    parser.add_argument("--steps", type=positive, default=1000)
    parser.add_argument("--batch-size", type=positive, default=12)
    parser.add_argument("--block-size", type=positive, default=64, help="the longest context, in characters")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args(args)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive integer")
    return number


if __name__ == "__main__":
    main()
