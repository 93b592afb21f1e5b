"""`infer pull`, `infer rm`, `infer models` and `infer info`: what there is, and what it will need."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    QuantizeOption,
    check_cache_dtype,
    model_option,
)

NAME_HELP = "A built-in name, or a hub id: owner/name or owner/name/FILE.gguf, with @revision if you like."
NameArgument = Annotated[str, typer.Argument(help=NAME_HELP, metavar="NAME")]


def pull(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it is there.")] = False,
) -> None:
    """Fetch a model, so that it can be used offline. One that is already there is hashed again."""
    from infer.loader.find import locate

    print(locate(name, weights=True, check=True, force=force))


def rm(name: NameArgument) -> None:
    """Remove a fetched model from the cache."""
    from infer.loader import builtin, hub

    if name in builtin.BUILTIN:
        freed = builtin.remove(builtin.BUILTIN[name])
    elif hub.is_hub_name(name) and not Path(name).exists():
        freed = hub.remove(name)
    else:
        raise ValueError(f"there is nothing called {name!r} to remove: `infer models` lists what was fetched")
    print(f"removed {name}: {freed / 1e6:.0f} MB")


def models(as_json: JsonOption = False) -> None:
    """List built-in models and what is cached."""
    from infer.loader.builtin import BUILTIN
    from infer.loader.hub import cached_models

    rows = [(m.name, m.size, m.is_cached, f"built in: {m.title}, {m.license}") for m in BUILTIN.values()]
    rows += [(name, size, True, "from the hub") for name, size in cached_models()]
    if as_json:
        keys = ("name", "bytes", "cached", "source")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
        return
    for name, size, cached, source in rows:
        print(f"{name:<24} {size / 1e6:>8.0f} MB   {'cached' if cached else 'not yet fetched':<16} {source}")


@model_option
def info(
    model: str = DEFAULT_MODEL,
    context: Annotated[
        int | None, typer.Option(help="Positions to count the cache for.", show_default="all the model has")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    cache_dtype: CacheDtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """What a model is and what it will need, before anything is allocated."""
    from infer.loader.describe import describe

    check_cache_dtype(cache_dtype)
    facts = describe(model, dtype, device, context, quantize=quantize, cache_dtype=cache_dtype)
    if as_json:
        print(json.dumps(asdict(facts)))
        return
    for name, value in facts.lines():
        print(f"{name:<22} {value}")
