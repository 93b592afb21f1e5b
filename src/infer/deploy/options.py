"""What a deployment is made of: the arguments of `infer deploy`, and of `args` in a Serve config."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from infer.engine.request import check_chunk

Positive = Annotated[int, Field(ge=1)]


class DeployOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    name: str | None = None  # what clients call the model; None: its own name
    replicas: Positive = 1
    max_replicas: int | None = None  # autoscale up to this many; None: their number stays
    target_requests: Positive = 16  # of a replica, on average, above which another one is started
    tensor_parallel: Positive = 1  # devices of a replica
    threads: Positive | None = None  # of a replica on CPUs; None: the machine's cores, shared by its replicas
    prefix_routing: bool = True
    ingresses: Positive = 1  # processes that take requests; each knows only what it has routed itself

    dtype: str = "auto"
    device: str = "auto"  # auto: GPUs if the cluster has any
    quantize: str | None = None
    cache_memory: Positive | None = None  # bytes of a replica; None: its share of half of what is free
    cache_dtype: str = "auto"
    prefix_store: str | None = None
    max_rows: Positive = 256  # texts that run at once in a replica
    prefill_chunk: int | None = None

    host: str = "127.0.0.1"
    port: int | None = None  # where the ingress itself listens, beside Serve's proxies; None: nowhere
    api_keys: frozenset[str] = frozenset()  # none: everybody may ask
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    max_waiting: Annotated[int, Field(ge=0)] = 512  # requests that wait; further ones are refused with 429
    drain_seconds: Annotated[float, Field(gt=0)] = 30.0  # for what a replica runs to end, once it is to stop
    log_prompts: bool = False

    @model_validator(mode="after")
    def _check(self) -> DeployOptions:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, less than the {self.replicas} to begin with")
        check_chunk(self.prefill_chunk)
        return self

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def model_id(self) -> str:
        return self.name or self.model.rstrip("/").rsplit("/")[-1]
