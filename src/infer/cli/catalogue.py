"""`infer pull`, `infer rm`, `infer models` and `infer info`: which models there are, and the memory they need."""

import json
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.common import (
    CacheDtypeOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelChoice,
    QuantizeOption,
    check_cache_dtype,
)
from infer.cli.streams import print_table

NAME_HELP = "A built-in name, or a hub id: owner/name or owner/name/FILE.gguf, optionally with @revision."
NameArgument = Annotated[str, typer.Argument(help=NAME_HELP, metavar="NAME")]


def pull(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it is cached.")] = False,
) -> None:
    """Fetch a model for offline use. A cached model is checked by its hash."""
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
    """List the built-in and the cached models."""
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


def info(
    *,
    chosen: ModelChoice,
    context: Annotated[
        int | None, typer.Option(help="Positions of the cache.", show_default="the model's context")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    cache_dtype: CacheDtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show a model's architecture and the memory it needs, without allocating anything."""
    from infer.loader.describe import describe, lines

    check_cache_dtype(cache_dtype)
    facts = describe(chosen.name, dtype, device, context, quantize=quantize, cache_dtype=cache_dtype)
    if as_json:
        print(json.dumps(facts))
        return
    print_table(*lines(facts))
