"""`LLM`: text in, text out, for one request or thousands at once. A thread drives the model; any thread may ask."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from infer.engine.driver import Driver, News
from infer.engine.loop import Event, Loop, Stats, Task
from infer.engine.memory import CacheMemory
from infer.engine.model import Model, check_mode, check_traceable
from infer.engine.params import PARAMS, SamplingParams
from infer.engine.request import check_chunk, samples
from infer.engine.result import GeneratedToken, GenerationResult, Score
from infer.engine.session import Encode, Session
from infer.engine.text import TextStream
from infer.models.common import Decoder
from infer.trace.record import Trace
from infer.trace.text import token_texts
from infer.values import BYTES, MESSAGES, MODEL, NAME, PROMPT, STRING, TOKENIZER, either, takes

T = TypeVar("T")
Message = Mapping[str, Any]
SPLIT_PATIENCE_S = 10.0  # for a step of several processes, one of which may hang, before they are ended
Prompt = str | Sequence[int] | Sequence[Message]  # text, token ids, or the messages of a chat


class LLM:
    """A model with its tokenizer, and the memory of all its conversations.

    Each text is what `generate` gives that request alone, to the bit, whatever runs beside it.
    """

    @takes(model=either(NAME, MODEL), tokenizer=TOKENIZER, cache_memory=BYTES)
    def __init__(
        self,
        model: str | Path | Model,
        tokenizer: Any = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantize: str | None = None,
        tensor_parallel: int = 1,
        cache_memory: int | None = None,
        cache_dtype: str = "auto",
        prefix_store: str | Path | None = None,
        memory: CacheMemory | None = None,
        max_rows: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """model: a name, a folder, a file or a hub id; or a model that is loaded, with its tokenizer.

        tensor_parallel: number of processes to split the model over, on GPUs one GPU each; texts stay the same to the
        bit. cache_memory: bytes for all caches, in each process; None: half of what is free, which processes on one
        device share. memory: instead of it, one that is there.
        max_rows: requests that run at once. prefill_chunk: tokens of prompts in one pass, beside those that decode.
        """
        group = None
        if isinstance(model, str | Path):
            from infer.loader import Tokenizer, load_model
            from infer.parallel.processes import load_split

            tokenizer = Tokenizer(model) if tokenizer is None else tokenizer
            if tensor_parallel == 1:
                model = load_model(model, dtype=dtype, device=device, quantize=quantize)[0]
            else:
                model = load_split(model, tensor_parallel, dtype=dtype, device=device, quantize=quantize)[0]
                group = model.group
        elif tensor_parallel != 1:
            raise TypeError(
                "a model that is loaded cannot be split: give its name, and LLM loads a part in each process"
            )
        elif tokenizer is None:
            raise TypeError("a model that is loaded needs its tokenizer beside it: LLM(model, tokenizer)")
        self.model, self.tokenizer = model, tokenizer
        with ExitStack() as opened:
            if group is not None:
                opened.callback(group.close)
            check_mode(model)
            check_chunk(prefill_chunk)
            if memory is None:
                memory = CacheMemory(model, cache_memory, cache_dtype=cache_dtype, store=prefix_store)
            elif cache_memory is not None or prefix_store is not None or cache_dtype != "auto":
                raise ValueError("memory was given: leave cache_memory, cache_dtype and prefix_store out")
            self.memory = memory
            shared = model.group if isinstance(model, Decoder) else None
            loop = Loop(model, memory, max_rows=max_rows, prefill_chunk=prefill_chunk)
            self._driver = Driver(loop, None if shared is None else SPLIT_PATIENCE_S)
            opened.callback(self._driver.close)
            if shared is not None:
                opened.callback(shared.watch(self._driver.fail))
            self._finalizer = weakref.finalize(self, opened.pop_all().close)

    def __repr__(self) -> str:
        config, stats, pool = self.model.config, self.stats(), self.memory.pool
        model = f"{config.model_type}, {config.num_hidden_layers} layers, context {config.max_position_embeddings:,}"
        cache = f"{pool.memory_bytes / 1e6:,.0f} MB of cache"
        return f"LLM({model}, {cache}, {stats.running} running, {stats.waiting} waiting)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and give the memory back."""
        self._finalizer()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        trace: Trace | None = None,
        **settings: Any,
    ) -> Handle:
        """Ask for a text without waiting for it. What cannot be generated is refused at once.

        params: how to sample, or settings by their names: temperature=0.8. priority: lower goes first. trace: records
        the run.
        """
        return Handle(self, self._tasks(prompt, _params(params, settings), priority, trace))

    def submit_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, priority: int = 0, **settings: Any
    ) -> Handle:
        """Ask for the texts of several prompts as one: pieces with their `index`, n for each prompt."""
        params = _params(params, settings)
        return Handle(self, [task for prompt in prompts for task in self._tasks(prompt, params, priority, None)])

    def _tasks(self, prompt: Prompt, params: SamplingParams, priority: int, trace: Trace | None) -> list[Task]:
        requests = samples(self.model.config, self.tokenizer, self.encode(prompt), params)
        if trace is not None:
            if not isinstance(trace, Trace):
                raise TypeError(f"trace must be a Trace, not {type(trace).__name__}")
            check_traceable(self.model)
            if len(requests) > 1:
                raise ValueError(f"a trace records one text, not n={len(requests)}")
            trace.check(self.model.config, len(requests[0].tokens), params.max_new_tokens)
        for request in requests:
            self._driver.loop.check(request)
        return [Task(request, priority=priority, recorder=trace) for request in requests]

    @overload
    def generate(
        self, prompts: str | Sequence[int] | Sequence[Message], params: SamplingParams | None = None, **settings: Any
    ) -> GenerationResult: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[GenerationResult]: ...
    @takes(prompts=PROMPT)
    def generate(self, prompts: Any, params: Any = None, **settings: Any) -> Any:
        """The text that follows a prompt; or of several prompts, in their order.

        params: how to sample, or one for each prompt; or settings by their names: temperature=0.8. With n samples, each
        prompt gives a list of them.
        """
        prompts = prompts if isinstance(prompts, str) else list(prompts)
        if _is_one(prompts):
            return self.submit(prompts, params, **settings).result()
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} SamplingParams for {len(prompts)} prompts: give one for all, or one for each"
            )
        handles: list[Handle] = []
        try:
            for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                try:
                    handles.append(self.submit(prompt, own, **settings))
                except (ValueError, TypeError) as error:
                    raise type(error)(f"prompt {i}: {error}") from None
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Handle:
        """The text that follows a prompt, piece by piece: `for piece in llm.stream(...)`, or `async for`."""
        return self.submit(prompt, params, **settings)

    @takes(messages=either(STRING, MESSAGES))
    def chat(
        self, messages: Sequence[Message] | str, params: SamplingParams | None = None, **settings: Any
    ) -> GenerationResult:
        """The answer to a chat's messages, or to one of the user's, by the model's own template."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.submit(messages, params, **settings).result()  # type: ignore[no-any-return]

    def session(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        encode: Encode | None = None,
    ) -> Session:
        """A chat that goes on, turn by turn. The options are those of `Session`."""
        return Session(self, system=system, params=params, context=context, encode=encode)

    def load_session(self, path: str | Path, *, encode: Encode | None = None) -> Session:
        """A chat that was saved, where it was left. encode: as for `Session`."""
        return Session.load(path, self, encode=encode)

    def score(self, text: str | Sequence[int], top: int = 0) -> Score:
        """The log-probability of each token of a text: the very numbers that generation would see.

        top: of so many of the likeliest tokens in its place as well.
        """
        result = self.submit(text, SamplingParams(max_new_tokens=0, prompt_logprobs=top)).result()
        ids = result.prompt_token_ids
        return Score(ids, token_texts(self.tokenizer, ids), result.prompt_logprobs or [])

    @takes(prompt=PROMPT)
    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        prompt = list(prompt)  # type: ignore[assignment]
        if prompt and all(isinstance(each, Mapping) for each in prompt):
            return list(self.tokenizer.encode_chat(prompt))
        return prompt  # type: ignore[return-value]

    @property
    def max_rows(self) -> int:
        """Texts that run at once."""
        return self._driver.loop.scheduler.max_rows

    @property
    def prefill_chunk(self) -> int:
        """Tokens of prompts in one pass."""
        return self._driver.loop.scheduler.prefill_chunk

    @property
    def failure(self) -> BaseException | None:
        """What has ended it: then it can only be made anew."""
        return self._driver.failure

    def stats(self) -> Stats:
        """What it does at the moment, and has done so far."""
        return self._driver.loop.stats()

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Let a function hear of all that happens, from the engine's own thread; returns what ends that."""
        return self._driver.loop.watch(listener)

    def between_steps(self, function: Callable[[Loop], T]) -> Future[T]:
        """Let a function look at the loop in the engine's own thread, between two steps: nothing changes meanwhile."""
        return self._driver.between_steps(lambda: function(self._driver.loop))


