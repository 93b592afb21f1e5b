"""What of a machine each replica gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infer.deploy.options import DeployOptions


class Place(NamedTuple):
    """Of one machine, for one replica."""

    threads: int
    gpus: int
    neighbours: int  # replicas that share the machine's memory for caches, this one too


def placed(options: DeployOptions, nodes: Sequence[Mapping[str, Any]]) -> Place:
    """Replicas of one machine share its cores evenly, unless the options say how many threads each has."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    on_gpus = options.device.startswith("cuda")
    if options.device == "auto":
        on_gpus = any(each.get("GPU") for each in resources)
    together = math.ceil(options.most_replicas / len(resources))
    cores = int(min(each.get("CPU", 1) for each in resources))
    threads = options.threads or max(options.tensor_parallel, cores // together)
    if threads > cores:
        raise ValueError(f"threads is {threads}, but a machine of this cluster has {cores} CPUs for Ray")
    return Place(threads, options.tensor_parallel if on_gpus else 0, 1 if on_gpus else together)
