"""A replica: an engine and the server's own API around it, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from prometheus_client.metrics_core import Metric
from starlette.types import Message, Scope

from infer.deploy.forward import ForwardedRequest
from infer.deploy.options import DeployOptions
from infer.engine.llm import LLM
from infer.engine.loop import EngineFailed
from infer.machine import available_memory, reserved, resolve_device, use_threads
from infer.server.answers import HANDLE
from infer.server.app import make_app
from infer.server.service import Service
from infer.server.settings import Settings

Head = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, what there is of the body


class Engine:
    def __init__(self, options: DeployOptions, threads: int, neighbours: int) -> None:
        """threads: to compute on, on a CPU. neighbours: replicas that share the machine's memory, this one too."""
        use_threads(threads)
        free = available_memory(resolve_device(options.device)) or 0
        several = {"tensor_parallel": options.tensor_parallel} if options.tensor_parallel > 1 else {}

        def engine() -> LLM:
            with reserved(free - free // neighbours):
                return LLM(
                    options.model,
                    dtype=options.dtype,
                    device=options.device,
                    quantize=options.quantize,
                    cache_memory=options.cache_memory,
                    cache_dtype=options.cache_dtype,
                    prefix_store=options.prefix_store,
                    max_rows=options.max_rows,
                    prefill_chunk=options.prefill_chunk,
                    **several,
                )

        # Who may ask is the ingress's business.
        settings = Settings(options.model_id, max_waiting=options.max_waiting, log_prompts=options.log_prompts)
        self._service = Service(engine, settings)
        self._service.warm_up()
        self._app = make_app(self._service)

    def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        if self._service.failure is not None:
            raise EngineFailed("the engine has failed") from self._service.failure

    def metrics(self) -> list[Metric]:
        return list(self._service.metrics.registry.collect())

    async def __call__(self, request: ForwardedRequest) -> AsyncIterator[Head | bytes]:
        """The answer: first its head, with what there is of the body, then the rest, piece by piece.

        Nothing is told before there is text: until then another replica can still answer in this one's place.
        """
        scope, answer, told = request.scope(), _Answer(request.body), False
        running = asyncio.ensure_future(self._app(scope, answer.receive, answer.send))
        running.add_done_callback(lambda _: answer.news.set())
        try:
            over = False
            while not over:
                await answer.news.wait()
                answer.news.clear()
                over = running.done()
                if told and (piece := answer.taken()):
                    yield piece
                elif not told and (over or _has_begun(scope)):
                    self.check_health()
                    told = True
                    yield answer.status, answer.headers, answer.taken()
            if not answer.complete:
                raise running.exception() or RuntimeError("the answer has no end")
        finally:
            running.cancel()


def _has_begun(scope: Scope) -> bool:
    handle = scope.get(HANDLE)
    return handle is not None and handle.begun


class _Answer:
    """The other side of an ASGI application: hands it the body, and keeps what it says until that is taken."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._pieces: list[bytes] = []
        self.status, self.headers = 500, list[tuple[bytes, bytes]]()
        self.complete = False
        self.news = asyncio.Event()

    async def receive(self) -> Message:
        """A client that goes away ends the call: there is nothing to be told of it here."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        else:
            self._pieces.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        self.news.set()

    def taken(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data
