"""What the commands share: their options."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.help import CACHE, MODEL, OUTPUT, SAMPLING
from infer.cli.sampling import SETTINGS, Asked
from infer.engine.params import CONSTRAINTS, SamplingParams

if TYPE_CHECKING:
    from infer.config import ModelConfig
    from infer.models.common import Decoder

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = "A folder, a .gguf file, nanoGPT's .pt file, a built-in name (see `infer models`), or a hub id."
ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP, rich_help_panel=MODEL)]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="What it computes in: auto, float32, bfloat16, float16 or float64. auto: float32 on a CPU.",
        rich_help_panel=MODEL,
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:N, or another of torch's (mps, xpu).", rich_help_panel=MODEL)
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="Keep the weights in 4 or 8 bits, on a CPU: less to read for each token. See `infer perplexity`.",
        metavar="int4|int8",
        show_default="none",
        rich_help_panel=MODEL,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        help="Threads to compute on, on a CPU.",
        show_default="OMP_NUM_THREADS, or as many as there are cores for it",
        rich_help_panel=MODEL,
    ),
]
TensorParallelOption = Annotated[
    int,
    typer.Option(
        help="Number of processes to split the model over; on GPUs, one GPU each.",
        min=1,
        rich_help_panel=MODEL,
    ),
]
SHORT = {"max_new_tokens": ("--max-new-tokens", "-n")}  # names of options that have a short form
CACHE_DTYPES = ("auto", "int8")
CacheDtypeOption = Annotated[
    str,
    typer.Option(
        help="What the cache keeps keys and values in. auto: the model's dtype. int8: 8 bits, and a scale for every "
        "32 values.",
        metavar="auto|int8",
        rich_help_panel=CACHE,
    ),
]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option(
        help="Feed the prompt in passes of at most this many tokens, say 512: a long one then takes less memory.",
        rich_help_panel=CACHE,
    ),
]
OnFullOption = Annotated[
    str,
    typer.Option(
        help="What to do beyond the model's context. error: refuse. recompute: go on with the last tokens that fit, "
        "without the cache's help.",
        metavar="error|recompute",
        rich_help_panel=CACHE,
    ),
]
CacheMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for all caches, in pages that conversations share: 800MB, 2GB.",
        metavar="SIZE",
        show_default="half of what is free",
        rich_help_panel=CACHE,
    ),
]
PrefixStoreOption = Annotated[
    Path | None,
    typer.Option(
        help="A folder that keeps the cache of long prompts: one that begins alike is not prefilled again, "
        "also after a restart.",
        metavar="DIR",
        show_default="none",
        rich_help_panel=CACHE,
    ),
]
KVCacheOption = Annotated[
    bool, typer.Option(help="Without it every step recomputes the whole sequence.", rich_help_panel=CACHE)
]
PromptArgument = Annotated[
    str | None, typer.Argument(help="The prompt; standard input if there is none, or -.", show_default=False)
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")]
SystemOption = Annotated[str | None, typer.Option(help="A system message to begin with.")]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking", help="Whether a model that can think first should.", show_default="as it likes"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.", rich_help_panel=OUTPUT)]


def read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None


def check_cache_dtype(cache_dtype: str, kv_cache: bool = True) -> None:
    if cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"--cache-dtype must be {' or '.join(CACHE_DTYPES)}, not {cache_dtype!r}")
    if cache_dtype != "auto" and not kv_cache:
        raise ValueError(f"--cache-dtype {cache_dtype} needs the cache: leave --no-kv-cache out")


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    unit + "IB": 1024 ** (i + 1) for i, unit in enumerate("KMGT")
}


def parse_size(size: str | None) -> int | None:
    """Bytes, from 800MB or 2.5GB."""
    if size is None:
        return None
    number = size.strip().upper().rstrip("BIKMGT")
    unit = size.strip().upper()[len(number) :]
    try:
        count = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"--cache-memory is a size like 800MB or 2GB, not {size!r}") from None
    if count < 1:
        raise ValueError(f"--cache-memory must be more than nothing, not {size!r}")
    return count


@dataclass(frozen=True)
class Loading:
    """How a command loads its model. Each field is an option."""

    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    quantize: QuantizeOption = None
    threads: ThreadsOption = None
    tensor_parallel: TensorParallelOption = 1

    def __post_init__(self) -> None:
        if self.quantize not in (None, "int4", "int8"):  # before a model is fetched
            raise ValueError(f"quantize must be one of int4, int8, or left out, not {self.quantize!r}")

    def load(
        self, model: str, config: "ModelConfig | None" = None, positions: int = 0, cache_dtype: str = "auto"
    ) -> "Decoder":
        """config, positions: of a cache to come, for which there must be memory beside the weights."""
        from infer import load_model
        from infer.cache.base import resolve_cache_dtype
        from infer.loader.describe import cache_bytes
        from infer.loader.widths import resolve_weights
        from infer.machine import reserved, resolve_device, use_threads

        if self.threads is not None:
            use_threads(self.threads)
        needed = 0
        if config is not None:
            dtype = resolve_weights(self.dtype, resolve_device(self.device), self.quantize)
            positions = min(positions, config.max_position_embeddings)
            needed = cache_bytes(config, positions, resolve_cache_dtype(cache_dtype, dtype))
        with reserved(needed // self.tensor_parallel):
            if self.tensor_parallel > 1:
                from infer.parallel.processes import load_split

                count, kept = self.tensor_parallel, self.quantize
                return load_split(model, count, dtype=self.dtype, device=self.device, quantize=kept)[0]
            return load_model(model, dtype=self.dtype, device=self.device, quantize=self.quantize)[0]


def loading_options(command: Callable[..., None], *, split: bool = False) -> Callable[..., None]:
    """Give a command an option for each field of Loading, and hand it the whole as `loading`.

    split: also for those of several processes.
    """
    chosen = [field for field in fields(Loading) if split or field.name != "tensor_parallel"]
    options = [keyword(field.name, field.type, field.default) for field in chosen]
    return replaced("loading", command, options, Loading)


def sampling_options(
    command: Callable[..., None], *, and_more: bool = False, usual: Mapping[str, float] | None = None, **defaults: Any
) -> Callable[..., None]:
    """Give a command an option for each field of SamplingParams, and hand it the whole as `params`.

    and_more: also for those that ask for more than a text. usual: the model's own files may say how to sample,
    and these are the settings if they do not; such a command is handed an `Asked`. defaults: other ones than the fields
    have.
    """
    more = {"n", "logprobs", "prompt_logprobs", *CONSTRAINTS}
    types: dict[str, Any] = {
        "top_k": int | None,
        "seed": int | None,
        "stop": list[str],
        "logit_bias": list[str],
        "logprobs": int | None,
        "prompt_logprobs": int | None,
        "json_schema": Path | None,
        "regex": str | None,
        "grammar": Path | None,
    }
    options = []
    for field in fields(SamplingParams):
        if field.name in more and not and_more:
            continue
        kind = types.get(field.name, type(field.default))
        default = [] if kind == list[str] else defaults.get(field.name, field.default)
        shown: bool | str = True
        if usual is not None and field.name in SETTINGS:
            otherwise = usual.get(field.name, default)
            shown = f"the model's own, or {'off' if otherwise is None else otherwise}"
            kind, default = kind | None, None
        option = typer.Option(
            *SHORT.get(field.name, ()),
            help=field.metadata["help"],
            metavar="FILE" if kind == Path | None else None,
            show_default=shown,
            rich_help_panel=SAMPLING,
        )
        options.append(keyword(field.name, Annotated[kind, option], default))

    def make(logit_bias: list[str], **values: Any) -> SamplingParams | Asked:
        files = {name: read_utf8(value) for name, value in values.items() if isinstance(value, Path)}
        values = {name: value for name, value in (values | files).items() if value is not None}
        params = SamplingParams(logit_bias=dict(map(parse_bias, logit_bias)), **values)
        return params if usual is None else Asked(params, frozenset(values.keys() & SETTINGS))

    return replaced("params", command, options, make)


def model_option(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its model either way: `infer info MODEL`, or `infer info -m MODEL`."""
    default = inspect.signature(command).parameters["model"].default
    shown = default if isinstance(default, str) else False
    argument = typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=shown)
    option = typer.Option("--model", "-m", help="The same as MODEL.", show_default=False, rich_help_panel=MODEL)
    options = [
        keyword("model", Annotated[str | None, argument], None),
        keyword("named", Annotated[str | None, option], None),
    ]

    def make(model: str | None, named: str | None) -> str:
        if model is not None and named is not None:
            raise ValueError(f"two models were given, {model} and -m {named}: leave one out")
        return next(name for name in (model, named, default) if name is not None)

    return replaced("model", command, options, make)


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def replaced(
    name: str, command: Callable[..., None], options: list[inspect.Parameter], make: Callable[..., Any]
) -> Callable[..., None]:
    """The command with options in place of its parameter of that name, which is made of them."""
    signature = inspect.signature(command)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != name]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        chosen = {option.name: values.pop(option.name) for option in options}
        command(**values, **{name: make(**chosen)})

    wrapped.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return wrapped


def parse_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias is given as ID:BIAS, like 42:-1.5, not {entry!r}") from None
