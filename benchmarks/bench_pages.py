"""Pages against a contiguous cache, in one run: steps, prompts, prefix hits, shared memory, saved sessions, the index.

On a GPU: random weights in a shape, captured steps. On a CPU: a model. Sizes that do not fit into memory are skipped,
with a note.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_shapes import SHAPES, NoText, build, synchronize

from infer import LLM, CacheMemory, PagePool, SamplingParams, generate_batch, load_model
from infer.backend import Row, backend_for
from infer.cache.base import Cache
from infer.cache.pool import bytes_for
from infer.cache.prefix import PrefixIndex
from infer.cli.common import DEFAULT_MODEL
from infer.engine.model import make_cache
from infer.evaluate.bench import describe_machine, machine_line
from infer.machine import available_memory
from infer.models.common import Decoder

TRIALS = 5
PREFIX, REST = 2000, 100


def caches(model: Decoder, kind: str, rows: int, length: int) -> list[Cache]:
    """Filled to `length`; the contents do not affect the time."""
    made: list[Cache] = []
    if kind == "paged":
        # For all positions in all layers: windows release their pages only after the pass that fills them.
        memory = CacheMemory(model, rows * (length + 128) * model.config.cache_bytes_per_token(model.dtype.itemsize))
        made = [memory.cache(length + 64) for _ in range(rows)]
    else:
        made = [make_cache(model, length + 64, model.device) for _ in range(rows)]
    for cache in made:
        cache.advance(length)
        cache.reserve(1)
    return made


def step_runner(model: Decoder, rows: Sequence[Cache]) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Functions that run one step of these rows (on a GPU always at the same positions), and that clean up."""
    backend: Any = backend_for(model)
    if backend.name != "gpu":
        return lambda: backend.run([Row(cache, [1]) for cache in rows]), lambda: None
    step = backend.captured.acquire(1 << (len(rows) - 1).bit_length(), False)
    step.clear()
    tables = np.concatenate([cache.table(model.config, model.dtype, 1) for cache in rows], 1)
    sequences = [SimpleNamespace(slot=i, token_ids=[1] * (cache.seq_len + 1)) for i, cache in enumerate(rows)]
    step.load(sequences, tables)
    step.increments.zero_()
    return step.launch, step.release


