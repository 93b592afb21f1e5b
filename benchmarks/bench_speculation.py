"""Decoding with drafts beside decoding without, in one process, alternating: the texts are compared, too.

edit       repeat a file of code with a change, at temperature 0: most of the answer is in the prompt
chat       a story, at temperature 0.8: nothing is
code       write a class, at temperature 0
code 0.8   the same at temperature 0.8
json       fields of an order, by a JSON schema, at temperature 0: the grammar forces most tokens

First, what a pass costs that verifies drafts. Then each trial is a request of its own. An `LLM` serves all trials of a
drafter: what it has learned of drafts, a server knows, too. A ratio above 1: drafts are faster. Where llama-cpp-python
is installed and the model is a GGUF file, llama.cpp runs the tasks without a schema at temperature 0, with its prompt
lookup and with the same draft model.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engines import llama_cpp_version

from infer import LLM, CacheMemory, Tokenizer, load_model
from infer.backend import Row, backend_for
from infer.engine import scheduler
from infer.loader.find import locate
from infer.models.rows import ALL

CODE = inspect.getsource(scheduler._Budget)
EDIT = "Repeat this file, but rename the class _Budget to Budget. Answer with the code only.\n\n```python\n{}```"
CHAT = "Tell me a story about a lighthouse keeper and a storm."
CLASS = "Write a Python class for a binary search tree with insert, delete, search and in-order traversal, with types."
ORDER = (
    "Extract the order as JSON: Ada Byron, 12 Green Lane, Bath, ordered three teapots at 20.50 and one kettle at 31."
)
ITEM = {"product_name": {"type": "string"}, "quantity": {"type": "integer"}, "unit_price": {"type": "number"}}
FIELDS = {
    "customer_first_name": {"type": "string"},
    "customer_last_name": {"type": "string"},
    "shipping_address": {"type": "string"},
    "ordered_items": {
        "type": "array",
        "items": {"type": "object", "properties": ITEM, "required": [*ITEM], "additionalProperties": False},
        "minItems": 2,
        "maxItems": 2,
    },
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "edit": (EDIT.format(CODE), {"temperature": 0.0}),
    "chat": (CHAT, {"temperature": 0.8, "seed": 1}),
    "code": (CLASS, {"temperature": 0.0}),
    "code 0.8": (CLASS, {"temperature": 0.8, "seed": 1}),
    "json": (ORDER, {"temperature": 0.0, "json_schema": SCHEMA}),
}
LLAMA_CPP_DRAFTS = 8  # tokens that llama.cpp verifies at once
CONTEXT = 2048
PASSES = 12


class Outcome(NamedTuple):
    speed: float  # tokens per second after the first
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


Run = Callable[[str, int], Outcome]  # of a task, with so many new tokens


def infer_run(llm: LLM) -> Run:
    def run(task: str, new_tokens: int) -> Outcome:
        text, settings = TASKS[task]
        result = llm.chat(text, max_new_tokens=new_tokens, ignore_eos="json_schema" not in settings, **settings)
        speed = result.timing.decode_tokens_per_s
        return Outcome(speed, tuple(result.token_ids), result.drafted, result.accepted)

    return run


def llama_cpp_run(path: Path, tokenizer: Tokenizer, drafts: str | None) -> Run:
    """drafts: "ngram", its prompt lookup; or the path of a draft model, which drafts greedily."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    threads = torch.get_num_threads()

    def load(path: str, **options: Any) -> Any:
        return llama_cpp.Llama(
            path, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False, **options
        )

    def drafter() -> Any:
        if drafts is None or drafts == "ngram":
            return drafts and LlamaPromptLookupDecoding(num_pred_tokens=LLAMA_CPP_DRAFTS)
        smaller = load(drafts)
        return lambda ids: np.array([*islice(smaller.generate(ids.tolist(), temp=0.0), LLAMA_CPP_DRAFTS)], ids.dtype)

    model = load(str(path), draft_model=drafter(), logits_all=drafts is not None)

    def run(task: str, new_tokens: int) -> Outcome:
        text, settings = TASKS[task]
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        tokens, times = [], []
        for token in model.generate(prompt, temp=settings["temperature"], top_k=0, top_p=1.0, min_p=0.0):
            tokens.append(token)
            times.append(time.perf_counter())
            if len(tokens) == new_tokens:
                break
        return Outcome((len(times) - 1) / (times[-1] - times[0]), tuple(tokens))

    return run