class Handle:
    """A request on its way: iterate over its pieces, `await` it, or ask for the `result`. Let go of, it is aborted."""

    def __init__(self, llm: LLM, tasks: Sequence[Task]) -> None:
        self._llm, self._tasks = llm, tasks  # as long as somebody waits, it is not closed by being forgotten
        self._readers = [_Reader(task, index) for index, task in enumerate(tasks)]
        self._news = News(llm._driver.wakeups)
        for task in tasks:
            task.news = self._news
        llm._driver.submit(tasks)
        weakref.finalize(self, llm._driver.abort, tasks).atexit = False

    @property
    def done(self) -> bool:
        return all(task.done for task in self._tasks)

    @property
    def begun(self) -> bool:
        """Whether a token has been read."""
        return any(reader.seen for reader in self._readers)

    def abort(self) -> None:
        """It is not wanted any more: its row and its pages go to others."""
        self._llm._driver.abort(self._tasks)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end: a `GenerationResult`, or a list of n. Raises what has gone wrong."""
        self._news.wait(lambda: self.done, pieces=False, timeout=timeout)
        return self._result()

    def __iter__(self) -> Iterator[GeneratedToken]:
        """Pieces as they come; of n samples with their `index`. Who stops early aborts the rest."""
        try:
            while True:
                last = self.done
                yield from self._pieces()
                if last:
                    return
                self._news.wait(self._has_pieces, pieces=True)
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        async for pieces in self.arrivals():
            for piece in pieces:
                yield piece

    async def arrivals(self) -> AsyncIterator[list[GeneratedToken]]:
        """As `async for`, but all pieces that have come since the last ones at once."""
        try:
            while True:
                last = self.done
                if pieces := list(self._pieces()):
                    yield pieces
                if last:
                    return
                await self._news.wait_async(self._has_pieces, pieces=True)
        finally:
            self.abort()

    def __await__(self) -> Any:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        await self.finished()
        return self._result()

    async def finished(self) -> None:
        """Wait for the end, whatever that is. Cancelled, it aborts."""
        try:
            await self._news.wait_async(lambda: self.done, pieces=False)
        except asyncio.CancelledError:
            self.abort()
            raise

    def results(self) -> list[GenerationResult]:
        """Of all texts, once it is done. Raises what has gone wrong."""
        for task in self._tasks:
            if task.error is not None:
                raise task.error
        return [task.result() for task in self._tasks]

    def _result(self) -> Any:
        results = self.results()
        return results[0] if len(results) == 1 else results

    def _has_pieces(self) -> bool:
        return self.done or any(reader.behind for reader in self._readers)

    def _pieces(self) -> Iterator[GeneratedToken]:
        for reader in self._readers:
            yield from reader.read()


class _Reader:
    """Turns the tokens of a request into text, in the thread of whoever reads it."""

    def __init__(self, task: Task, index: int) -> None:
        self.task, self.index, self.seen = task, index, 0
        self._text = TextStream(task.request.tokenizer, task.request.params.stop)

    @property
    def behind(self) -> bool:
        return len(self.task.times) > self.seen

    def read(self) -> Iterator[GeneratedToken]:
        """What came since; then the error that has ended it, if there is one."""
        task, request = self.task, self.task.request
        error = task.error
        while self.behind:
            at = self.seen
            self.seen += 1
            token = request.tokens[request.prompt_len + at]
            # What ended it belongs to the last token, and was there before that could be seen.
            reason = request.finish_reason if request.prompt_len + at + 1 == len(request.tokens) else None
            reason = None if reason == "interrupted" else reason
            piece = "" if reason == "eos" else self._text.push(token)
            if reason is not None:
                piece += self._text.finish()
            before = task.times[at - 1] if at else task.began or task.submitted
            logprobs = None if request.logprobs is None else request.logprobs[at]
            yield GeneratedToken(token, piece, task.times[at] - before, reason, logprobs, self.index)
        if error is not None:
            raise error


@takes(params=PARAMS)
def _params(params: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    if params is not None and settings:
        raise TypeError(f"params and {', '.join(settings)} were both given: put all of it into the SamplingParams")
    return SamplingParams(**settings) if params is None else params


def _is_one(prompts: str | Sequence[Any]) -> bool:
    """Whether it is one prompt, not several: a text, messages, or numbers."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping)):
        return True
    return bool(prompts) and not isinstance(prompts[0], str | Sequence) and not getattr(prompts[0], "ndim", 0)
