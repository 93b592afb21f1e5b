"""Draw the figures of docs/kv-cache.md from real runs: `python docs/figures.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from infer import (
    KVCache,
    ModelConfig,
    SamplingParams,
    SlidingCache,
    Tokenizer,
    full_attention_matrix,
    generate,
    load_model,
)
from infer.trace.text import token_texts

IMAGES = Path(__file__).parent / "images"
PROMPT = "The cat sat on the mat because it was"
LAYER, HEAD = 12, 4


def main() -> None:
    draw_attention()
    draw_memory()


def draw_attention() -> None:
    """One head's attention over a generated text: all of it, and the one row that a decode step computes."""
    model, _ = load_model("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = Tokenizer("smollm2-135m")
    prompt = tokenizer.encode(PROMPT)
    result = generate(model, tokenizer, prompt, SamplingParams(max_new_tokens=7))
    ids = [*prompt, *result.token_ids[:-1]]  # the last one was never fed
    weights = full_attention_matrix(model, ids, trace_layer=LAYER)[0, HEAD]
    words = [text.replace("\n", r"\n") for text in token_texts(tokenizer, ids)]
    figure, (full, step) = plt.subplots(1, 2, figsize=(10.5, 5.4), layout="constrained", sharey=True)
    weights = weights.masked_fill(weights == 0, float("nan"))  # what causal attention cannot see
    shown = weights.clone()
    shown[:-1] = float("nan")
    for axes, matrix, title in (
        (full, weights, "without the cache: every row, at every step"),
        (step, shown, "with it: the last row; the keys are in the cache"),
    ):
        axes.imshow(matrix**0.5, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(words)), words, rotation=90)
        axes.set_yticks(range(len(words)), words)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("key")
        axes.axhline(len(prompt) - 0.5, color="0.6", linewidth=0.8, linestyle=":")
    full.set_ylabel("query")
    figure.suptitle(f"SmolLM2-135M, layer {LAYER}, head {HEAD}: attention weights (root), generated below the line")
    figure.savefig(IMAGES / "attention.png", dpi=110)


def draw_memory() -> None:
    """Bytes that each kind of cache holds for Gemma 3 270M, as allocated."""
    config = ModelConfig.from_pretrained("gemma-3-270m")
    positions = [2**i for i in range(5, 14)]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for kind, style in ((KVCache, "o-"), (SlidingCache, "s-")):
        held = [
            kind.from_model_config(config, count, dtype="bfloat16", device="cpu").memory_bytes / 1e6
            for count in positions
        ]
        axes.plot(positions, held, style, label=kind.__name__)
    axes.axvline(config.sliding_window, color="0.6", linewidth=0.8, linestyle=":")
    axes.text(config.sliding_window + 60, axes.get_ylim()[1] * 0.9, f"window of {config.sliding_window}", color="0.4")
    axes.set_xlabel("positions")
    axes.set_ylabel("MB of keys and values, bf16")
    axes.set_title("Gemma 3 270M: 15 of 18 layers see a window")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "cache_bytes.png", dpi=110)


if __name__ == "__main__":
    main()
