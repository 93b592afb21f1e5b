"""`infer pull`, `infer rm`, `infer models` and `infer info`: which models there are, and the memory they need."""

import json
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from infer.cli import completion
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

NAME_HELP = (
    "A name that `infer models` lists, or a hub id: owner/name or owner/name/FILE.gguf, with @revision or without."
)


def pull(
    name: Annotated[str, typer.Argument(help=NAME_HELP, metavar="NAME", autocompletion=completion.model_names)],
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it is cached.")] = False,
) -> None:
    """Fetch a model for offline use. A cached model is checked by its hash."""
    from infer.loader.find import locate

    print(locate(name, weights=True, check=True, force=force))


def rm(
    name: Annotated[str, typer.Argument(help=NAME_HELP, metavar="NAME", autocompletion=completion.cached_names)],
) -> None:
    """Remove a fetched model from the cache."""
    from infer.loader import builtin, hub
    from infer.loader.hub_names import hub_id

    if name in builtin.BUILTIN:
        freed = builtin.remove(builtin.BUILTIN[name])
    elif hub.is_hub_name(hub_id(name)) and not Path(name).exists():
        freed = hub.remove(hub_id(name))
    else:
        raise ValueError(f"no cached model {name!r}: `infer models` lists them")
    print(f"removed {name}: {freed / 1e6:.0f} MB")


class Listed(NamedTuple):
    """A model that `infer models` lists."""

    name: str
    bytes: int
    cached: bool
    license: str | None  # None: not known
    gated: bool
    source: str  # "package index" | "hub"
    model: str  # its title, or its hub id


def models(as_json: JsonOption = False) -> None:
    """List the models that have a short name, the other cached models, and the families that run by hub id."""
    listed = list_models()
    if as_json:
        print(json.dumps([model._asdict() for model in listed]))
        return
    width = max(len(each.name) for each in listed)
    print(f"{'name':<{width}} {'size':>9}  {'status':<8} {'license':<22} source")
    for each in listed:
        license = f"{each.license or ''}{' *' if each.gated else ''}"
        status = "cached" if each.cached else "-"
        size = f"{each.bytes / 1e6:,.0f} MB"
        print(f"{each.name:<{width}} {size:>9}  {status:<8} {license:<22} {each.source}: {each.model}")
    print("* gated: accept the license on the model's hub page, then run `hf auth login` or set HF_TOKEN")
    print_families()


def print_families() -> None:
    from infer.loader.families import FAMILIES

    print("\nAny other model of these families runs by its hub id, or from a folder. Compared with a reference:")
    width, weights = (max(map(len, names)) for names in (FAMILIES, [each.weights or "" for each in FAMILIES.values()]))
    print(f"{'family':<{width}} random  {'real weights':<{weights}}  GGUF  GPU  models")
    for name, family in FAMILIES.items():
        random, gguf, gpu = ("yes" if proved else "-" for proved in (family.random, family.gguf, family.gpu))
        print(f"{name:<{width}} {random:<6}  {family.weights or '-':<{weights}}  {gguf:<4}  {gpu:<3}  {family.models}")


def list_models() -> list[Listed]:
    from infer.loader.builtin import BUILTIN
    from infer.loader.hub import cached_models
    from infer.loader.hub_names import HUB_MODELS

    cached = dict(cached_models())
    listed = [Listed(m.name, m.size, m.is_cached, m.license, False, "package index", m.title) for m in BUILTIN.values()]
    for name, (repo, megabytes, license, gated) in HUB_MODELS.items():
        size = cached.pop(repo, None)
        listed.append(Listed(name, size or megabytes * 10**6, size is not None, license, gated, "hub", repo))
    return listed + [Listed(repo, size, True, None, False, "hub", repo) for repo, size in cached.items()]


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
