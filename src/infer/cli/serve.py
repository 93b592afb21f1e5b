"""`infer serve` and `infer deploy`: the OpenAI-compatible API of a model, from one engine or from several replicas."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from infer.cli.common import (
    AllowSpecialTokensOption,
    ChatTemplateOption,
    LoadOptions,
    ModelChoice,
    OptionGroup,
    ParallelLoadOptions,
    PrefixCacheOptions,
)
from infer.cli.streams import counted, say
from infer.version import install

CONVERSATION_LENGTH = 4096  # tokens, to estimate how many conversations fit into memory


@dataclass(frozen=True)
class ServerOptions(OptionGroup):
    """Address, authentication and limits."""

    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one.", min=0, max=65535, envvar="INFER_PORT")] = 8000
    name: Annotated[str | None, typer.Option(help="The model name for clients.", show_default="the model's")] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Require this API key; may be repeated. INFER_API_KEY may hold keys, too."),
    ] = None
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one API key per line.", metavar="FILE")] = None
    cors: Annotated[
        list[str] | None, typer.Option(help="Allow requests from pages of this origin; may be repeated. * allows all.")
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Also accept this Host header, e.g. a proxy's; may be repeated.", metavar="NAME"),
    ] = None
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="Share cached prompts between API keys. A client can then find out what others have sent.",
        ),
    ] = False
    chat_template: ChatTemplateOption = None
    allow_special_tokens: AllowSpecialTokensOption = False
    max_waiting: Annotated[
        int, typer.Option(help="Maximum number of waiting sequences; more are refused with 429.", min=0)
    ] = 512
    drain_seconds: Annotated[float, typer.Option(help="Time for running requests to finish after SIGTERM.", min=1)] = (
        30.0
    )
    log_prompts: Annotated[bool, typer.Option(help="Log prompts to standard error.")] = False

    def settings(self, hosts: tuple[str, ...] | None) -> dict[str, Any]:
        """The settings that `serve` and `deploy` share."""
        return {
            "api_keys": read_keys(self.api_key or [], self.api_key_file, os.environ.get("INFER_API_KEY", "")),
            "share_prefixes": self.share_prefixes,
            "cors": tuple(self.cors or ()),
            "hosts": hosts,
            "max_waiting": self.max_waiting,
            "drain_seconds": self.drain_seconds,
            "log_prompts": self.log_prompts,
        }

    def url(self, port: int) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"


def serve(
    *,
    chosen: ModelChoice,
    server: ServerOptions,
    max_rows: Annotated[
        int | None, typer.Option(help="Maximum number of sequences in a batch.", show_default="256", min=1)
    ] = None,
    restart_engine: Annotated[bool, typer.Option(help="Restart the engine on failure instead of exiting.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send a span for each request to this URL, e.g. http://HOST:4318/v1/traces.", metavar="URL"),
    ] = None,
    caches: PrefixCacheOptions,
    load: ParallelLoadOptions,
) -> None:
    """Serve a model to OpenAI clients, with a page that shows the engine at work. Ctrl-C stops it."""
    from infer import LLM, ModelConfig, Tokenizer  # first: the import of torch is shown on the status line

    try:
        from infer.server.run import Server, allowed_hosts, listen
        from infer.server.service import Service, Settings
        from infer.server.telemetry import exporting
    except ImportError as error:
        raise ImportError(f"{error}: the server needs more packages: {install('server')}") from None

    caches.check()
    # A port in use or a missing package is reported before the weights are read.
    with listen(server.host, server.port) as listening, exporting(otlp_traces_endpoint) as tracer:
        settings = Settings(
            model_id=server.name or chosen.name.rstrip("/").rsplit("/")[-1],
            **server.settings(allowed_hosts(listening, server.host, server.allowed_host or ())),
        )
        tokenizer = Tokenizer(
            chosen.name, chat_template=server.chat_template, allow_special_tokens=server.allow_special_tokens
        )
        config = ModelConfig.from_pretrained(chosen.name, load.context)
        model = load.load(chosen.name, config, CONVERSATION_LENGTH, caches.cache_dtype)

        def engine() -> LLM:
            nonlocal model
            if model.group is not None and model.group.failure is not None:  # load it in other processes
                model.group.close()
                for weight in (*model.parameters(), *model.buffers()):
                    weight.data = weight.new_empty(0)  # memory may not hold two shards
                model = load.load(chosen.name, config, CONVERSATION_LENGTH, caches.cache_dtype)
            return LLM(model, tokenizer, max_rows=max_rows, **caches.for_llm())

        with Service(engine, settings, restarts=restart_engine, tracer=tracer) as service:
            service.warm_up()
            url = server.url(listening.getsockname()[1])
            length = min(CONVERSATION_LENGTH, service.max_model_len)
            fitting = counted(service.llm.memory.max_sequences(length), "conversation")
            say(
                f"{settings.model_id} at {url}/v1: room for {fitting} of {length:,} tokens. "
                f"Open {url} in a browser, or try: curl {url}/v1/models"
            )
            raise typer.Exit(Server(service).run_on(listening))


def deploy(
    *,
    chosen: ModelChoice,
    replicas: Annotated[int, typer.Option(help="Number of engines, each with its own devices.", min=1)] = 2,
    max_replicas: Annotated[
        int | None, typer.Option(help="Start more replicas while many requests wait, up to this number.", min=1)
    ] = None,
    target_requests: Annotated[
        int, typer.Option(help="Start another replica above this many requests per replica.", min=1)
    ] = 16,
    tensor_parallel: Annotated[int, typer.Option(help="Number of devices per replica.", min=1)] = 1,
    server: ServerOptions,
    max_rows: Annotated[int, typer.Option(help="Maximum number of sequences in a batch of a replica.", min=1)] = 256,
    prefix_routing: Annotated[
        bool, typer.Option(help="Send a prompt to the replica that has most of it cached, unless that is too busy.")
    ] = True,
    caches: PrefixCacheOptions,
    load: LoadOptions,
) -> None:
    """Serve a model from several replicas, on this machine or on the Ray cluster at RAY_ADDRESS. Ctrl-C stops it.

    Threads and cache memory are per replica; by default the replicas of a machine share its cores and memory.
    """
    try:
        from importlib.util import find_spec

        from pydantic import ValidationError

        from infer.deploy.options import DeployOptions
        from infer.deploy.run import deployed, signalled
        from infer.server.run import allowed_hosts, listen
    except ImportError as error:
        raise ImportError(f"{error}: replicas need more packages: {install('ray')}") from None
    if find_spec("ray") is None:
        raise ImportError(f"replicas need Ray: {install('ray')}")
    from infer import ModelConfig, Tokenizer
    from infer.machine import resolve_device
    from infer.models.sharding import check_world_size

    caches.check()
    with listen(server.host, server.port) as listening:  # a port in use is reported before anything is started
        port = listening.getsockname()[1]
        settings = server.settings(allowed_hosts(listening, server.host, server.allowed_host or ()))
    store = caches.prefix_store
    try:
        options = DeployOptions.model_validate(
            {
                **settings,
                **caches.for_llm(),
                "model": absolute(chosen.name),
                "chat_template": server.chat_template and absolute(server.chat_template),
                "name": server.name,
                "allow_special_tokens": server.allow_special_tokens,
                "replicas": replicas,
                "max_replicas": max_replicas,
                "target_requests": target_requests,
                "tensor_parallel": tensor_parallel,
                "threads": load.threads,
                "prefix_routing": prefix_routing,
                "dtype": load.dtype,
                "device": load.device,
                "quantize": load.quantize,
                "context": load.context,
                "prefix_store": None if store is None else str(store.absolute()),
                "max_rows": max_rows,
                "host": server.host,
                "port": port,
            }
        )
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    # A model that cannot be loaded is reported here, once for all replicas.
    Tokenizer(chosen.name, chat_template=server.chat_template)
    check_world_size(ModelConfig.from_pretrained(chosen.name, load.context), tensor_parallel)
    if not os.environ.get("RAY_ADDRESS"):
        resolve_device(load.device)
    with deployed(options), signalled() as stopped:
        url = server.url(port)
        say(f"{options.model_id} at {url}/v1, from {counted(replicas, 'replica')}: curl {url}/v1/models")
        stopped.wait()


def absolute(name: str) -> str:
    """Of a path, for replicas, which run in other folders."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def read_keys(given: list[str], file: Path | None, variable: str) -> frozenset[str]:
    """All API keys; a key that no client could send is refused."""
    in_variable = variable.replace(",", " ").split()
    if variable and not in_variable:
        raise ValueError("INFER_API_KEY holds no key: unset it to serve without keys")
    keys = [*given, *in_variable]
    if file is not None:
        keys += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not keys:
            raise ValueError(f"{file.name} holds no key")
    for key in keys:
        if not (key.isascii() and key.isprintable()) or not key or key != key.strip() or " " in key:
            raise ValueError("a key must be printable ASCII without spaces")
    return frozenset(keys)
