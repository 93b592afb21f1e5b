"""Draw the pictures of the documentation from real runs: `python docs/figures.py [NAME ...]`, all without a name.

`trace` and `live` need Chromium, and run `infer` from the PATH. `step_time` needs an idle machine.
"""

from __future__ import annotations

import base64
import io
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import PowerNorm
from PIL import Image

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
from infer.evaluate import bench
from infer.trace.text import token_texts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import Browser, Page

IMAGES = Path(__file__).parent / "images"
INFER = [sys.executable, "-m", "infer"]
PROMPT = "The cat sat on the mat because it was"
LAYER, HEAD = 12, 4


def main() -> None:
    figures = {
        "attention": draw_attention,
        "cache_bytes": draw_memory,
        "pages": draw_pages,
        "data_flow": draw_data_flow,
        "step_time": draw_step_time,
        "trace": draw_trace,
        "live": draw_live,
    }
    names = sys.argv[1:] or list(figures)
    if unknown := [name for name in names if name not in figures]:
        raise SystemExit(f"no figure {', '.join(unknown)}: there are {', '.join(figures)}")
    for name in names:
        figures[name]()


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
    """A prefill and two decode steps, as they ran: what each pass reads, and which keys and values it writes."""
    model, config = load_model("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = Tokenizer("smollm2-135m")
    cache = KVCache.from_model_config(config, 32, dtype="float32", device="cpu")
    figure, axes = plt.subplots(figsize=(12, 4.8), layout="constrained")
    axes.set(xlim=(-0.1, 12.6), ylim=(-0.75, 4.2))
    axes.axis("off")
    cell, passes, top = 0.3, 2.35, 3.55

    def put(x: float, y: float, text: str, colour: str | None = None, **style: str) -> None:
        box = None if colour is None else {"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": "0.4"}
        axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 9, "bbox": box, "zorder": 2} | style)

    def draw_arrow(start: tuple[float, float], end: tuple[float, float], style: str = "-") -> None:
        arrow = {"arrowstyle": "-|>", "color": "0.35", "linestyle": style}
        axes.annotate("", end, start, arrowprops=arrow, zorder=1)  # behind the boxes

    fed = torch.tensor([tokenizer.encode("The cat sat on the")])
    for i, (name, run) in enumerate((("prefill", prefill), ("decode", decode_step), ("decode", decode_step))):
        x, before = 2.0 + 4.3 * i, cache.seq_len
        words, count = tokenizer.decode(fed[0].tolist()), fed.shape[1]
        put(x - 1.1, top, f"tokens [batch, n] = {list(fed.shape)}\n“{words}”")
        logits, _, _ = run(model, fed, cache)
        fed = logits[:, -1:].argmax(-1)
        put(x, passes, f"{name}: {config.num_hidden_layers} layers, {count} row{'s' if count > 1 else ''}", "#dbe9f6")
        put(x + 1.1, top, f"logits {list(logits[:, -1:].shape)}\nargmax: “{tokenizer.decode(fed[0].tolist())}”")
        draw_arrow((x - 0.8, top - 0.3), (x - 0.35, passes + 0.25))
        draw_arrow((x + 0.35, passes + 0.25), (x + 0.8, top - 0.3))
        left = x - cache.seq_len * cell / 2
        for position in range(cache.seq_len):
            face = "#f0a04b" if position >= before else "#fdebd0"
            for row, letter in enumerate("vk"):
                corner = left + position * cell, 0.35 + row * cell
                axes.add_patch(
                    plt.Rectangle(corner, cell * 0.9, cell * 0.9, facecolor=face, edgecolor="0.5", linewidth=0.6)
                )
                if position == 0:
                    put(corner[0] - 0.15, corner[1] + cell * 0.45, letter)
        put(x, 0.1, f"KV cache, {cache.seq_len} positions")
        new = x + (before - cache.seq_len + cache.seq_len / 2 + count / 2) * cell  # the middle of what is written
        draw_arrow((min(new, x + 0.9), passes - 0.25), (new, 1.02))
        put(new + 0.1, 1.55, f"writes k, v of\n{count} token{'s' if count > 1 else ''}", ha="left")
        if before:
            old = x - count * cell / 2
            draw_arrow((old - 0.35, 1.02), (old - 0.35, passes - 0.25))
            put(old - 0.5, 1.55, f"reads k, v of\n{before} positions", ha="right")
        if i < 2:
            draw_arrow((x + 1.95, top), (x + 2.35, top), "--")
            draw_arrow((x + cache.seq_len * cell / 2 + 0.1, 0.62), (x + 4.0 - cache.seq_len * cell / 2, 0.62))
    put(
        6.3,
        -0.5,
        "Dark cells: keys and values that the pass has written. The dashed arrows carry one token to the next pass.",
    )
    axes.set_title(
        "Each pass reads the keys and values of all tokens before it, and adds those of its own", fontsize=11
    )
    figure.savefig(IMAGES / "data_flow.png", dpi=110)
    plt.close(figure)


