"""A replica: an engine with the server's application around it, without a socket."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client.metrics_core import Metric
from starlette.types import Message

from infer.deploy.channel import Connection, Connections, ForwardedRequest, is_last
from infer.deploy.options import DeployOptions
from infer.engine.engine import EngineFailed
from infer.engine.llm import LLM
from infer.loader.tokenizer import Tokenizer
from infer.machine import available_memory, reserved, resolve_device, use_threads
from infer.server.app import make_app
from infer.server.service import Service, Settings
from infer.server.wire import ANSWER


def settings_of(options: DeployOptions) -> Settings:
    """For ingresses and replicas: an ingress checks keys and origins first, and replicas share prefixes by key."""
    return Settings(
        options.model_id,
        api_keys=options.api_keys,
        share_prefixes=options.share_prefixes,
        cors=options.cors,
        hosts=options.hosts,
        max_waiting=options.max_waiting,
        drain_seconds=options.drain_seconds,
        log_prompts=options.log_prompts,
    )


class Replica:
    def __init__(self, options: DeployOptions, threads: int, neighbors: int) -> None:
        """threads: on a CPU. neighbors: replicas that share the machine's memory, including this one."""
        use_threads(threads)
        free = available_memory(resolve_device(options.device)) or 0

        def engine() -> LLM:
            with reserved(free - free // neighbors):
                return LLM(
                    options.model,
                    Tokenizer(
                        options.model,
                        chat_template=options.chat_template,
                        allow_special_tokens=options.allow_special_tokens,
                    ),
                    dtype=options.dtype,
                    device=options.device,
                    quantize=options.quantize,
                    context=options.context,
                    tensor_parallel=options.tensor_parallel,
                    cache_memory=options.cache_memory,
                    cache_dtype=options.cache_dtype,
                    prefix_store=options.prefix_store,
                    max_rows=options.max_rows,
                    prefill_chunk=options.prefill_chunk,
                    speculate=options.speculate,
                )

        self._service = Service(engine, settings_of(options))
        self._service.warm_up()
        self._app, self._connections = make_app(self._service), Connections()

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if self._service.failure is not None:
            raise EngineFailed("the engine has failed") from self._service.failure

    def metrics(self) -> list[Metric]:
        return list(self._service.metrics.registry.collect())

    async def __call__(self, request: ForwardedRequest) -> None:
        """Respond on the connection to the ingress.

        Nothing is sent before the first token: until then another replica can still take the request over.
        """
        self.check_health()
        exchange = _Exchange(request, await self._connections.to(request.reply_to))
        with suppress(Exception):  # the application has logged it, and sent an error if it could
            await self._app(exchange.scope, exchange.receive, exchange.send)
        if not exchange.sent:
            self.check_health()
        exchange.flush()
        if not exchange.complete:
            raise RuntimeError("the response is incomplete")


class _Exchange:
    """The application's ASGI channels: hands it a request, and sends its response to the ingress."""

    def __init__(self, request: ForwardedRequest, connection: Connection) -> None:
        self.scope, self.sent, self.complete = request.scope(), False, False
        self._connection, self._key, self._body = connection, request.reply_to.key, [request.body]
        self._held: list[Message] = []

    async def receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await asyncio.shield(self._connection.lost)  # a client that disconnects cancels the call
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._held.append(message)
        answer = self.scope.get(ANSWER)
        if self.sent or (answer is not None and answer.handle is not None and answer.handle.started):
            self.flush()

    def flush(self) -> None:
        self.sent = True
        for message in self._held:
            self._connection.send(self._key, message)
            self.complete = self.complete or is_last(message)
        self._held.clear()
