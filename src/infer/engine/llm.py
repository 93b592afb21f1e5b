"""`LLM`: text in, text out, for one request or thousands at once, from any thread. One thread drives the model."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Collection
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import torch
from torch import Tensor

from infer.engine.drafters import BaseDrafter, ModelDrafter, Speculate, drafter_of
from infer.engine.engine import Engine, Event, Stats
from infer.engine.memory import CacheMemory, default_size
from infer.engine.model import Model, backend_name, cache_dtype_of, check_trace, model_device, summary, verifies_drafts
from infer.engine.params import PARAMS, SamplingKeywords, SamplingParams
from infer.engine.result import GeneratedToken, GenerationResult, Score
from infer.engine.scheduler import FIRST_ROWS
from infer.engine.sequence import EMBED, POOLINGS, Sequence, make_sequences, named, params_of_each
from infer.engine.session import Encode, Session
from infer.engine.text import Detokenizer
from infer.engine.thread import EngineThread, Notifier
from infer.models.common import Decoder
from infer.trace.record import Trace
from infer.trace.text import token_texts
from infer.values import (
    BYTES,
    CALLABLE,
    FLAG,
    MESSAGES,
    MODEL,
    NAME,
    PROMPT,
    STRING,
    TOKENIZER,
    either,
    keywords_of,
    takes,
)

T = TypeVar("T")
Message = Mapping[str, Any]
PARALLEL_CLOSE_S = 10.0  # to wait for a step of several processes, one of which may hang, before they are killed
Prompt = str | Collection[int] | Collection[Message]  # text, token ids, or the messages of a chat


class RequestKeywords(SamplingKeywords, total=False):
    """The options of `LLM.submit_all`, for type checkers and editors."""

    priority: int
    cache_salt: str | None
    trace: Trace | None
    draft: bool | Collection[int]


class LLM:
    """A model with its tokenizer, and the memory for the caches of all its requests.

    Each text is bit for bit the one that `generate` gives, whatever else is in the batch.
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
        context: int | None = None,
        chat_template: str | Path | None = None,
        tensor_parallel: int = 1,
        cache_memory: int | None = None,
        cache_dtype: str = "auto",
        prefix_store: str | Path | None = None,
        memory: CacheMemory | None = None,
        max_rows: int | None = None,
        prefill_chunk: int | None = None,
        speculate: Speculate = None,
    ) -> None:
        """model: a name, a folder, a file or a hub id; or a loaded model, with its tokenizer.

        dtype, device, quantize, context: see `load_model`. chat_template: see `Tokenizer`.
        tensor_parallel: number of processes to shard the model over, on GPUs one GPU each; texts stay the same to the
        bit. cache_memory: bytes for all caches, in each process; None: half of the free memory, which processes on one
        device share. memory: an existing CacheMemory to use instead.
        max_rows: sequences that run at once. prefill_chunk: prompt tokens of one step, beside sequences that decode; by
        default 128, on a GPU 4,096 with the tokens of these sequences, and 8,192 while none decodes.
        speculate: what drafts tokens, several of which a step verifies: "ngram", earlier parts of a text;
        "ngram-shared", other requests' outputs, too; the name of a smaller model with the same vocabulary; a drafter;
        or a function. Texts stay the same to the bit. In plain torch nothing is drafted.
        """
        group, self.pooling = None, POOLINGS[0]  # of which tokens the embedding of a text is made
        if tokenizer is not None and chat_template is not None:
            raise TypeError("the tokenizer has its chat template: Tokenizer(name, chat_template=...)")
        if isinstance(model, str | Path):
            from infer.loader.find import pooling_of
            from infer.loader.load import load_model
            from infer.loader.tokenizer import Tokenizer
            from infer.parallel.launch import load_sharded

            if tokenizer is None:
                tokenizer = Tokenizer(model, chat_template=chat_template)
            self.pooling = pooling_of(model) or self.pooling
            drafter = drafter_of(speculate, tokenizer, device)
            options: dict[str, Any] = {"dtype": dtype, "device": device, "quantize": quantize, "context": context}
            if tensor_parallel == 1:
                model = load_model(model, **options)[0]
            else:
                model = load_sharded(model, tensor_parallel, **options)[0]
                group = model.group
        elif tensor_parallel != 1:
            raise TypeError("a loaded model cannot be sharded: give its name, and LLM loads a shard in each process")
        elif tokenizer is None:
            raise TypeError("a loaded model needs its tokenizer: LLM(model, tokenizer)")
        else:
            drafter = drafter_of(speculate, tokenizer, model_device(model))
        self.model, self.tokenizer = model, tokenizer
        with ExitStack() as opened:
            if group is not None:
                opened.callback(group.close)
            if isinstance(drafter, BaseDrafter):
                drafter.claim()
                opened.callback(drafter.close)
            sharing: ModelDrafter | None = None
            if isinstance(drafter, ModelDrafter) and drafter.memory is None and verifies_drafts(backend_name(model)):
                sharing = drafter
            if memory is None:
                if sharing is not None:
                    size = default_size(model, cache_dtype) if cache_memory is None else cache_memory
                    cache_memory = sharing.left_of(size, model.config, cache_dtype_of(model, cache_dtype).itemsize)
                memory = CacheMemory(model, cache_memory, cache_dtype=cache_dtype, store=prefix_store)
            elif cache_memory is not None or prefix_store is not None or cache_dtype != "auto":
                raise ValueError("memory was given: leave cache_memory, cache_dtype and prefix_store out")
            self.memory = memory
            if sharing is not None:
                sharing.match(memory)
            shared = model.group if isinstance(model, Decoder) else None
            engine = Engine(model, memory, max_rows=max_rows, prefill_chunk=prefill_chunk, drafter=drafter)
            self._thread = EngineThread(engine, None if shared is None else PARALLEL_CLOSE_S)
            opened.callback(self._thread.close)
            if shared is not None:
                opened.callback(shared.watch(self._thread.fail))
            self._finalizer = weakref.finalize(self, opened.pop_all().close)

    def __repr__(self) -> str:
        stats, cache = self.stats(), f"{self.memory.pool.memory_bytes / 1e6:,.0f} MB of cache"
        return f"LLM({summary(self.model)}, {cache}, {stats.running} running, {stats.waiting} waiting)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort everything and free the memory."""
        self._finalizer()

    @keywords_of(SamplingParams)
    def submit_all(
        self,
        prompts: Collection[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace: Trace | None = None,
        draft: bool | Collection[int] = True,
        **settings: Unpack[SamplingKeywords],
    ) -> Handle:
        """Submit several prompts as one request: tokens have their `index`, n for each prompt.

        params: how to sample, or settings by their names: temperature=0.8. priority: lower runs first.
        cache_salt: only requests with the same one share cached prefixes. trace: records the run of a single prompt.
        draft: with `speculate`, False drafts nothing; or give token ids of a text that the output may repeat.
        """
        handle = self._handle(
            prompts, params, priority=priority, cache_salt=cache_salt, trace=trace, draft=draft, **settings
        )
        self._submit([handle])
        return handle

    def _handle(
        self,
        prompts: Collection[Prompt],
        params: SamplingParams | None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace: Trace | None = None,
        draft: bool | Collection[int] = True,
        pooling: str | None = None,
        **settings: Unpack[SamplingKeywords],
    ) -> Handle:
        """A request that is yet to be submitted."""
        if trace is not None and len(prompts) > 1:
            raise ValueError(f"a trace records one text, not those of {len(prompts)} prompts")
        params, sequences = _params(params, settings), list[Sequence]()
        options = {"priority": priority, "cache_salt": cache_salt, "recorder": trace, "draft": draft}
        options["pooling"] = pooling
        for prompt in prompts:
            sequences += make_sequences(self.model.config, self.tokenizer, self.encode(prompt), params, **options)
        for sequence in sequences:
            check_trace(self.model, trace, sequence)
            self._thread.engine.check(sequence)
        return Handle(self, sequences)

    def _submit(self, handles: list[Handle]) -> None:
        """Submit requests, all for the same step."""
        self._thread.submit([sequence for handle in handles for sequence in handle.sequences])
        for handle in handles:
            weakref.finalize(handle, self._thread.abort, handle.sequences).atexit = False

    @keywords_of(submit_all)
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> Handle:
        """Submit a prompt without waiting for the text. What cannot be generated is refused at once.

        The options are those of `submit_all`.
        """
        return self.submit_all([prompt], params, **options)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too: the first overload takes it
        self,
        prompts: str | Collection[int] | Collection[Message],
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> GenerationResult: ...
    @overload
    def generate(
        self,
        prompts: Collection[str] | Collection[Collection[int]] | Collection[Collection[Message]],
        params: SamplingParams | Collection[SamplingParams] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[GenerationResult]: ...
    @takes(prompts=PROMPT)
    @keywords_of(submit_all)
    def generate(
        self,
        prompts: Prompt | Collection[Prompt],
        params: SamplingParams | Collection[SamplingParams] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> GenerationResult | list[GenerationResult]:
        """The text that follows a prompt; or those of several prompts, in their order.

        params: how to sample, or one for each prompt; or settings by their names: temperature=0.8. With n samples, each
        prompt gives a list. The options are those of `submit_all`.
        """
        given: Any = prompts if isinstance(prompts, str) else list(prompts)
        one: Any = params  # `submit` refuses several
        if _is_one(given):
            return self.submit(given, one, **options).result()  # type: ignore[no-any-return]
        handles: list[Handle] = []
        submitted = 0
        try:
            for i, (prompt, own) in enumerate(zip(given, params_of_each(given, params), strict=True)):
                with named(f"prompt {i}", ValueError, TypeError):
                    handles.append(self._handle([prompt], own, **options))
                # As many as the first step admits, then as many again, and so on: the GPU has work meanwhile.
                if len(handles) == max(FIRST_ROWS, 2 * submitted) or i == len(given) - 1:
                    self._submit(handles[submitted:])
                    submitted = len(handles)
                    time.sleep(0)  # the engine's thread may run now
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles[:submitted]:
                handle.abort()
            raise

    @keywords_of(submit_all)
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> Handle:
        """The text that follows a prompt, token by token: `for token in llm.stream(...)`, or `async for`.

        The options are those of `submit_all`.
        """
        return self.submit(prompt, params, **options)

    @overload
    def chat(
        self,
        messages: Collection[Message] | str,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestKeywords],
    ) -> GenerationResult: ...
    @overload
    def chat(
        self,
        messages: Collection[Message] | str,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[RequestKeywords],
    ) -> Handle: ...
    @takes(messages=either(STRING, MESSAGES), stream=FLAG)
    @keywords_of(submit_all)
    def chat(
        self,
        messages: Collection[Message] | str,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> GenerationResult | Handle:
        """The answer to the messages of a chat, or to one user message, by the model's chat template.

        stream: return it token by token, as `stream` does. The options are those of `submit_all`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        handle = self.submit(messages, params, **options)
        return handle if stream else handle.result()

    def session(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        encode: Encode | None = None,
    ) -> Session:
        """A conversation, turn by turn. The options are those of `Session`."""
        return Session(self, system=system, params=params, context=context, encode=encode)

    def load_session(self, path: str | Path, *, encode: Encode | None = None) -> Session:
        """A conversation that was saved. encode: see `Session`."""
        return Session.load(path, self, encode=encode)

    def score(self, text: str | Collection[int], top: int = 0) -> Score:
        """The log-probability of each token of a text: the numbers that generation would see.

        top: also of the top-k tokens in its place.
        """
        result = self.submit(text, SamplingParams(max_new_tokens=0, prompt_logprobs=top)).result()
        ids = result.prompt_token_ids
        return Score(ids, token_texts(self.tokenizer, ids), result.prompt_logprobs or [])

    def embed(
        self, texts: Prompt | Collection[Prompt], pooling: str | None = None, *, normalize: bool = True
    ) -> Tensor:
        """Embeddings of texts, float32 [n, C]; of a single text [C].

        pooling: of which tokens the last hidden states are taken: "last", "mean" or "first"; None: as the files of the
        model say, or else "last". normalize: to length 1.
        """
        given: Any = texts if isinstance(texts, str) else list(texts)
        is_single = _is_one(given)
        if not given:
            raise ValueError("there is no text to embed")
        handle = self.submit_embeddings([given] if is_single else given, pooling)
        handle.result()
        found = torch.stack([result.embedding for result in handle.results() if result.embedding is not None])
        found = torch.nn.functional.normalize(found, dim=1) if normalize else found
        return found[0] if is_single else found

    def submit_embeddings(
        self,
        prompts: Collection[Prompt],
        pooling: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Handle:
        """Submit prompts as one request: the result of each has its `embedding`, and no text."""
        pooling = pooling or self.pooling
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}")
        handle = self._handle(prompts, EMBED, priority=priority, cache_salt=cache_salt, pooling=pooling)
        self._submit([handle])
        return handle

    @takes(prompt=PROMPT)
    def encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        """The token ids of a prompt. max_tokens: see `Tokenizer.encode`."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, **({} if max_tokens is None else {"max_tokens": max_tokens})))
        prompt = list(prompt)  # type: ignore[assignment]
        if prompt and all(isinstance(each, Mapping) for each in prompt):
            return list(self.tokenizer.encode_chat(prompt))
        return prompt  # type: ignore[return-value]

    @property
    def max_rows(self) -> int:
        """Sequences that run at once."""
        return self._thread.engine.scheduler.max_rows

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens of one step."""
        return self._thread.engine.scheduler.prefill_chunk

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine: create another LLM."""
        return self._thread.failure

    def stats(self) -> Stats:
        """What runs at the moment, and totals."""
        return self._thread.engine.stats()

    @takes(listener=CALLABLE)
    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call a function with every event, in the engine's thread. Returns a function that ends this."""
        return self._thread.engine.watch(listener)

    @takes(function=CALLABLE)
    def between_steps(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine, in the engine's thread, between two steps."""
        return self._thread.between_steps(function)


class Handle:
    """A submitted request: iterate over its tokens, `await` it, or wait for its `result`. Deleting it aborts it."""

    def __init__(self, llm: LLM, sequences: list[Sequence]) -> None:
        self._llm, self.sequences = llm, sequences  # an LLM is not closed while it has handles
        self._texts = [Detokenizer(sequence.tokenizer, sequence.params.stop) for sequence in sequences]
        self._num_read = [0] * len(sequences)
        self._notifier = Notifier(llm._thread)
        for sequence in sequences:
            sequence.notify = self._notifier

    @property
    def done(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def started(self) -> bool:
        """Whether a token has been read."""
        return any(self._num_read)

    def abort(self) -> None:
        """Stop generating, and free the memory."""
        self._llm._thread.abort(self.sequences)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end: a `GenerationResult`, or a list of n. Raises the error that ended it."""
        self._notifier.wait(lambda: self.done, tokens=False, timeout=timeout)
        return self._result()

    def __iter__(self) -> Iterator[GeneratedToken]:
        """Tokens as they are generated; of n samples, with their `index`. Leaving the loop aborts the rest."""
        try:
            while True:
                last = self.done
                yield from self._read()
                if last:
                    return
                self._notifier.wait(self._has_tokens, tokens=True)
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        async for tokens in self.token_batches():
            for token in tokens:
                yield token

    async def token_batches(self) -> AsyncIterator[list[GeneratedToken]]:
        """Lists of all tokens since the last list."""
        try:
            while True:
                last = self.done
                if tokens := list(self._read()):
                    yield tokens
                if last:
                    return
                await self._notifier.wait_async(self._has_tokens, tokens=True)
        finally:
            self.abort()

    def __await__(self) -> Any:
        yield from self.finished().__await__()
        return self._result()

    async def finished(self) -> None:
        """Wait for the end, also of a failure. If this is cancelled, the request is aborted."""
        try:
            await self._notifier.wait_async(lambda: self.done, tokens=False)
        except asyncio.CancelledError:
            self.abort()
            raise

    def results(self) -> list[GenerationResult]:
        """Of all texts, once it is done. Raises the error that ended it."""
        for sequence in self.sequences:
            _raise(sequence.error)
        return [sequence.result() for sequence in self.sequences]

    def _result(self) -> Any:
        results = self.results()
        return results[0] if len(results) == 1 else results

    def _has_tokens(self) -> bool:
        return self.done or any(
            len(sequence.token_times) > num_read
            for sequence, num_read in zip(self.sequences, self._num_read, strict=True)
        )

    def _read(self) -> Iterator[GeneratedToken]:
        """The tokens since the last call, decoded in the reader's thread; then the error that ended it, if any."""
        for index, sequence in enumerate(self.sequences):
            error = sequence.error
            while len(sequence.token_times) > (at := self._num_read[index]):
                self._num_read[index] += 1
                yield sequence.read(at, self._texts[index], index)
            _raise(error)


def _raise(error: BaseException | None) -> None:
    """Raise the error that ended a sequence. An exit or an interrupt by a callback does not end the reader's thread."""
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"a callback of this request: {error!r}")


@takes(params=PARAMS)
def _params(params: SamplingParams | None, settings: SamplingKeywords) -> SamplingParams:
    if params is not None and settings:
        raise TypeError(f"params and {', '.join(settings)} were both given: put all of it into the SamplingParams")
    return SamplingParams(**settings) if params is None else params


def _is_one(prompts: str | Collection[Any]) -> bool:
    """Whether it is one prompt, not several: a text, messages, or numbers."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping)):
        return True
    return bool(prompts) and not isinstance(prompts[0], str | Collection) and not getattr(prompts[0], "ndim", 0)
