"""The API with an engine that computes nothing: a token for every stream at a fixed rate.

Sequences, handles and the engine's thread are the real ones, so the overhead of the API is that with any fast engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence as Collection
from types import SimpleNamespace
from typing import Any

from infer import ModelConfig, Tokenizer
from infer.engine.engine import MAX_ROWS, Stats
from infer.engine.llm import LLM
from infer.engine.sequence import Sequence, Status
from infer.engine.thread import EngineThread
from infer.server.run import Server, listen
from infer.server.service import Service, Settings


class FakeEngine:
    """Replaces an `Engine`: each step appends a token to every sequence, without computation."""

    def __init__(self, step_s: float, vocab_size: int) -> None:
        """step_s: seconds from one step to the next while there are sequences."""
        self.scheduler = SimpleNamespace(max_rows=MAX_ROWS, prefill_chunk=4096)
        self.runner = SimpleNamespace(close=lambda: None)
        self._step_s, self._vocab_size = step_s, vocab_size
        self._sequences: dict[Sequence, None] = {}
        self._next = 0.0
        self.num_steps = self.num_finished = self.num_generated = 0

    @property
    def is_idle(self) -> bool:
        return not self._sequences

    def check(self, sequence: Sequence) -> None:
        pass

    def submit(self, sequence: Sequence) -> None:
        if not self._sequences:
            self._next = time.perf_counter()
        sequence.status = Status.RUNNING
        self._sequences[sequence] = None

    def abort(self, sequences: Collection[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.is_finished:
                sequence.finish_reason = "interrupted"
                self._finish(sequence)

    def step(self) -> None:
        self._next += self._step_s  # after a late step the next comes sooner: the mean rate stays the same
        time.sleep(max(0.0, self._next - time.perf_counter()))
        now = time.perf_counter()
        self.num_steps += 1
        for sequence in list(self._sequences):
            sequence.append_token(32 + (self.num_steps + sequence.seed) % min(64, self._vocab_size - 32))
            sequence.token_times.append(now)
            self.num_generated += 1
            if sequence.finish_reason is not None:
                self._finish(sequence)
            elif sequence.notify is not None:
                sequence.notify(sequence)

    def close(self, error: Exception | None = None) -> None:
        for sequence in list(self._sequences):
            sequence.error = error or RuntimeError("the engine was closed")
            self._finish(sequence)

    def stats(self) -> Stats:
        running = len(self._sequences)
        return Stats(running, 0, self.num_finished, 0, self.num_steps, 1, 1, 0, 0, 0, self.num_generated, 0.0)

    def _finish(self, sequence: Sequence) -> None:
        del self._sequences[sequence]
        self.num_finished += 1
        sequence.status = Status.FINISHED
        if sequence.notify is not None:
            sequence.notify(sequence)


class FakeLLM(LLM):
    """An `LLM` without a model."""

    def __init__(self, config: ModelConfig, tokenizer: Any, step_s: float) -> None:
        self.model: Any = SimpleNamespace(config=config)
        self.tokenizer = tokenizer
        pool = SimpleNamespace(page_size=1 << 20, num_pages=1 << 20)
        self.memory: Any = SimpleNamespace(pool=pool, index=SimpleNamespace(windows=()))
        engine: Any = FakeEngine(step_s, config.vocab_size)
        self._thread = EngineThread(engine)
        self._finalizer = self._thread.close  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the model whose tokenizer is used")
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
