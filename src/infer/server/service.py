"""The engine behind the API: who may ask now, what becomes of a request, and what is known about the model."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from starlette.requests import Request

from infer.cache.pool import NoPages, pages_for
from infer.engine.llm import LLM, Handle
from infer.engine.loop import EngineFailed
from infer.engine.params import SamplingParams
from infer.engine.request import CacheExceeded, ContextExceeded, NoToken, NoTokenAllowed
from infer.parallel.group import ProcessLost
from infer.server import spans
from infer.server.bodies import B, read_body
from infer.server.errors import ApiError, refused
from infer.server.live import Live
from infer.server.metrics import Metrics
from infer.server.settings import Settings
from infer.server.streams import read_all
from infer.server.tokens import TokenTexts

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger("infer.server")


class Service:
    def __init__(
        self, engine: Callable[[], LLM], settings: Settings, *, renews: bool = False, tracer: Tracer | None = None
    ) -> None:
        """engine: makes one. renews: again where it has failed, instead of ending. tracer: makes spans of requests."""
        self._engine, self.renews, self.settings, self.tracer = engine, renews, settings, tracer
        self.llm = llm = engine()
        self.metrics, self.tokenizer = Metrics(lambda: self.llm.stats()), llm.tokenizer
        self.text_of, self.live = TokenTexts(llm.tokenizer), Live(llm)
        self.created = int(time.time())
        self.draining = False
        self.texts = 0  # on their way
        self.longest = _longest(llm)  # tokens of a prompt and its text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def warm_up(self) -> None:
        """Have kernels loaded, or compiled, before somebody waits for them."""
        _warm_up(self.llm)

    def renew(self) -> None:
        """Make another engine in place of one that has failed. Raises where that fails too."""
        self.llm.close()
        _clear_frames(self.llm.failure)
        self.llm.memory.pool.close()  # there may be no room for two; whoever still asks the old engine hears of its end
        llm = self._engine()
        _warm_up(llm)
        self.llm, self.live = llm, Live(llm)

    @property
    def failure(self) -> BaseException | None:
        """Why the engine can do nothing any more."""
        return self.llm.failure

    async def read(self, request: Request, kind: type[B], *, optional: bool = False) -> B:
        """The body of a request, checked. optional: it may be empty."""
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            message = f"a body cannot be compressed: {coding:.20} is not known"
            raise ApiError(415, message, headers={"Accept-Encoding": "identity"})
        data = await read_all(request, self.settings.max_body, self.settings.read_seconds)
        return read_body(kind, b"{}" if optional and not data else data)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_id:
            message = f"the model {name!r:.100} does not exist: this server has {self.settings.model_id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_open(self) -> None:
        """Refuse everything while nothing new can be begun."""
        if self.failure is not None:
            raise ApiError(503, "the engine has failed", code="engine_failed")
        if self.draining:
            raise ApiError(503, "the server is about to end", code="draining", headers={"Retry-After": "10"})

    def check_room(self, texts: int) -> None:
        """Refuse texts that could not be begun now: before their prompts are encoded, and again once they are."""
        self.check_open()
        if texts > self.settings.max_n:
            raise refused(f"{texts} texts at once are too many: {self.settings.max_n} are made at most", "n")
        if self.texts + texts > self.llm.max_rows + self.settings.max_waiting:
            self.metrics.refused.inc()
            raise ApiError(429, "too many requests wait: come again", code="queue_full", headers={"Retry-After": "1"})

    @contextmanager
    def room_for(self, texts: int) -> Iterator[None]:
        """Count texts while they are made; refuse them where too many wait already."""
        self.check_room(texts)
        self.texts += texts
        try:
            yield
        finally:
            self.texts -= texts

    def room(self, prompt: Sequence[int], wanted: int | None, param: str) -> int:
        """How many tokens may be generated behind a prompt: as many as asked for, or as fit."""
        left = self.longest - len(prompt)
        if left < 1 or (wanted is not None and wanted > left):
            asked = "" if wanted is None else f" and {wanted} new ones"
            raise refused(
                f"the prompt has {len(prompt)} tokens{asked}, but {self.longest} positions is the most here",
                param,
                "context_length_exceeded",
            )
        return left if wanted is None else wanted

    async def submit(self, prompts: Sequence[list[int]], params: SamplingParams, priority: int | None) -> Handle:
        """Texts of several prompts, as one."""
        spans.note(params=params)
        submit = partial(self.llm.submit_all, prompts, params, priority=priority or 0)
        if self.settings.log_prompts:
            for prompt in prompts:
                print(
                    f"prompt: {self.tokenizer.decode(prompt, skip_special_tokens=False)!r}", file=sys.stderr, flush=True
                )
        try:
            if params.constraint is None:
                return submit()
            return await asyncio.to_thread(submit)  # others go on while its grammar is compiled
        except (ContextExceeded, CacheExceeded, NoPages) as error:
            raise refused(str(error), code="context_length_exceeded") from None
        except (ValueError, TypeError) as error:
            raise refused(str(error)) from None
        except RuntimeError:
            raise ApiError(503, "the engine has failed", code="engine_failed") from None

    def told(self, error: Exception) -> ApiError:
        """What a client hears of an error on the way."""
        told = self._told(error)
        spans.note(error=told)
        return told

    def _told(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, NoTokenAllowed):  # what the client asked for leads nowhere, or is too much to follow
            return refused(str(error), code="constraint_failed")
        if isinstance(error, NoToken):
            return ApiError(500, "the model gave logits that are no numbers", code="no_token")
        if isinstance(error, NoPages):
            return ApiError(503, "no memory is left for this text", code="no_memory")
        if isinstance(error, EngineFailed) or self.failure is not None:  # by now there may be another engine
            return ApiError(503, "the engine has failed", code="engine_failed")
        log_error(error)
        return ApiError(500, "something unexpected has happened", code="internal_error")

    def card(self) -> dict[str, Any]:
        """The model, as /v1/models lists it."""
        return {
            "id": self.settings.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "infer",
            "max_model_len": self.longest,
            "chat": self.tokenizer.chat_template is not None,
        }


def log_error(error: BaseException) -> None:
    """What nobody has expected, for whoever runs the server. Paths and texts are left out unless they are asked for."""
    if os.environ.get("INFER_TRACEBACK") == "1":
        logger.error("something unexpected", exc_info=error)
        return
    if isinstance(error, ProcessLost):  # which tells nothing of anybody
        logger.error("%s", error)
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    logger.error("%s%s (INFER_TRACEBACK=1 shows more)", type(error).__name__, where)


def _warm_up(llm: LLM) -> None:
    llm.generate([0], max_new_tokens=1)


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what an error's traceback holds: tensors, and so the memory that they lie in."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _longest(llm: LLM) -> int:
    """The model's context, or what the memory for caches holds of it."""
    config, pool = llm.model.config, llm.memory.pool
    fewest, most = 1, config.max_position_embeddings
    while fewest < most:
        length = (fewest + most + 1) // 2
        needed = pages_for(config, length, pool.page, min(llm.prefill_chunk, length)) + len(llm.memory.index.windows)
        fewest, most = (length, most) if needed <= pool.count else (fewest, length - 1)
    return fewest
