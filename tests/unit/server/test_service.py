"""The engine behind the API, and another in its place."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from infer import LLM
from infer.backend.cpu.backend import CpuBackend
from infer.engine.loop import EngineFailed
from infer.server.service import Service
from infer.server.settings import Settings


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

        with Service(engine, Settings("tiny"), renews=True) as service:
            service.warm_up()
            with monkeypatch.context() as patch:
                patch.setattr(CpuBackend, "run", broken)
                handle = service.llm.submit("hello", max_new_tokens=4)
                with pytest.raises(EngineFailed, match="no such device") as error:
                    handle.result()
            service.renew()
            assert alive == [0, 0]
            assert service.failure is None
            assert len(service.llm.generate("hello", max_new_tokens=4, ignore_eos=True).token_ids) == 4
            assert service.told(error.value).code == "engine_failed"  # not of this one
            assert service.told(RuntimeError("other")).code == "internal_error"
            handle.abort()

    def test_one_that_cannot_be_made(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first one's failure goes on being told."""
        made = []

        def engine() -> LLM:
            if made:
                raise MemoryError("no room")
            made.append(LLM(folder, cache_memory=10**6))
            return made[0]

        with Service(engine, Settings("tiny"), renews=True) as service:
            monkeypatch.setattr(CpuBackend, "run", broken)
            with pytest.raises(EngineFailed):
                service.warm_up()
            with pytest.raises(MemoryError):
                service.renew()
            assert service.failure is not None
            assert service.metrics.text()


def broken(backend: Any, rows: Any) -> Any:
    views = [row.cache.pool.memory[0] for row in rows]
    raise RuntimeError(f"no such device for {len(views)} rows")
