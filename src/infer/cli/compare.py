"""`infer compare`: how far two models, or one in two precisions, are apart on a text."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.common import MODEL_HELP, DeviceOption, JsonOption, Loading, ThreadsOption, read_utf8
from infer.cli.help import MODEL
from infer.cli.streams import say

QUANTIZE_HELP = "Weights of the {} model in 4 or 8 bits, on a CPU."
DTYPE_HELP = "What the {} model computes in: auto, float32, bfloat16, float16 or float64."


def compare(
    model_a: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL_A")],
    model_b: Annotated[
        str | None,
        typer.Argument(help="Another of the same vocabulary.", metavar="MODEL_B", show_default="MODEL_A"),
    ] = None,
    *,
    text: Annotated[Path, typer.Option(help="A text file, in UTF-8.")],
    quantize_a: Annotated[
        str | None, typer.Option(help=QUANTIZE_HELP.format("first"), metavar="int4|int8", rich_help_panel=MODEL)
    ] = None,
    quantize_b: Annotated[
        str | None, typer.Option(help=QUANTIZE_HELP.format("second"), metavar="int4|int8", rich_help_panel=MODEL)
    ] = None,
    dtype_a: Annotated[str, typer.Option(help=DTYPE_HELP.format("first"), rich_help_panel=MODEL)] = "auto",
    dtype_b: Annotated[str, typer.Option(help=DTYPE_HELP.format("second"), rich_help_panel=MODEL)] = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window.", show_default="1024, or all the models have")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next.", show_default="half a window")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare what two models find likely at each token of a text: KL divergence, and how often they agree."""
    from infer import ModelConfig, Tokenizer
    from infer.evaluate.compare import compare as measure
    from infer.evaluate.perplexity import plan

    second = model_b or model_a
    ways = Loading(dtype_a, device, quantize_a, threads), Loading(dtype_b, device, quantize_b, threads)
    contents = read_utf8(text)
    tokenizer, other = Tokenizer(model_a), Tokenizer(second)
    token_ids, prefix = tokenizer.encode(contents, add_special_tokens=False), tokenizer.encode("")
    if other.encode(contents, add_special_tokens=False) != token_ids:
        raise ValueError(
            "the two models split the text into different tokens: only models of one vocabulary can be compared"
        )
    for each in (model_a, second):  # before weights are read
        plan(ModelConfig.from_pretrained(each), token_ids, context=context, stride=stride, prefix=prefix)
    models = ways[0].load(model_a), ways[1].load(second)

    def show(tokens: int, so_far: float) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K  {tokens:,} tokens: {so_far:.6f} nats", end="", file=sys.stderr, flush=True)

    found = measure(*models, token_ids, context=context, stride=stride, prefix=prefix, progress=show)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if as_json:
        settings = {"quantize_a": quantize_a, "quantize_b": quantize_b, "dtype_a": dtype_a, "dtype_b": dtype_b}
        print(json.dumps({"model_a": model_a, "model_b": second, "text": str(text), **settings, **asdict(found)}))
        return
    if (model_a, quantize_a, dtype_a) == (second, quantize_b, dtype_b):
        say("note: both are the same model in the same precision; --quantize-b or --dtype-b changes the second")
    for name, value in (
        ("KL divergence", f"{found.kl_divergence:.6f} nats per token, {found.largest_kl_divergence:.4f} at most"),
        ("same likeliest token", f"{found.same_likeliest:.2%}"),
        ("perplexity of A", f"{found.perplexity:.4f}"),
        ("perplexity of B", f"{found.other_perplexity:.4f}"),
        ("tokens", f"{found.tokens:,}"),
    ):
        print(f"{name:<22} {value}")
