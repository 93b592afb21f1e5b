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
MODEL_HELP = "A folder, a .gguf file, a built-in name (see `infer models`), or a hub id."
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
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def say(message: str = "") -> None:
    """Everything but the answer itself goes to stderr."""
    print(message, file=sys.stderr, flush=True)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of SamplingParams, and hand it the whole as `params`."""
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
            default=[] if types.get(field.name) == list[str] else field.default,
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
