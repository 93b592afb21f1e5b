"""`infer verify` and `infer bench`: is it the same, and what does it buy."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    ModelOption,
    PrefillChunkOption,
    say,
)


def verify(
    model: ModelArgument = DEFAULT_MODEL,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 32,
    seed: Annotated[int, typer.Option(help="For the sampled runs.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Check that the cache changes nothing: generate with every kind of cache, in chunks, in a batch, and without."""
    from infer import ModelConfig, Tokenizer, load_model
    from infer.engine.verify import check, number_of_comparisons, own_prompts, with_long_prompt
    from infer.engine.verify import verify as compare_runs

    texts: list[str] = []
    if prompts is not None:
        texts = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not texts:
            raise ValueError(f"{prompts} holds no prompts")
    tokenizer, config = Tokenizer(model), ModelConfig.from_pretrained(model)
    if prompts is None:
        own = own_prompts(config, tokenizer, max_new_tokens)
        if not own:
            raise ValueError("the model can read none of the built-in prompts: give it some of its own with --prompts")
        prompt_ids = with_long_prompt(config, list(own.values()), max_new_tokens)
        texts = [*own, *["(a text longer than the window)"] * (len(prompt_ids) - len(own))]
    else:
        prompt_ids = [tokenizer.encode(text) for text in texts]
    check(config, prompt_ids, max_new_tokens)  # before the weights are read
    if config.has_windows and max(map(len, prompt_ids)) <= (config.sliding_window or 0):
        say(f"note: no prompt is longer than the window of {config.sliding_window}: what windows forget goes untested")
    network, _ = load_model(model, dtype=dtype, device=device)
    say(f"{number_of_comparisons(config, prompt_ids)} runs to come, each compared with one without a cache")
    rows = []
    for row in compare_runs(network, tokenizer, prompt_ids, max_new_tokens, seed):
        rows.append(row)
        if not as_json:
            outcome = f"equal, {row.tokens} tokens"
            if not row.equal:
                outcome = f"DIFFERS at step {row.first_difference}; margin between the two best logits {row.margin:.2e}"
            text = json.dumps(texts[row.prompt], ensure_ascii=False)
            text = text if len(text) <= 40 else f'{text[:38]}…"'
            print(f"{row.mode:<7} {row.path:<28} {text:<42} {outcome}")
    different = sum(not row.equal for row in rows)
    if as_json:
        comparisons = [asdict(row) | {"prompt": texts[row.prompt], "equal": row.equal} for row in rows]
        print(json.dumps({"model": model, "equal": not different, "comparisons": comparisons}))
    say(f"{len(rows) - different} of {len(rows)} runs with a cache generate exactly what the run without one does")
    if different:
        sys.exit(1)


def bench(
    *,
    model: ModelOption = DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens to prefill.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    suite: Annotated[bool, typer.Option("--suite", help="Measure a short, a medium and a long setting.")] = False,
    kv_cache: Annotated[bool, typer.Option(help="Measure with the cache or without it.")] = True,
    prefill_chunk: PrefillChunkOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Measure both, and the speed-up.")] = False,
    trials: Annotated[int, typer.Option(help="Timed runs of each setting.")] = 3,
    warmup: Annotated[int, typer.Option(help="Runs before those.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw step time against position into this PNG.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write everything measured into this JSON file.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure time to the first token, decode speed and memory."""
    from infer import ModelConfig, Tokenizer, load_model
    from infer import bench as bencher

    lengths = list(bencher.SUITE.values()) if suite else [(prompt_tokens, new_tokens)]
    configs = [
        bencher.BenchConfig(prompt, new, trials, warmup, use_kv_cache, chunk)
        for prompt, new in lengths
        for use_kv_cache, chunk in ([(True, prefill_chunk), (False, None)] if compare else [(kv_cache, prefill_chunk)])
    ]
    if plot is not None:
        bencher.check_plot()
    for path in (plot, report):
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        if path is not None and path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file to write to")
    model_config = ModelConfig.from_pretrained(model)
    for config in configs:
        bencher.check(model_config, config)
    tokenizer = Tokenizer(model)
    network, _ = load_model(model, dtype=dtype, device=device)
    results = []
    for config in configs:
        cache = "with" if config.use_kv_cache else "without"
        say(f"{config.prompt_tokens} + {config.new_tokens} tokens {cache} the cache")
        results.append(bencher.run(network, tokenizer, config, progress=lambda step: say(f"  {step}")))
    machine = bencher.describe_machine(network.device)
    everything = bencher.report(results, model, machine)
    print(json.dumps(everything) if as_json else bencher.format_table(results, model, machine))
    if report is not None:
        report.write_text(json.dumps(everything, indent=1) + "\n")
    if plot is not None:
        bencher.plot(results, plot, model, machine)
