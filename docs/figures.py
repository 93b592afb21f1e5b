"""Draw the figures of docs/kv-cache.md from real runs: `python docs/figures.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import PowerNorm

from infer import (
    LLM,
    CacheMemory,
    KVCache,
    ModelConfig,
    SamplingParams,
    SlidingCache,
    Tokenizer,
    decode_step,
    generate,
    load_model,
    prefill,
)
from infer.cache.pool import bytes_for
from infer.compat.seeds import full_attention_matrix
from infer.trace.text import token_texts

IMAGES = Path(__file__).parent / "images"
PROMPT = "The cat sat on the mat because it was"
LAYER, HEAD = 12, 4


def main() -> None:
    draw_attention()
    draw_memory()
    draw_pages()
    draw_data_flow()


def draw_attention() -> None:
    """One head's attention over a generated text: all of it, and the one row that a decode step computes."""
    model, _ = load_model("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = Tokenizer("smollm2-135m")
    prompt = tokenizer.encode(PROMPT)
    result = generate(model, tokenizer, prompt, SamplingParams(max_new_tokens=7))
    ids = [*prompt, *result.token_ids[:-1]]  # the last one was never fed
    weights = full_attention_matrix(model, ids, trace_layer=LAYER)[0, HEAD]
    words = [text.replace("\n", r"\n") for text in token_texts(tokenizer, ids)]
    figure, (full, step) = plt.subplots(1, 2, figsize=(10.5, 6.2), layout="constrained", sharey=True)
    weights = weights.masked_fill(weights == 0, float("nan"))  # what causal attention cannot see
    shown = weights.clone()
    shown[:-1] = float("nan")
    for axes, matrix, title in (
        (full, weights, "without the cache: every row, at every step"),
        (step, shown, "with the cache: the last row only"),
    ):
        image = axes.imshow(matrix, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=1))  # small weights stay visible
        axes.set_xticks(range(len(words)), words, rotation=90)
        axes.set_yticks(range(len(words)), words)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("key (token that is attended to)")
        axes.axhline(len(prompt) - 0.5, color="0.6", linewidth=0.8, linestyle=":")
    full.set_ylabel("query (token that attends)")
    figure.colorbar(image, ax=[full, step], label="attention weight; each row sums to 1", shrink=0.8)
    figure.suptitle(f"SmolLM2-135M, layer {LAYER}, head {HEAD}; tokens below the dotted line were generated")
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
    axes.set_xlabel("positions that the cache has room for")
    axes.set_ylabel("cache size in MB (keys and values, bf16)")
    axes.set_title("Gemma 3 270M: 15 of 18 layers see a window")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "cache_bytes.png", dpi=110)


