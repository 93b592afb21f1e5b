"""A replica: an engine and the server's own API around it, without a socket."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client.metrics_core import Metric
from starlette.types import Message

from infer.deploy.channel import Line, Lines
from infer.deploy.forward import ForwardedRequest
from infer.deploy.options import DeployOptions
from infer.engine.llm import LLM
from infer.engine.loop import EngineFailed
from infer.machine import available_memory, reserved, resolve_device, use_threads
from infer.server.answers import HANDLE
from infer.server.app import make_app
from infer.server.service import Service
from infer.server.settings import Settings


class Engine:
    def __init__(self, options: DeployOptions, threads: int, neighbours: int) -> None:
        """threads: to compute on, on a CPU. neighbours: replicas that share the machine's memory, this one too."""
        use_threads(threads)
        free = available_memory(resolve_device(options.device)) or 0

        def engine() -> LLM:
            with reserved(free - free // neighbours):
                return LLM(
                    options.model,
                    dtype=options.dtype,
                    device=options.device,
                    quantize=options.quantize,
                    tensor_parallel=options.tensor_parallel,
                    cache_memory=options.cache_memory,
                    cache_dtype=options.cache_dtype,
                    prefix_store=options.prefix_store,
                    max_rows=options.max_rows,
                    prefill_chunk=options.prefill_chunk,
                )

        # Who may ask is the ingress's business.
        settings = Settings(options.model_id, max_waiting=options.max_waiting, log_prompts=options.log_prompts)
        self._service = Service(engine, settings)
        self._service.warm_up()
        self._app, self._lines = make_app(self._service), Lines()

    def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        if self._service.failure is not None:
            raise EngineFailed("the engine has failed") from self._service.failure

    def metrics(self) -> list[Metric]:
        return list(self._service.metrics.registry.collect())

    async def __call__(self, request: ForwardedRequest) -> None:
        """Answer by the channel.

        Nothing is told before there is text: until then another replica can still answer in this one's place.
        """
        self.check_health()
        exchange = _Exchange(request, await self._lines.to(request.reply_to))
        with suppress(Exception):  # the application has logged it, and told of it as far as it could
            await self._app(exchange.scope, exchange.receive, exchange.send)
        if not exchange.told:
            self.check_health()
        exchange.tell()
        if not exchange.complete:
            raise RuntimeError("the answer has no end")


class _Exchange:
    """The other side of the application: hands it a request, and its answer on."""

    def __init__(self, request: ForwardedRequest, line: Line) -> None:
        self.scope, self.told, self.complete = request.scope(), False, False
        self._line, self._name, self._body = line, request.reply_to.name, [request.body]
        self._held: list[Message] = []

    async def receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await asyncio.shield(self._line.lost)  # a client that goes away cancels the call
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._held.append(message)
        handle = self.scope.get(HANDLE)
        if self.told or (handle is not None and handle.begun):
            self.tell()

    def tell(self) -> None:
        self.told = True
        for message in self._held:
            if message["type"] == "http.response.start":
                self._line.start(self._name, message["status"], list(message["headers"]))
                continue
            if body := message.get("body"):
                self._line.body(self._name, body)
            if not message.get("more_body"):
                self._line.end(self._name)
                self.complete = True
        self._held.clear()
