"""The options that commands share, in groups, and how `--help` shows them."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from infer.cli import completion
from infer.cli.sampling import SETTINGS, Settings
from infer.engine import params
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.config import ModelConfig
    from infer.models.common import Decoder

DEFAULT_MODEL = "smollm2-135m"
CACHE_DTYPES = ("auto", "int8")
SAMPLING = "Sampling"
# Sections of --help, in order, and their options; other options are in the second one.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Arguments": (),
    "Options": (),
    "Model": (
        *("model_name", "model_option", "dtype", "device", "quantize", "context", "threads", "tensor_parallel"),
        *("quantize_a", "quantize_b", "dtype_a", "dtype_b", "chat_template"),
    ),
    SAMPLING: (),  # see `sampling_options`
    "Cache": ("kv_cache", "on_full", "prefill_chunk", "cache_dtype", "cache_memory", "prefix_store", "speculate"),
    "Output": ("as_json",),
}
SECTION_OF = {option: section for section, options in SECTIONS.items() for option in options}
NAMES_WIDTH = 36  # characters of the first column; the help of a longer option begins on the next line

MODEL_HELP = "A short name (see `infer models`), a hub id, a folder, a .gguf file, or a nanoGPT .pt file."
ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP, autocompletion=completion.model_names)]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="The dtype to compute in: auto, float32, bfloat16, float16 or float64. auto is float32 on a CPU, where "
        "quantized weights of a GGUF file stay quantized; another dtype makes them floats.",
        autocompletion=completion.DTYPES,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:N, or another torch device (mps, xpu).", autocompletion=completion.DEVICES
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="auto: weights as in the file, with the quantized blocks of a GGUF file on a CPU. int4, int8: quantize to "
        "4 or 8 bits, on a CPU. `infer perplexity` measures the loss.",
        metavar="auto|int4|int8",
        show_default="auto",
        autocompletion=completion.QUANTIZE,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        help="Number of CPU threads.",
        show_default="OMP_NUM_THREADS, or the number of usable cores",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Maximum positions of a sequence. Beyond the original context of a model with LongRoPE, its long factors "
        "are used.",
        show_default="the model's context",
    ),
]
CacheDtypeOption = Annotated[
    str,
    typer.Option(
        help="The dtype of cached keys and values. auto: the model's dtype. int8: 8 bits, with a scale for every "
        "32 values.",
        metavar="auto|int8",
        autocompletion=completion.CACHE_DTYPES,
    ),
]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option(
        help="Prefill the prompt in chunks of at most this many tokens, e.g. 512. A long prompt then takes less memory."
    ),
]
OnFullOption = Annotated[
    str,
    typer.Option(
        help="What to do beyond the model's context. error: refuse. recompute: continue with the last tokens that "
        "fit, without the cache.",
        metavar="error|recompute",
        autocompletion=completion.ON_FULL,
    ),
]
SystemOption = Annotated[str | None, typer.Option(help="The system message.")]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(help="Turn reasoning on or off, if the model has it.", show_default="the model's"),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        help="The chat template: a name (chatml, llama3, mistral, gemma, phi3, ...) or a Jinja file.",
        metavar="NAME|FILE",
        show_default="the model's",
    ),
]
AllowSpecialTokensOption = Annotated[
    bool,
    typer.Option(
        "--allow-special-tokens",
        help="Encode control tokens in messages as such, instead of as text: a message can then end its turn.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    unit + "IB": 1024 ** (i + 1) for i, unit in enumerate("KMGT")
}


class Options(NamedTuple):
    """Several options for one parameter of a command, whose value `make` builds from theirs."""

    parameters: list[inspect.Parameter]
    make: Callable[..., Any]


class OptionGroup:
    """Base of dataclasses whose annotated fields are options. A command takes one as a parameter."""

    @classmethod
    def options(cls) -> Options:
        parameters = [
            keyword(field.name, field.type, inspect.Parameter.empty if field.default is MISSING else field.default)
            for field in fields(cls)  # type: ignore[arg-type]
            if hasattr(field.type, "__metadata__")
        ]
        return Options(parameters, cls)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is an OptionGroup, or annotated with Options, with its options."""
    signature = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Options] = {}
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            groups[name] = kind.options()
        elif (found := getattr(kind, "__metadata__", (None,))[0]) and isinstance(found, Options):
            groups[name] = found
        parameters += groups[name].parameters if name in groups else [parameter]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group.make(**{option.name: values.pop(option.name) for option in group.parameters})
        command(**values)

    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapped


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclass(frozen=True)
class ModelChoice(OptionGroup):
    """The model, as an argument or as an option: `infer info MODEL`, `infer info -m MODEL`."""

    model: Annotated[
        str | None,
        typer.Argument(
            help=MODEL_HELP, metavar="MODEL", show_default=DEFAULT_MODEL, autocompletion=completion.model_names
        ),
    ] = None
    model_option: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="The same as MODEL.", show_default=False, autocompletion=completion.model_names
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.model is not None and self.model_option is not None:
            raise ValueError(f"two models were given, {self.model} and -m {self.model_option}: leave one out")

    @property
    def name(self) -> str:
        return next(name for name in (self.model, self.model_option, DEFAULT_MODEL) if name is not None)