def draw_pages() -> None:
    """A pool after three conversations with the same instructions, and what they would take one by one."""
    model, config = load_model("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = Tokenizer("smollm2-135m")
    system = "You are a careful assistant. " + "Answer in one short sentence, and say so when you do not know. " * 12
    memory = CacheMemory(model, 48 * bytes_for(config, 1, 4))
    llm = LLM(model, tokenizer, memory=memory)
    chats = [llm.session(system=system, context=1024) for _ in range(3)]
    for chat, questions in zip(
        chats, (["What is a cache?", "And a page?"], ["Who was Ada?"], ["Tell me a story."]), strict=True
    ):
        for question in questions:
            chat.send(question, SamplingParams(max_new_tokens=150, ignore_eos=True))
    colours = ["#4477aa", "#cc6677", "#ddaa33"]
    holders: dict[int, list[int]] = {}
    for i, chat in enumerate(chats):
        for page in chat.pages():
            holders.setdefault(page, []).append(i)
    figure, (pool, bars) = plt.subplots(1, 2, figsize=(10.5, 3.4), layout="constrained", width_ratios=[2, 1])
    across = 12
    for page in range(memory.pool.num_pages):
        own = holders.get(page, [])
        x, y = page % across, page // across
        kept = not own and memory.pool.ref_counts[page] > 0
        for j, i in enumerate(own or [-1]):
            face = colours[i] if i >= 0 else "0.82" if kept else "0.95"
            pool.add_patch(plt.Rectangle((x + 0.9 * j / len(own or [0]), y), 0.9 / len(own or [0]), 0.9, color=face))
    pool.set_xlim(-0.2, across)
    pool.set_ylim(memory.pool.num_pages / across + 0.1, -0.2)
    pool.set_aspect("equal")
    pool.axis("off")
    names = [f"chat {i + 1}: {len(chat.tokens)} tokens" for i, chat in enumerate(chats)]
    faces = [*colours, "0.82", "0.95"]
    handles = [plt.Rectangle((0, 0), 1, 1, color=face) for face in faces]
    labels = [*names, "kept by the prefix index", "free"]
    pool.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncol=3, frameon=False, fontsize=9)
    pool.set_title(
        f"pool of {memory.pool.num_pages} pages; a square is one page of {memory.pool.page_size} positions,\n"
        "shared if it has several colours",
        fontsize=10,
    )
    page = memory.pool.page_bytes / 1e6
    alone = [sum(len(chat.pages()) for chat in chats) * page, len(holders) * page]
    reserved = 3 * 1024 / memory.pool.page_size * page
    values = [reserved, *alone]
    bars.barh(["contiguous,\n1,024 positions each", "pages", "pages, shared"][::-1], values[::-1], color="#4477aa")
    for i, value in enumerate(values[::-1]):
        bars.text(value, i, f" {value:.0f} MB", va="center", fontsize=9)
    bars.set_xlim(0, max(values) * 1.25)
    bars.spines[["top", "right"]].set_visible(False)
    bars.set_xlabel("cache memory in MB")
    figure.suptitle("SmolLM2-135M, float32: three conversations with the same instructions")
    figure.savefig(IMAGES / "pages.png", dpi=110)
    plt.close(figure)


def draw_data_flow() -> None:
    """A prefill and two decode steps, as they ran: what goes in, what comes out, and what goes on to the next."""
    model, config = load_model("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = Tokenizer("smollm2-135m")
    cache = KVCache.from_model_config(config, 32, dtype="float32", device="cpu")
    figure, axes = plt.subplots(figsize=(12, 3.9), layout="constrained")
    axes.set(xlim=(0, 12.6), ylim=(0, 3.9))
    axes.axis("off")

    def put(x: float, y: float, text: str, colour: str | None = None) -> None:
        box = None if colour is None else {"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": "0.4"}
        axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box, zorder=2)

    def draw_arrow(start: tuple[float, float], end: tuple[float, float], style: str = "-") -> None:
        arrow = {"arrowstyle": "-|>", "color": "0.35", "linestyle": style}
        axes.annotate("", end, start, arrowprops=arrow, zorder=1)  # behind the boxes

    fed = torch.tensor([tokenizer.encode("The cat sat on the")])
    for i, (name, run) in enumerate((("prefill", prefill), ("decode", decode_step), ("decode", decode_step))):
        x, words = 1.2 + 4.2 * i, tokenizer.decode(fed[0].tolist())
        rows = f"{fed.shape[1]} rows" if fed.shape[1] > 1 else "1 row"
        put(x, 0.4, f"tokens [batch, n] = {list(fed.shape)}\n“{words}”")
        logits, _, _ = run(model, fed, cache)
        fed = logits[:, -1:].argmax(-1)
        put(x, 1.9, f"{name}\n{config.num_hidden_layers} layers, {rows}", "#dbe9f6")
        put(x + 2.1, 1.9, f"cache\nk, v of {cache.seq_len}\npositions", "#fdebd0")
        put(
            x,
            3.4,
            f"logits [batch, 1, vocab] = {list(logits[:, -1:].shape)}\nargmax: “{tokenizer.decode(fed[0].tolist())}”",
        )
        draw_arrow((x, 0.75), (x, 1.4))
        draw_arrow((x, 2.4), (x, 3.05))
        draw_arrow((x + 0.95, 1.9), (x + 1.5, 1.9))
        if i < 2:
            draw_arrow((x + 2.7, 1.9), (x + 3.25, 1.9))
            draw_arrow((x + 1.0, 3.1), (x + 3.6, 0.7), "--")
            put(x + 2.1, 2.9, "chosen token\nis fed next")
    axes.set_title("From one pass to the next go the cache (solid arrows) and one token (dashed)", fontsize=11)
    figure.savefig(IMAGES / "data_flow.png", dpi=110)


if __name__ == "__main__":
    main()
