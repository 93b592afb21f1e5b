"""The options of a deployment, which are `args` in a Serve config too, and the resources of a replica."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from infer.engine.params import check_prefill_chunk

Positive = Annotated[int, Field(ge=1)]


class DeployOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    name: str | None = None  # the name in requests; None: the model's own
    replicas: Positive = 1
    max_replicas: int | None = None  # autoscale up to this many; None: no autoscaling
    target_requests: Positive = 16  # average per replica, above which another one is started
    tensor_parallel: Positive = 1  # devices of a replica
    threads: Positive | None = None  # of a replica on CPUs; None: an equal share of the machine's cores
    prefix_routing: bool = True
    ingresses: Positive = 1  # HTTP processes; each knows only the prompts that it has routed itself

    dtype: str = "auto"
    device: str = "auto"  # auto: GPUs if the cluster has any
    quantize: str | None = None
    context: Positive | None = None
    cache_memory: Positive | None = None  # bytes per replica; None: its share of half the free memory
    cache_dtype: str = "auto"
    prefix_store: str | None = None
    max_rows: Positive = 256  # sequences that run at once in a replica
    prefill_chunk: int | None = None
    speculate: str | None = None

    host: str = "127.0.0.1"
    port: int | None = None  # the ingress listens here, beside Serve's proxies; None: it does not
    api_keys: frozenset[str] = frozenset()  # empty: no authentication
    share_prefixes: bool = False  # between keys
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    chat_template: str | None = None  # a name or a Jinja file
    allow_special_tokens: bool = False  # in messages
    max_waiting: Annotated[int, Field(ge=0)] = 512  # requests in the queue; further ones are refused with 429
    drain_seconds: Annotated[float, Field(gt=0)] = 30.0  # for running requests to finish, when a replica stops
    log_prompts: bool = False

    @model_validator(mode="after")
    def _check(self) -> DeployOptions:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, less than replicas, {self.replicas}")
        check_prefill_chunk(self.prefill_chunk)
        return self

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def model_id(self) -> str:
        return self.name or self.model.rstrip("/").rsplit("/")[-1]


class Resources(NamedTuple):
    """Of one machine, for one replica."""

    threads: int
    gpus: int
    neighbors: int  # replicas that share the machine's memory, including this one


def resources_for(options: DeployOptions, nodes: Sequence[Mapping[str, Any]]) -> Resources:
    """Replicas of one machine share its cores evenly, unless `threads` is given. nodes: as `ray.nodes()` gives them."""
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    on_gpus = options.device.startswith("cuda")
    if options.device == "auto":
        on_gpus = any(each.get("GPU") for each in machines)
    neighbors = math.ceil(options.most_replicas / len(machines))
    cores = int(min(each.get("CPU", 1) for each in machines))
    threads = options.threads or max(options.tensor_parallel, cores // neighbors)
    if threads > cores:
        raise ValueError(f"threads is {threads}, but a machine of this cluster has {cores} CPUs for Ray")
    return Resources(threads, options.tensor_parallel if on_gpus else 0, 1 if on_gpus else neighbors)