@dataclass(frozen=True)
class LoadOptions(OptionGroup):
    """How a command loads its model."""

    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    quantize: QuantizeOption = None
    threads: ThreadsOption = None
    context: ContextOption = None
    tensor_parallel: int = 1  # an option of ParallelLoadOptions

    def __post_init__(self) -> None:
        if self.quantize not in (None, "auto", "int4", "int8"):  # before a model is fetched
            raise ValueError(f"quantize must be one of auto, int4, int8, not {self.quantize!r}")

    def load(
        self, model_name: str, config: "ModelConfig | None" = None, positions: int = 0, cache_dtype: str = "auto"
    ) -> "Decoder":
        """config, positions: leave memory for a cache of so many positions."""
        from infer import load_model
        from infer.cache.base import resolve_cache_dtype
        from infer.loader.describe import cache_bytes
        from infer.loader.load import resolve_weight_dtype
        from infer.machine import reserved, resolve_device, use_threads

        if self.threads is not None:
            use_threads(self.threads)
        needed = 0
        if config is not None:
            dtype = resolve_weight_dtype(self.dtype, resolve_device(self.device), self.quantize)
            positions = min(positions, config.max_position_embeddings)
            needed = cache_bytes(config, positions, resolve_cache_dtype(cache_dtype, dtype))
        options: dict[str, Any] = {name: getattr(self, name) for name in ("dtype", "device", "quantize", "context")}
        with reserved(needed // self.tensor_parallel):
            if self.tensor_parallel > 1:
                from infer.parallel.launch import load_sharded

                return load_sharded(model_name, self.tensor_parallel, **options)[0]
            return load_model(model_name, **options)[0]


@dataclass(frozen=True)
class ParallelLoadOptions(LoadOptions):
    """LoadOptions with tensor parallelism."""

    tensor_parallel: Annotated[
        int, typer.Option(help="Number of processes to split the model over; on GPUs, one GPU each.", min=1)
    ] = 1


def parse_folder(text: str) -> Path:
    """`Path` would take an empty name, e.g. of an unset variable, for the current folder."""
    if not str(text):
        raise typer.BadParameter("the name of the folder is empty")
    return Path(text)


@dataclass(frozen=True)
class PrefixCacheOptions(OptionGroup):
    """The KV caches of a command: pages that sequences share."""

    prefill_chunk: PrefillChunkOption = None
    cache_dtype: CacheDtypeOption = "auto"
    cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for all caches, in pages that conversations share: 800MB, 2GB.",
            metavar="SIZE",
            show_default="half of the free memory",
        ),
    ] = None
    prefix_store: Annotated[
        Path | None,
        typer.Option(
            parser=parse_folder,
            help="A folder to keep the cache of long prompts in. Prompts with the same prefix are not prefilled "
            "again, even after a restart.",
            metavar="DIR",
            show_default="none",
        ),
    ] = None
    speculate: Annotated[
        str | None,
        typer.Option(
            help="Draft tokens and verify several at once; the text stays the same. ngram: from earlier parts of the "
            "text, faster where it repeats itself or the prompt; ngram-shared: from other outputs, too; or a smaller "
            "model with the same vocabulary.",
            metavar="NAME",
            show_default="none",
        ),
    ] = None

    @property
    def memory_bytes(self) -> int | None:
        return parse_size(self.cache_memory)

    @property
    def is_paged(self) -> bool:
        """Whether a single sequence needs a paged cache, too."""
        return self.cache_memory is not None or self.prefix_store is not None

    def check(self, kv_cache: bool = True) -> None:
        """Refuse impossible options before a model is fetched."""
        from infer.engine.params import check_prefill_chunk

        if self.speculate is not None and not kv_cache:
            raise ValueError("--speculate needs the cache: leave --no-kv-cache out")
        if self.prefill_chunk is not None and not kv_cache:
            raise ValueError("--prefill-chunk needs the cache: leave --no-kv-cache out")
        check_prefill_chunk(self.prefill_chunk)
        check_cache_dtype(self.cache_dtype, kv_cache)
        parse_size(self.cache_memory)
        if self.is_paged and not kv_cache:
            raise ValueError("--cache-memory and --prefix-store need the cache: leave --no-kv-cache out")
        if self.prefix_store is not None:
            from infer.engine.store import PrefixStore

            PrefixStore(self.prefix_store)  # raises if the folder cannot be used

    def for_llm(self) -> dict[str, Any]:
        """As arguments of `LLM`."""
        return {
            "cache_memory": self.memory_bytes,
            "cache_dtype": self.cache_dtype,
            "prefix_store": self.prefix_store,
            "prefill_chunk": self.prefill_chunk,
            "speculate": self.speculate,
        }


