"""From a request that is understood to what its client is sent: the whole answer at its end, or events on the way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infer.engine.llm import Handle
from infer.engine.params import SamplingParams
from infer.engine.result import GeneratedToken
from infer.server import bodies
from infer.server.service import Service
from infer.server.streams import EventStream, quietly_closed, result_of
from infer.server.text import as_event, as_json

HANDLE = "infer.handle"  # of a request's scope: who runs the application can see there how far it is


def by_text(pieces: Iterable[GeneratedToken]) -> Iterator[tuple[int, list[GeneratedToken]]]:
    """Of what has come, the pieces of each text."""
    for index, own in groupby(pieces, attrgetter("index")):
        yield index, list(own)


class Answer(ABC):
    """What a client is sent for one request."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    def whole(self, handle: Handle) -> dict[str, Any]:
        """Of a request that is done. Raises what has gone wrong."""

    @abstractmethod
    def events(self, handle: Handle) -> AsyncIterator[bytes]:
        """As text is made."""

    def failed(self, error: Exception) -> bytes:
        """The last events, where an error has ended the others."""
        return as_event(self.service.told(error).body)


async def answered(
    service: Service,
    request: Request,
    body: bodies.Request,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    answer_of: Callable[[], Answer],
    held: ExitStack | None = None,
) -> Response:
    """Have the texts made, and hand them on.

    answer_of: called once it is certain that there are not too many. held: left when it is over.
    """
    with ExitStack() if held is None else held.pop_all() as stack:
        stack.enter_context(service.room_for(len(prompts) * params.n))
        handle = request.scope[HANDLE] = await service.submit(prompts, params, body.priority)
        answer = answer_of()
        if body.stream:
            return EventStream(answer.events(handle), handle, stack.pop_all(), answer.failed)
        large = params.logprobs is not None  # up to 21 numbers and texts for each token
        whole = await result_of(handle, request, lambda handle: as_json(answer.whole(handle)), in_thread=large)
    return quietly_closed() if whole is None else Response(whole, media_type="application/json")
