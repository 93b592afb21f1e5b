"""The engine behind the API, and another in its place."""

from __future__ import annotations

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from infer import LLM
from infer.backend.cpu.backend import CpuBackend
from infer.engine.engine import EngineFailed
from infer.engine.guide import _vocabularies
from infer.server.app import make_app
from infer.server.completions import CompletionAnswer
from infer.server.run import Server
from infer.server.service import Service, Settings


class TestAnotherEngine:
    def test_the_memory_of_the_first(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is given back before another is made, though a request of the first one is still there."""
        memories: list[weakref.ref[Any]] = []
        alive: list[int] = []

        def engine() -> LLM:
            alive.append(sum(memory() is not None for memory in memories))
            llm = LLM(folder, cache_memory=10**6)
            memories.append(weakref.ref(llm.memory.pool.memory.untyped_storage()))
            return llm

        with Service(engine, Settings("tiny"), restarts=True) as service:
            service.warm_up()
            with monkeypatch.context() as patch:
                patch.setattr(CpuBackend, "run", broken)
                handle = service.llm.submit("hello", max_new_tokens=4)
                with pytest.raises(EngineFailed, match="no such device") as error:
                    handle.result()
            service.restart()
            assert alive == [0, 0]
            assert service.failure is None
            assert len(service.llm.generate("hello", max_new_tokens=4, ignore_eos=True).token_ids) == 4
            assert service.to_api_error(error.value).code == "engine_failed"  # not of this one
            assert service.to_api_error(RuntimeError("other")).code == "internal_error"
            handle.abort()

    def test_one_that_cannot_be_made(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first one's failure goes on being told."""
        made = []

        def engine() -> LLM:
            if made:
                raise MemoryError("no room")
            made.append(LLM(folder, cache_memory=10**6))
            return made[0]

        with Service(engine, Settings("tiny"), restarts=True) as service:
            monkeypatch.setattr(CpuBackend, "run", broken)
            with pytest.raises(EngineFailed):
                service.warm_up()
            with pytest.raises(MemoryError):
                service.restart()
            assert service.failure is not None
            assert service.metrics.text()
            monkeypatch.setattr("infer.server.run.HEALTH_CHECK_S", 0)
            server = Server(service)
            asyncio.run(server._check_engine())
            assert server.should_exit
            assert statuses(service) == [503, 503, 503]

    def test_one_with_less_memory(self, folder: Path) -> None:
        memory = iter([10**6, 10**5])
        with Service(lambda: LLM(folder, cache_memory=next(memory)), Settings("tiny"), restarts=True) as service:
            before = service.max_model_len
            service.restart()
            assert service.max_model_len < before


def test_a_repeated_error_of_a_callback_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Though its message, which has the address of the callback's argument, differs."""
    with Service(lambda: LLM(folder, cache_memory=10**6), Settings("tiny")) as service:
        server, kept = Server(service), [object() for _ in range(3)]

        async def run() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(server._on_loop_error)
            for each in kept:
                loop.call_soon({}.__getitem__, each)
            await asyncio.sleep(0)

        asyncio.run(run())
    assert len(server._logged) == 1
    assert len(caplog.records) == 2


def test_the_vocabulary_is_made_before_the_first_grammar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the interpreter, and with it all streams, for half a second."""
    with Service(lambda: LLM(folder, cache_memory=10**6), Settings("tiny")) as service:
        service.warm_up()
        service._compiling.shutdown()  # waits
        assert service.tokenizer in _vocabularies


def test_many_tokens_are_handled_beside_the_event_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices with 1,024 biases each take a tenth of a second."""
    threads: list[threading.Thread] = []

    def watch(kind: type, name: str) -> None:
        function = getattr(kind, name)

        def watched(*args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*args, **options)

        monkeypatch.setattr(kind, name, watched)

    watch(LLM, "submit_all")
    watch(CompletionAnswer, "complete")

    async def post(service: Service, n: int) -> list[bool]:
        """Whether each of these was called by the event loop."""
        threads.clear()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service))) as client:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "n": n, "logit_bias": {"1": 1}, "echo": True}
            response = await client.post("http://localhost/v1/completions", json=body)
        assert len(response.json()["choices"]) == n
        return [thread is threading.current_thread() for thread in threads]

    with Service(lambda: LLM(folder, cache_memory=10**6), Settings("tiny")) as service:
        monkeypatch.setattr("infer.server.service.FEW_TOKENS", 10)
        assert asyncio.run(post(service, 1)) == [True, True]
        assert asyncio.run(post(service, 8)) == [False, False]


def statuses(service: Service) -> list[int]:
    async def get() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service))) as client:
            paths = ("/health/live", "/health/ready", "/health")
            return [(await client.get(f"http://localhost{path}")).status_code for path in paths]

    return asyncio.run(get())


@pytest.mark.parametrize("restarts", [False, True])
def test_liveness_and_readiness(folder: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool) -> None:
    """A server that restarts its engine, or finishes its requests, must not be killed, nor be sent requests."""
    with Service(lambda: LLM(folder, cache_memory=10**6), Settings("tiny"), restarts=restarts) as service:
        assert statuses(service) == [200, 200, 200]
        service.draining = True
        assert statuses(service) == [200, 503, 503]
        service.draining = False
        monkeypatch.setattr(CpuBackend, "run", broken)
        with pytest.raises(EngineFailed):
            service.warm_up()
        assert statuses(service) == [200 if restarts else 503, 503, 503]


def broken(backend: Any, rows: Any) -> Any:
    views = [row.cache.pool.memory[0] for row in rows]
    raise RuntimeError(f"no such device for {len(views)} rows")