def check_cache_dtype(cache_dtype: str, kv_cache: bool = True) -> None:
    if cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"--cache-dtype must be {' or '.join(CACHE_DTYPES)}, not {cache_dtype!r}")
    if cache_dtype != "auto" and not kv_cache:
        raise ValueError(f"--cache-dtype {cache_dtype} needs the cache: leave --no-kv-cache out")


def parse_size(size: str | None) -> int | None:
    """Bytes, from 800MB or 2.5GB."""
    if size is None:
        return None
    number = size.strip().upper().rstrip("BIKMGT")
    unit = size.strip().upper()[len(number) :]
    try:
        count = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"--cache-memory must be a size like 800MB or 2GB, not {size!r}") from None
    if count < 1:
        raise ValueError(f"--cache-memory must be at least 1 byte, not {size!r}")
    return count


def read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def sampling_options(
    *, all_settings: bool = False, fallbacks: Mapping[str, float] | None = None, **defaults: Any
) -> Options:
    """An option for each field of SamplingParams.

    all_settings: include the settings that only `infer generate` has. fallbacks: values for settings that the model's
    files do not give; the options then make `Settings`. defaults: replace those of SamplingParams.
    """
    options = []
    for name, setting in params.SETTINGS.items():
        if not (all_settings or setting.every_command):
            continue
        kind = setting.option or setting.kind
        default = [] if kind == list[str] else defaults.get(name, setting.default)
        shown: bool | str = True
        if fallbacks is not None and name in SETTINGS:
            otherwise = fallbacks.get(name, default)
            shown = f"the model's, or {'off' if otherwise is None else otherwise}"
            default = None
        option = typer.Option(
            *((f"--{name.replace('_', '-')}", setting.short) if setting.short else ()),
            help=setting.help,
            metavar="FILE" if kind is Path else None,
            show_default=shown,
            rich_help_panel=SAMPLING,
        )
        options.append(keyword(name, Annotated[kind | None if default is None else kind, option], default))

    def make(logit_bias: list[str], **values: Any) -> SamplingParams | Settings:
        files = {name: read_utf8(value) for name, value in values.items() if isinstance(value, Path)}
        values = {name: value for name, value in (values | files).items() if value is not None}
        chosen = SamplingParams(logit_bias=dict(map(parse_bias, logit_bias)), **values)
        given = {name: f"--{name.replace('_', '-')}" for name in SETTINGS if name in values}
        return chosen if fallbacks is None else Settings(chosen, given)

    return Options(options, make)


def parse_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias is given as ID:BIAS, like 42:-1.5, not {entry!r}") from None


class _PlainFlags:
    """typer's own flags default to None; converting None to bool makes typer import pydantic: 0.15 s."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.name in ("help", "install_completion", "show_completion"):
                param.default = False
        return params


class Group(_PlainFlags, TyperGroup):
    """All commands."""


class GroupedCommand(_PlainFlags, TyperCommand):
    """A command whose --help has sections, each in two columns that fit 80 characters."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """For the list of commands, which wraps it: the first paragraph, uncut."""
        return " ".join((self.help or "").split("\n\n")[0].split())

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                names, text = record
                text = re.sub(r"\[default: \((.*?)\)", r"[default: \1", text)  # typer's parentheses around words
                usual = "Arguments" if param.param_type_name == "argument" else SECTION_OF.get(param.name, "Options")
                sections[getattr(param, "rich_help_panel", None) or usual].append((names, text))
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=NAMES_WIDTH)
