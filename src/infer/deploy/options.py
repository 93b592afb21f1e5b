"""What a deployment is made of: the arguments of `infer deploy`, and of `args` in a Serve config."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from infer.engine.request import check_chunk


class DeployOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    name: str | None = None  # what clients call the model; None: its own name
    replicas: int = Field(1, ge=1)
    max_replicas: int | None = None  # autoscale up to this many; None: their number stays
    target_requests: int = Field(16, ge=1)  # requests of a replica, on average, above which another one is started
    tensor_parallel: int = Field(1, ge=1)  # devices of a replica
    threads: int | None = Field(None, ge=1)  # of a replica on CPUs; None: the machine's cores, shared by its replicas
    prefix_routing: bool = True

    dtype: str = "auto"
    device: str = "auto"  # auto: GPUs if the cluster has any
    quantize: str | None = None
    cache_memory: int | None = Field(None, ge=1)  # bytes of a replica; None: its share of half of what is free
    cache_dtype: str = "auto"
    prefix_store: str | None = None
    max_rows: int = Field(256, ge=1)  # texts that run at once in a replica
    prefill_chunk: int | None = None

    api_keys: frozenset[str] = frozenset()  # none: everybody may ask
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    max_waiting: int = Field(512, ge=0)  # requests that wait for a replica; further ones are refused with 429
    drain_seconds: float = Field(30.0, gt=0)  # for what a replica runs to end, once it is to stop
    log_prompts: bool = False

    @model_validator(mode="after")
    def _check(self) -> DeployOptions:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, but {self.replicas} replicas are there from the start")
        check_chunk(self.prefill_chunk)
        return self

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def model_id(self) -> str:
        return self.name or self.model.rstrip("/").rsplit("/")[-1]
