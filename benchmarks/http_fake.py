"""The API in front of an engine that computes nothing: a token for every stream at a fixed rate.

Requests, handles and the driver's thread are the real ones, so what the API costs is what it costs any fast engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from infer import ModelConfig, Tokenizer
from infer.engine.driver import Driver
from infer.engine.llm import LLM
from infer.engine.loop import MAX_ROWS, Stats, Task
from infer.engine.request import Request
from infer.server.run import Server, listen
from infer.server.service import Service
from infer.server.settings import Settings


class FakeLoop:
    """In place of a `Loop`: each step gives every stream its next token, which costs nothing."""

    def __init__(self, step_s: float, vocab_size: int) -> None:
        """step_s: seconds from one step to the next, as long as there is something to do."""
        self.scheduler = SimpleNamespace(max_rows=MAX_ROWS, prefill_chunk=4096)
        self.runner = SimpleNamespace(close=lambda: None)
        self._step_s, self._vocab_size = step_s, vocab_size
        self._tasks: dict[Task, None] = {}
        self._next = 0.0
        self.passes = self.finished = self.generated = 0

    @property
    def idle(self) -> bool:
        return not self._tasks

    def check(self, request: Request) -> None:
        pass

    def submit(self, task: Task) -> None:
        if not self._tasks:
            self._next = time.perf_counter()
        self._tasks[task] = None

    def abort(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if not task.done:
                task.request.finish_reason = "interrupted"
                self._end(task)

    def step(self) -> None:
        self._next += self._step_s  # one that comes late is not waited for: the rate is kept on average
        time.sleep(max(0.0, self._next - time.perf_counter()))
        now = time.perf_counter()
        self.passes += 1
        for task in list(self._tasks):
            request = task.request
            task.take(32 + (self.passes + request.seed) % min(64, self._vocab_size - 32))
            task.times.append(now)
            self.generated += 1
            if request.finish_reason is not None:
                self._end(task)
            elif task.news is not None:
                task.news(task)

    def close(self, error: Exception | None = None) -> None:
        for task in list(self._tasks):
            task.error = error or RuntimeError("the engine was closed")
            self._end(task)

    def stats(self) -> Stats:
        running = len(self._tasks)
        return Stats(running, 0, self.finished, 0, self.passes, 1, 1, 0, 0, self.generated, 0.0)

    def _end(self, task: Task) -> None:
        del self._tasks[task]
        self.finished += 1
        task.done = True
        if task.news is not None:
            task.news(task)


class FakeLLM(LLM):
    """An `LLM` without a model."""

    def __init__(self, config: ModelConfig, tokenizer: Any, step_s: float) -> None:
        self.model: Any = SimpleNamespace(config=config)
        self.tokenizer = tokenizer
        pool = SimpleNamespace(page=1 << 20, count=1 << 20)
        self.memory: Any = SimpleNamespace(pool=pool, index=SimpleNamespace(windows=()))
        loop: Any = FakeLoop(step_s, config.vocab_size)
        self._driver = Driver(loop)
        self._finalizer = self._driver.close  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="whose tokenizer is used")
    parser.add_argument("--step", type=float, required=True, help="seconds")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    config, tokenizer = ModelConfig.from_pretrained(args.model), Tokenizer(args.model)
    settings = Settings("fake", max_waiting=10_000)
    with (
        listen("127.0.0.1", args.port) as listening,
        Service(lambda: FakeLLM(config, tokenizer, args.step), settings) as service,
    ):
        print(f"fake at http://127.0.0.1:{listening.getsockname()[1]}/v1", file=sys.stderr, flush=True)
        sys.exit(Server(service).run_on(listening))


if __name__ == "__main__":
    main()
