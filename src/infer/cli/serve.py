"""`infer serve`: the OpenAI-compatible API of a model."""

import functools
import os
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    CacheMemoryOption,
    Loading,
    PrefillChunkOption,
    PrefixStoreOption,
    check_cache_dtype,
    loading_options,
    model_option,
    parse_size,
)
from infer.cli.streams import counted, say
from infer.version import install

LENGTH = 4096  # tokens of a conversation, to tell how many fit

# Those that `infer deploy` has too.
HostOption = Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network.")]
PortOption = Annotated[int, typer.Option(help="0 is any free one.", min=0, max=65535)]
NameOption = Annotated[str | None, typer.Option(help="What clients call the model.", show_default="its own name")]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(help="Answer only who sends this key; may be repeated. INFER_API_KEY holds some too."),
]
ApiKeyFileOption = Annotated[Path | None, typer.Option(help="A file with a key on each line.", metavar="FILE")]
CorsOption = Annotated[
    list[str] | None, typer.Option(help="Let pages of this origin ask; may be repeated. * is every page.")
]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Answer those too who call the server by this name, as a proxy may; may be repeated.", metavar="NAME"
    ),
]
DrainOption = Annotated[float, typer.Option(help="On SIGTERM, how long texts may take to their end.", min=1)]
LogPromptsOption = Annotated[bool, typer.Option(help="Write prompts to standard error.")]


@model_option
@functools.partial(loading_options, split=True)
def serve(
    model: str = DEFAULT_MODEL,
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    name: NameOption = None,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFileOption = None,
    cors: CorsOption = None,
    allowed_host: AllowedHostOption = None,
    max_rows: Annotated[int | None, typer.Option(help="Texts that run at once.", show_default="256", min=1)] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Texts that may wait; further ones are refused with 429.", min=0)
    ] = 512,
    drain_seconds: DrainOption = 30.0,
    log_prompts: LogPromptsOption = False,
    restart_engine: Annotated[bool, typer.Option(help="Make the engine anew if it fails, instead of ending.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send a span of each request there, as http://HOST:4318/v1/traces.", metavar="URL"),
    ] = None,
    prefill_chunk: PrefillChunkOption = None,
    cache_dtype: CacheDtypeOption = "auto",
    cache_memory: CacheMemoryOption = None,
    prefix_store: PrefixStoreOption = None,
    loading: Loading,
) -> None:
    """Serve a model to OpenAI's clients, and a page that shows the engine at work. Ctrl-C ends it."""
    try:
        from infer.server.run import Server, listen, names
        from infer.server.service import Service
        from infer.server.settings import Settings
        from infer.server.spans import exporting
    except ImportError as error:
        raise ImportError(f"{error}: the server needs more packages: {install('server')}") from None
    from infer import LLM, ModelConfig, Tokenizer
    from infer.engine.request import check_chunk

    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype)
    size = parse_size(cache_memory)
    # A port that is taken, or a package that is missing, is found before the weights are read.
    with listen(host, port) as listening, exporting(otlp_traces_endpoint) as tracer:
        settings = Settings(
            model_id=name or model.rstrip("/").rsplit("/")[-1],
            api_keys=read_keys(api_key or [], api_key_file, os.environ.get("INFER_API_KEY", "")),
            cors=tuple(cors or ()),
            hosts=names(listening, host, allowed_host or ()),
            max_waiting=max_waiting,
            drain_seconds=drain_seconds,
            log_prompts=log_prompts,
        )
        tokenizer, config = Tokenizer(model), ModelConfig.from_pretrained(model)
        network = loading.load(model, config, LENGTH, cache_dtype)

        def engine() -> LLM:
            return LLM(
                network,
                tokenizer,
                cache_memory=size,
                cache_dtype=cache_dtype,
                prefix_store=prefix_store,
                max_rows=max_rows,
                prefill_chunk=prefill_chunk,
            )

        with Service(engine, settings, renews=restart_engine, tracer=tracer) as service:
            service.warm_up()
            at = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
            length = min(LENGTH, service.longest)
            fit = service.llm.memory.conversations(length)
            say(
                f"{settings.model_id} at {at}/v1: {counted(fit, 'conversation')} of {length:,} tokens "
                f"{'fits' if fit == 1 else 'fit'}. "
                f"Open {at} in a browser, or ask: curl {at}/v1/models"
            )
            raise typer.Exit(Server(service).run_on(listening))


def read_keys(given: list[str], file: Path | None, variable: str) -> frozenset[str]:
    """All keys, from wherever they come; one that nobody could send is refused."""
    keys = [*given, *variable.replace(",", " ").split()]
    if file is not None:
        keys += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not keys:
            raise ValueError(f"{file.name} has no key in it")
    for key in keys:
        if not (key.isascii() and key.isprintable()) or not key or key != key.strip() or " " in key:
            raise ValueError("a key must be printable ASCII, without blanks")
    return frozenset(keys)