def seconds(run: Callable[[], Any], device: torch.device, count: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / count


def comparison(times: dict[str, list[float]]) -> str:
    """Medians, and the median of the ratios of adjacent trials, which the machine's slow changes do not affect."""
    ratios = [a / b for a, b in zip(times["contiguous"], times["paged"], strict=True)]
    first, second = (statistics.median(times[kind]) * 1e3 for kind in ("contiguous", "paged"))
    return f"contiguous {first:9.3f} ms   paged {second:9.3f} ms   speed {statistics.median(ratios):.3f}"


@torch.inference_mode()
def steps(model: Decoder, all_rows: Sequence[int], lengths: Sequence[int]) -> None:
    for length in lengths:
        for rows in all_rows:
            free = available_memory(model.device) or 0
            if 1.1 * rows * (length + 128) * model.config.cache_bytes_per_token(model.dtype.itemsize) > free:
                print(f"step, {rows:3} rows at {length:6,}: skipped, not enough memory", flush=True)
                continue
            count = 20 if model.device.type == "cuda" else 10
            times: dict[str, list[float]] = {"contiguous": [], "paged": []}
            for _ in range(TRIALS):
                for kind, found in times.items():
                    own = caches(model, kind, rows, length)
                    run, end = step_runner(model, own)
                    run()
                    found.append(seconds(run, model.device, count))
                    end()
                    del own, run, end
                    torch.cuda.empty_cache()
            print(f"step, {rows:3} rows at {length:6,}: {comparison(times)}", flush=True)


@torch.inference_mode()
def prompts(model: Decoder, lengths: Sequence[int]) -> None:
    for length in lengths:
        ids = [random.randrange(1000) for _ in range(length)]
        times: dict[str, list[float]] = {"contiguous": [], "paged": []}
        for trial in range(TRIALS + 1):
            for kind, found in times.items():
                [cache] = caches(model, kind, 1, length)
                cache.reset()
                taken = seconds(lambda: backend_for(model).run([Row(cache, ids)]), model.device, 1)  # noqa: B023
                if trial:
                    found.append(taken)
        print(f"prompt of {length:6,} tokens: {comparison(times)}", flush=True)


@torch.inference_mode()
def hit(model: Decoder) -> None:
    """A prompt with a prefix hit, against a contiguous cache that holds the prefix."""
    ids = [random.randrange(1000) for _ in range(PREFIX + REST)]
    memory = CacheMemory(model, 4 * (PREFIX + REST) * model.config.cache_bytes_per_token(model.dtype.itemsize))
    first = memory.cache(PREFIX + REST)
    backend_for(model).run([Row(first, ids[:PREFIX])])
    memory.keep(first)
    contiguous = make_cache(model, PREFIX + REST, model.device)
    backend_for(model).run([Row(contiguous, ids[:PREFIX])])
    times: dict[str, list[float]] = {"contiguous": [], "paged": []}

    def paged() -> None:
        cache = memory.cache(PREFIX + REST)
        assert memory.attach_prefix(cache, ids) == PREFIX
        backend_for(model).run([Row(cache, ids[PREFIX:])])

    for trial in range(TRIALS + 1):
        rest = seconds(lambda: backend_for(model).run([Row(contiguous, ids[PREFIX:])]), model.device, 1)
        contiguous.truncate(PREFIX)
        found = seconds(paged, model.device, 1)
        if trial:
            times["contiguous"].append(rest)
            times["paged"].append(found)
    print(f"first token of {PREFIX + REST:,}, {PREFIX:,} cached: {comparison(times)}", flush=True)


def shared(model: Decoder, requests: int = 64, prefix: int = 1000, own: int = 24) -> None:
    """Memory of requests with a common prefix."""
    common = [random.randrange(1000) for _ in range(prefix)]
    batch = [[*common, *(random.randrange(1000) for _ in range(own))] for _ in range(requests)]
    alone = bytes_for(model.config, prefix + own + 8, model.dtype.itemsize)
    memory = CacheMemory(model, alone * requests)
    most = 0
    take = memory.pool.allocate

    def watched(*args: int) -> list[int]:
        nonlocal most
        taken = take(*args)
        most = max(most, memory.pool.num_pages - memory.pool.num_free_pages)
        return taken

    memory.pool.allocate = watched  # type: ignore[method-assign, assignment]
    generate_batch(model, NoText(), batch, SamplingParams(max_new_tokens=8, ignore_eos=True), memory=memory)
    held = most * memory.pool.page_bytes
    once = bytes_for(model.config, prefix, model.dtype.itemsize)
    each = bytes_for(model.config, own + 8, model.dtype.itemsize) + 2 * memory.pool.page_bytes * len(
        memory.index.windows
    )
    assert held <= once + requests * each, (held, once, each)
    print(
        f"{requests} requests, {prefix:,} tokens in common: {held / 1e6:,.1f} MB at most, index included, instead of "
        f"{alone * requests / 1e6:,.1f} MB",
        flush=True,
    )


def sessions(model: Decoder, length: int = 4000) -> None:
    """Loading a session against prefilling it."""
    ids = [random.randrange(1000) for _ in range(length)]
    size = 2 * (length + 128) * model.config.cache_bytes_per_token(model.dtype.itemsize)
    llm, other = (LLM(model, NoText(), cache_memory=size, prefill_chunk=512) for _ in range(2))
    session = llm.session(context=length + 64, encode=lambda _: ids)
    begin = time.perf_counter()
    session.send("x", SamplingParams(max_new_tokens=1))
    prefill = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.session"
        times = [seconds(lambda: session.save(path), model.device, 1)]
        assert other.memory.key == llm.memory.key
        times.append(seconds(lambda: other.load_session(path, encode=session.encode), model.device, 1))
        megabytes = path.stat().st_size / 1e6
    print(
        f"session of {length:,} tokens, {megabytes:.0f} MB: prefill {prefill:.2f} s, save {times[0]:.2f} s, load "
        f"{times[1]:.2f} s = {prefill / times[1]:.0f} times as fast",
        flush=True,
    )


def index(counts: Sequence[int]) -> None:
    """Microseconds per page, for sequences of 100 pages."""
    for count in counts:
        pool = PagePool(count, 1, 1, 2, dtype=torch.int8, device=torch.device("meta"))
        tree = PrefixIndex(pool, [None])
        texts = [
            [random.randrange(50_000) for _ in range(100 * pool.page_size)] for _ in range(min(1000, count // 100))
        ]
        part = texts[-(count // 10 // 100) :]
        for i in range(count // 100 - len(part)):  # all others: the same texts with another first page
            pages = pool.allocate(100)
            tree.insert([i, i // 50_000, *texts[i % len(texts)][2:]], [(page,) for page in pages])
            pool.release(pages)
        taken = [pool.allocate(100) for _ in part]
        times = {}
        begin = time.perf_counter()
        for tokens, pages in zip(part, taken, strict=True):
            tree.insert(tokens, [(page,) for page in pages])
        times["insert"] = time.perf_counter() - begin
        for pages in taken:
            pool.release(pages)
        begin = time.perf_counter()
        for tokens in part:
            pool.release(page for some in tree.match(tokens).pages for page in some)
        times["match"] = time.perf_counter() - begin
        begin = time.perf_counter()
        tree.evict(100 * len(part))
        times["evict"] = time.perf_counter() - begin
        figures = ", ".join(f"{name} {1e6 * taken / (100 * len(part)):.1f}" for name, taken in times.items())
        print(f"index of {count:9,} pages, us a page: {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="llama-1b", choices=SHAPES, help="on a GPU")
    parser.add_argument("--layers", type=int, help="fewer layers, so that many long rows fit")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="on a CPU")
    parser.add_argument("--quantize", help="on a CPU")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--positions", type=int, nargs="*", default=[512, 32_768])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--pages", type=int, nargs="*", default=[10**4, 10**5, 10**6], help="of the index")
    options = parser.parse_args()
    random.seed(0)
    device = torch.device(options.device)
    if device.type == "cuda":
        name = options.shape
        if options.layers:
            SHAPES[name] |= {"num_hidden_layers": options.layers}
            name += f" with {options.layers} layers"
        model = build(options.shape, torch.device("cuda", 0), torch.bfloat16)
    else:
        model, name = load_model(options.model, quantize=options.quantize)[0], options.model
    print(f"{name}, {options.quantize or model.dtype}; {machine_line(describe_machine(model.device))}", flush=True)
    longest = model.config.max_position_embeddings - 128
    steps(model, options.rows, sorted({min(positions, longest) for positions in options.positions}))
    if options.layers:
        return
    prompts(model, [length for length in options.prompts if length <= longest])
    hit(model)
    shared(model)
    sessions(model)
    index(options.pages)


if __name__ == "__main__":
    main()
