"""`infer deploy`: the API of a model, from several replicas on Ray Serve."""

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
from infer.cli.serve import (
    AllowedHostOption,
    ApiKeyFileOption,
    ApiKeyOption,
    CorsOption,
    DrainOption,
    HostOption,
    LogPromptsOption,
    NameOption,
    PortOption,
    read_keys,
)
from infer.cli.streams import counted, say
from infer.version import install


@model_option
@loading_options
def deploy(
    model: str = DEFAULT_MODEL,
    *,
    replicas: Annotated[int, typer.Option(help="Engines, each with devices of its own.", min=1)] = 2,
    max_replicas: Annotated[
        int | None, typer.Option(help="Start more of them while many requests wait, up to this.", min=1)
    ] = None,
    target_requests: Annotated[
        int, typer.Option(help="Requests of a replica above which another is started.", min=1)
    ] = 16,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that a replica is spread over.", min=1)] = 1,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    name: NameOption = None,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFileOption = None,
    cors: CorsOption = None,
    allowed_host: AllowedHostOption = None,
    max_rows: Annotated[int, typer.Option(help="Texts that run at once in a replica.", min=1)] = 256,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; further ones are refused with 429.", min=0)
    ] = 512,
    drain_seconds: DrainOption = 30.0,
    log_prompts: LogPromptsOption = False,
    prefix_routing: Annotated[
        bool, typer.Option(help="Send a prompt to the replica that holds most of it, unless that is too busy.")
    ] = True,
    prefill_chunk: PrefillChunkOption = None,
    cache_dtype: CacheDtypeOption = "auto",
    cache_memory: CacheMemoryOption = None,
    prefix_store: PrefixStoreOption = None,
    loading: Loading,
) -> None:
    """Serve a model from several replicas, on this machine or on the Ray cluster at RAY_ADDRESS. Ctrl-C ends it.

    Threads and memory for caches are those of one replica; left out, the replicas of a machine share what it has.
    """
    try:
        from importlib.util import find_spec

        from pydantic import ValidationError

        from infer.deploy.options import DeployOptions
        from infer.deploy.run import deployed, signalled
        from infer.server.run import listen, names
    except ImportError as error:
        raise ImportError(f"{error}: replicas need more packages: {install('ray')}") from None
    if find_spec("ray") is None:
        raise ImportError(f"replicas need Ray: {install('ray')}")
    from infer import ModelConfig, Tokenizer
    from infer.machine import resolve_device
    from infer.models.split import check_split

    check_cache_dtype(cache_dtype)
    with listen(host, port) as listening:  # a port that is taken is found before anything is started
        port, hosts = listening.getsockname()[1], names(listening, host, allowed_host or ())
    given = {
        "model": _absolute(model),
        "name": name or model.rstrip("/").rsplit("/")[-1],
        "replicas": replicas,
        "max_replicas": max_replicas,
        "target_requests": target_requests,
        "tensor_parallel": tensor_parallel,
        "threads": loading.threads,
        "prefix_routing": prefix_routing,
        "dtype": loading.dtype,
        "device": loading.device,
        "quantize": loading.quantize,
        "cache_memory": parse_size(cache_memory),
        "cache_dtype": cache_dtype,
        "prefix_store": None if prefix_store is None else str(prefix_store.absolute()),
        "max_rows": max_rows,
        "prefill_chunk": prefill_chunk,
        "host": host,
        "port": port,
        "api_keys": read_keys(api_key or [], api_key_file, os.environ.get("INFER_API_KEY", "")),
        "cors": tuple(cors or ()),
        "hosts": hosts,
        "max_waiting": max_waiting,
        "drain_seconds": drain_seconds,
        "log_prompts": log_prompts,
    }
    try:
        options = DeployOptions.model_validate(given)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    # What cannot be loaded is found here, once for all replicas.
    Tokenizer(model)
    check_split(ModelConfig.from_pretrained(model), tensor_parallel)
    if not os.environ.get("RAY_ADDRESS"):
        resolve_device(loading.device)
    with deployed(options), signalled() as told:
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"{options.model_id} at {at}/v1, from {counted(replicas, 'replica')}: curl {at}/v1/models")
        told.wait()


def _absolute(model: str) -> str:
    """Replicas run in folders of their own."""
    return str(Path(model).absolute()) if Path(model).exists() else model