@contextmanager
def engines(name: str, draft_model: str | None, with_llama_cpp: bool) -> Iterator[dict[tuple[str, str], Run]]:
    """By engine and drafter."""
    model, tokenizer = load_model(name)[0], Tokenizer(name)
    drafters = {"-": None, "ngram": "ngram"} | ({"model": draft_model} if draft_model else {})
    runs: dict[tuple[str, str], Run] = {}
    with ExitStack() as opened:
        for label, speculate in drafters.items():
            llm = opened.enter_context(LLM(model, tokenizer, speculate=speculate, cache_memory=500 * 10**6))
            llm.generate("Hello", max_new_tokens=4, temperature=0.0)  # compiles what steps need
            runs["infer", label] = infer_run(llm)
        if with_llama_cpp:
            path = Path(locate(name, weights=True))
            for label, speculate in drafters.items():
                drafts = str(locate(speculate, weights=True)) if label == "model" and speculate else speculate
                runs["llama.cpp", label] = llama_cpp_run(path, tokenizer, drafts)
        yield runs


@torch.inference_mode()
def pass_times(model: Any) -> dict[int, float]:
    """Seconds of a pass that verifies so many drafts after 128 tokens, the fastest of PASSES, alternating."""
    backend, cache = backend_for(model), CacheMemory(model, 200 * 10**6).cache(CONTEXT)
    backend.run([Row(cache, [*range(100, 228)], ALL)])
    times: dict[int, list[float]] = {drafts: [] for drafts in (0, 1, 2, 4, 8)}
    for _ in range(PASSES):
        for drafts, found in times.items():
            began = time.perf_counter()
            backend.run([Row(cache, [*range(300, 301 + drafts)], ALL)])
            found.append(time.perf_counter() - began)
            cache.truncate(128)
    return {drafts: min(found) for drafts, found in times.items()}


def measure(runs: dict[tuple[str, str], Run], task: str, trials: int, new_tokens: int) -> list[dict[str, Any]]:
    outcomes: dict[tuple[str, str], list[Outcome]] = {key: [] for key in runs}
    for _ in range(trials):
        for key, run in runs.items():
            if key[0] == "infer" or TASKS[task][1] == {"temperature": 0.0}:
                outcomes[key].append(run(task, new_tokens))
    rows = []
    for (engine, drafter), found in outcomes.items():
        if not found:
            continue
        speed, plain = statistics.median(each.speed for each in found), outcomes[engine, "-"]
        without = statistics.median(each.speed for each in plain)
        rows.append(
            {
                "task": task,
                "engine": engine,
                "drafter": drafter,
                "tokens_per_s": speed,
                "ratio": speed / without,
                "drafted": found[-1].drafted,
                "accepted": found[-1].accepted,
                "same text": {each.tokens for each in found} == {plain[0].tokens},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b", help='"" for none')
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--new-tokens", type=int, default=250)
    parser.add_argument("--trials", type=int, default=3, help="the median counts")
    parser.add_argument("--no-llama-cpp", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures into this file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with_llama_cpp = llama_cpp_version() is not None and not args.no_llama_cpp
    passes = pass_times(load_model(args.model)[0])
    costs = ", ".join(f"{drafts}: {seconds / passes[0]:.2f}" for drafts, seconds in passes.items())
    print(f"a pass that verifies so many drafts, in passes without: {costs}")
    with engines(args.model, args.draft_model, with_llama_cpp) as runs:
        print(f"{'':<9} {'engine':<10} {'drafter':<7} {'':>11} {'ratio':>7} {'drafted':>8} {'right':>6}  texts")
        for task in args.tasks:
            for row in measure(runs, task, args.trials, args.new_tokens):
                rows.append(row)
                same = "" if row["drafter"] == "-" else "same" if row["same text"] else "DIFFERENT"
                print(
                    f"{task:<9} {row['engine']:<10} {row['drafter']:<7} {row['tokens_per_s']:>5.1f} tok/s"
                    f" {row['ratio']:>6.2f}x {row['drafted']:>8} {row['accepted']:>6}  {same}",
                    flush=True,
                )
    if args.json is not None:
        args.json.write_text(
            json.dumps({"model": args.model, "draft_model": args.draft_model, "pass_s": passes, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
