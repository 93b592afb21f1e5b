"""What the commands share: options, and where messages go."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from infer.engine.params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = "A folder, a .gguf file, nanoGPT's .pt file, a built-in name (see `infer models`), or a hub id."
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option(
        help="Feed the prompt in passes of at most this many tokens, say 512: a long one then takes less memory."
    ),
]
OnFullOption = Annotated[
    str,
    typer.Option(
        help="What to do beyond the model's context. error: refuse. recompute: go on with the last tokens that fit, "
        "without the cache's help.",
        metavar="error|recompute",
    ),
]
KVCacheOption = Annotated[bool, typer.Option(help="Without it every step recomputes the whole sequence.")]
PromptArgument = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")]
SystemOption = Annotated[str | None, typer.Option(help="A system message to begin with.")]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking", help="Whether a model that can think first should.", show_default="as it likes"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def say(message: str = "") -> None:
    """Everything but the answer itself goes to stderr."""
    print(message, file=sys.stderr, flush=True)


def sampling_options(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Give a command an option for each field of SamplingParams, and hand it the whole as `params`.

    defaults: other ones than the fields have.
    """
    signature = inspect.signature(command)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "params"]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        chosen = {field.name: values.pop(field.name) for field in fields(SamplingParams)}
        chosen["logit_bias"] = dict(map(parse_bias, chosen["logit_bias"]))
        command(**values, params=SamplingParams(**chosen))

    types = {"top_k": int | None, "seed": int | None, "stop": list[str], "logit_bias": list[str]}
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=[] if types.get(field.name) == list[str] else defaults.get(field.name, field.default),
            annotation=Annotated[types.get(field.name, type(field.default)), typer.Option(help=field.metadata["help"])],
        )
        for field in fields(SamplingParams)
    ]
    wrapped.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return wrapped


def parse_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias is given as ID:BIAS, like 42:-1.5, not {entry!r}") from None
