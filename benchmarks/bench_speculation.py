"""Decoding with drafts beside decoding without, in one process, alternating: the texts are compared, too.

edit    repeat a file of code with a change, at temperature 0: most of the answer is in the prompt
chat    a story, at temperature 0.8: nothing is

Each trial is a request of its own, with an `LLM` that has measured nothing yet. A ratio above 1: drafts are faster.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from pathlib import Path
from typing import Any

from infer import LLM, Tokenizer, load_model
from infer.engine import scheduler
from infer.engine.result import GenerationResult

CODE = inspect.getsource(scheduler._Budget)
EDIT = "Repeat this file, but rename the class _Budget to Budget. Answer with the code only.\n\n```python\n{}```"
CHAT = "Tell me a story about a lighthouse keeper and a storm."
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "edit": (EDIT.format(CODE), {"temperature": 0.0}),
    "chat": (CHAT, {"temperature": 0.8, "seed": 1}),
}


def run(model: Any, tokenizer: Any, task: str, speculate: str | None, new_tokens: int) -> GenerationResult:
    text, settings = TASKS[task]
    with LLM(model, tokenizer, speculate=speculate, cache_memory=500 * 10**6) as llm:
        llm.generate("Hello", max_new_tokens=4, temperature=0.0)  # compiles what steps need
        result: GenerationResult = llm.chat(text, max_new_tokens=new_tokens, ignore_eos=True, **settings)
        return result


def measure(model: Any, tokenizer: Any, task: str, trials: int, new_tokens: int) -> dict[str, Any]:
    speeds: dict[str | None, list[float]] = {None: [], "ngram": []}
    texts, drafted = set(), (0, 0)
    for _ in range(trials):
        for speculate, found in speeds.items():
            result = run(model, tokenizer, task, speculate, new_tokens)
            found.append(result.timing.decode_tokens_per_s)
            texts.add(result.text)
            drafted = (result.drafted, result.accepted) if result.drafted else drafted
    without, with_drafts = (statistics.median(found) for found in speeds.values())
    return {
        "task": task,
        "without": without,
        "with": with_drafts,
        "ratio": with_drafts / without,
        "drafted": drafted[0],
        "accepted": drafted[1],
        "same texts": len(texts) == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--trials", type=int, default=3, help="the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures into this file")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)[0], Tokenizer(args.model)
    rows = []
    print(f"{'':<6} {'without':>12} {'ngram':>12} {'ratio':>7} {'drafted':>8} {'right':>6}  texts")
    for task in args.tasks:
        row = measure(model, tokenizer, task, args.trials, args.new_tokens)
        rows.append(row)
        print(
            f"{task:<6} {row['without']:>6.1f} tok/s {row['with']:>6.1f} tok/s {row['ratio']:>6.2f}x"
            f" {row['drafted']:>8} {row['accepted']:>6}  {'same' if row['same texts'] else 'DIFFERENT'}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