def draw_step_time() -> None:
    """Time per decode step with and without the cache, as `infer bench --compare --plot` draws it."""
    model, _ = load_model("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = Tokenizer("smollm2-135m")
    configs = [bench.BenchConfig(64, 192, trials, 0, cached) for cached, trials in ((True, 5), (False, 1))]
    results = [bench.run(model, tokenizer, config) for config in configs]
    bench.plot(results, IMAGES / "step_time.png", "smollm2-135m", bench.describe_machine(torch.device("cpu")))


# ---------------------------------------------------------------- pages, in a headless browser


@contextmanager
def opened(address: str, width: int, height: int, scale: float) -> Iterator[Page]:
    with TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            with browser.page(address, prefers_color_scheme="light") as page:
                size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
                page.send("Emulation.setDeviceMetricsOverride", **size)
                yield page
        finally:
            browser.close()


def screenshot(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(page.send("Page.captureScreenshot", format="png")["data"])))


def draw_trace() -> None:
    """The page of the command in docs/trace.md, as its address opens it."""
    command = re.search(r"^infer (trace .*--html.*)$", (IMAGES.parent / "trace.md").read_text("utf-8"), re.MULTILINE)
    assert command is not None
    with TemporaryDirectory() as folder:
        arguments = shlex.split(command[1].replace("run.html", str(Path(folder, "run.html"))))
        said = subprocess.run([*INFER, *arguments], capture_output=True, text=True, check=True).stderr
        address = said.strip().splitlines()[-1].split(": ")[-1]
        with opened(address, 2000, 1260, 1) as page:
            page.wait("state.rows && drawings.every(drawing => !drawing.dirty || !drawing.seen)")
            screenshot(page)
            image = screenshot(page).convert("RGB").quantize(128, dither=Image.Dither.NONE)
            image.save(IMAGES / "trace.png", optimize=True)


SYSTEM = (
    "You are a patient teacher of science for children of ten years. Explain with things that a child has seen: the "
    "kitchen, the garden, the sea, the sky at night. Use short sentences and plain words. Begin with what the child "
    "knows, then say what is behind it, and end with something to try at home. Do not use formulas. If you are not "
    "sure of something, say that you are not sure, and how one could find out. Never talk down to the child. If the "
    "child asks about something dangerous, such as fire, electricity or strong acids, say clearly that an adult has to "
    "be there, and choose an experiment with water, light, sound or plants instead. If the question has a wrong idea "
    "in it, say kindly what is right, and why so many people think otherwise. Compare large things with a football "
    "field, and small things with a grain of sand. Keep the answer to three short paragraphs, and give the last one to "
    "the experiment: what is needed, what to do, and what to look for."
)
FRAMES, FRAME_S = 24, 0.4


def draw_live() -> None:
    """The live page while four chats with one system prompt are answered: they share the pages of their prefix."""
    command = [*INFER, "serve", "smollm2-135m", "--quantize", "int4", "--port", "0", "--cache-memory", "280MB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout)
            address = next(filter(None, found))[0]
            with opened(address, 1280, 800, 0.875) as page:
                frames = live_frames(page)
        finally:
            server.terminate()
    first, *rest = (frame.convert("RGB") for frame in frames)
    durations = [int(1000 * FRAME_S)] * len(rest) + [3000]
    first.save(
        IMAGES / "live.webp", save_all=True, append_images=rest, duration=durations, loop=0, quality=70, method=6
    )


def live_frames(page: Page) -> list[Image.Image]:
    page.wait("'live' in document.documentElement.dataset")
    page.js(f"$('system').value = {SYSTEM!r}; $('system').dispatchEvent(new Event('input'))")
    page.js("$('max-tokens').value = 400; $('max-tokens').dispatchEvent(new Event('input'))")
    page.js("$('draft').focus()")
    page.type("Why is the sky blue, and why is it red in the evening?")
    page.click("#many")
    frames = []
    for _ in range(FRAMES):
        started = time.monotonic()
        frames.append(screenshot(page))
        time.sleep(max(0, FRAME_S - (time.monotonic() - started)))
    return frames


if __name__ == "__main__":
    main()
