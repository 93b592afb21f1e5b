"""A conversation with an LLM, turn by turn: it can be forked, rewound, saved and loaded; answers can be continued."""

from __future__ import annotations

import copy
import json
import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from glob import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

from torch import Tensor

from infer.cache.pool import OutOfPages
from infer.engine.allocator import check_memory
from infer.engine.engine import Engine
from infer.engine.guide import guide_for
from infer.engine.model import summary
from infer.engine.params import PARAMS, SamplingKeywords, SamplingParams, check_prefill_chunk
from infer.engine.result import GeneratedToken, GenerationResult
from infer.engine.sequence import CacheExceeded, check_sequence, token_ids
from infer.engine.store import read, remove_leftovers, write
from infer.engine.text import Detokenizer
from infer.trace.record import Trace
from infer.values import STRING, Kind, keywords_of, takes

if TYPE_CHECKING:
    from infer.engine.llm import LLM

CONTEXT = 4096  # positions, where the model has them
KIND = "session"
REASONS = (None, "eos", "stop", "length")  # why an answer ended; None: the reader stopped
ANSWERING = "this session is answering: read that stream to its end, or close it, first"
Message = dict[str, str]
Encode = Callable[[list[Message]], list[int]]


class Answer(NamedTuple):
    """The last answer, as it was generated."""

    prompt: list[int]
    token_ids: list[int]
    params: SamplingParams  # with the seed that was drawn
    finish_reason: str | None  # one of REASONS
    given: int = 0  # tokens generated before the first turns of its prompt were dropped


class Session:
    """Each turn renders the complete chat as a request to the LLM; only what is not in the prefix cache is prefilled.

    Between turns a session holds tokens and no pages: the LLM's memory remembers these until others need them, and what
    is gone by the next turn is computed again. So a template that rewrites earlier turns, or text that comes back as
    other tokens than were generated, costs some prefill but never correctness. One thread at a time may use a session;
    several sessions may be used at once.
    """

    @takes(llm=Kind("an LLM", lambda value: hasattr(value, "submit")), system=STRING, params=PARAMS)
    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        encode: Encode | None = None,
    ) -> None:
        """params: of turns that bring none. context: positions that it may take, 4,096 if the model has them.

        encode: from messages to the token ids of a prompt; None: the tokenizer's chat template.
        """
        most = llm.model.config.max_position_embeddings
        context = min(CONTEXT, most) if context is None else context
        if type(context) is not int or not 1 <= context <= most:
            raise ValueError(f"context must be from 1 to the model's {most}, not {context!r}")
        try:
            check_memory(llm.memory, context, llm.prefill_chunk)
        except OutOfPages as error:
            raise ValueError(str(error)) from None  # `load` says which file asks for it
        self.llm, self.system, self.context = llm, system, context
        self.params = params or SamplingParams()
        self.encode: Encode = llm.tokenizer.encode_chat if encode is None else encode
        self.messages: list[Message] = _system_message(system)
        self.tokens: list[int] = []  # computed so far; the memory has their pages until others need them
        self._starts: list[int] = []  # how many there were before each turn
        self.answer: Answer | None = None  # the last one, unless it was rewound
        self._answering = threading.Lock()

    def __repr__(self) -> str:
        turns = f"{self.turns} turn{'s' * (self.turns != 1)}"
        return f"Session({turns}, {len(self.tokens)} of {self.context} positions, {summary(self.llm.model)})"

    @property
    def turns(self) -> int:
        """The number of the user's turns."""
        return len(self._starts)

    @property
    def _num_system(self) -> int:
        """Messages before the first turn."""
        return len(self.messages) - 2 * self.turns

    @keywords_of(SamplingParams)
    def send(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        trace: Trace | None = None,
        **settings: Unpack[SamplingKeywords],
    ) -> GenerationResult:
        """Answer the user's next message. Arguments are those of `stream`."""
        turn = self.stream(text, params, trace=trace, **settings)
        while True:
            try:
                next(turn)
            except StopIteration as end:
                result: GenerationResult = end.value
                return result

    @takes(text=STRING, params=PARAMS)
    @keywords_of(SamplingParams)
    def stream(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        trace: Trace | None = None,
        **settings: Unpack[SamplingKeywords],
    ) -> Generator[GeneratedToken, None, GenerationResult]:
        """Answer the user's next message token by token. Stopping early keeps the text so far.

        params: of this turn, instead of the session's. settings: of this turn, such as max_new_tokens=20, beside the
        session's others. trace: records the turn.
        """
        return self._begin(text, replace(params or self.params, **settings), trace)

    @takes(params=PARAMS)
    def more(self, params: SamplingParams | None = None) -> Generator[GeneratedToken, None, GenerationResult]:
        """Continue the last answer, which a limit or its reader has cut.

        Its tokens are those of an answer that was not cut, but presence and frequency penalties start again.
        """
        if self.answer is None:
            raise ValueError("there is no answer to continue")
        if self.answer.finish_reason in ("eos", "stop"):
            raise ValueError("the last answer is complete: the model ended it")
        if (constraint := self.answer.params.constraint) is not None:
            raise ValueError(
                f"the {constraint[0]} of the last answer would begin again: rewind the turn, and send it with a higher "
                f"max_new_tokens than {self.answer.params.max_new_tokens}"
            )
        return self._begin(None, replace(params or self.params, seed=self.answer.params.seed), None)

    def make_room(self, text: str | None, new_tokens: int) -> int:
        """Forget the first turns until a message has room for so long an answer; returns how many were forgotten.

        text: of the message; None: the last answer continues. If forgetting all does not help, nothing is forgotten.
        """
        for turns in range(self.turns + (text is not None)):
            if len(self.prompt(text, turns)) + new_tokens <= self.context:
                self.drop(turns)
                return turns
        length = len(self.prompt(text, max(0, self.turns - (text is None))))
        raise CacheExceeded(
            f"{length} tokens of this turn alone + {new_tokens} new tokens exceed the context of {self.context}"
        )

    def fork(self) -> Self:
        """Branch the conversation. The history is shared."""
        fork = copy.copy(self)
        fork.messages, fork.tokens, fork._starts = list(self.messages), list(self.tokens), list(self._starts)
        fork._answering = threading.Lock()
        return fork

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns, messages and answers."""
        self._check_turns("rewind", turns)
        self.truncate(self.turns - turns)

    def truncate(self, turns: int) -> None:
        """Keep the first turns alone."""
        self._check_turns("keep", turns)
        if turns < self.turns:
            del self.tokens[self._starts[turns] :]
            del self.messages[self._num_system + 2 * turns :]
            del self._starts[turns:]
            self.answer = None

    def reset(self) -> None:
        """Forget all turns."""
        self.truncate(0)

    def drop(self, turns: int = 1) -> None:
        """Forget the first turns. What follows them is computed again."""
        self._check_turns("drop", turns)
        if turns:
            del self.messages[self._num_system : self._num_system + 2 * turns]
            self.tokens, self._starts = [], [0] * (self.turns - turns)
            self.answer = self.answer if self.turns else None

    def instruct(self, system: str | None) -> None:
        """Give the chat another system message, or none. All turns stay, and are computed again."""
        self._check_idle()
        first = _system_message(system)
        self.encode([*first, {"role": "user", "content": "hello"}])  # some templates refuse it
        self.messages[: self._num_system] = first
        self.system, self.tokens, self._starts = system, [], [0] * self.turns

    def pages(self) -> set[int]:
        """The pages that hold its tokens, by their numbers in the pool, as far as they are remembered."""
        return self.llm.between_steps(lambda _: self.llm.memory.pages_of(self.tokens)).result()

    def save(self, path: str | Path) -> None:
        """Save tokens, messages, settings and pages, to continue in another process."""
        self._check_idle()
        path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file to write to")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        header = {
            "messages": self.messages,
            "turns": self._starts,
            "settings": {"system": self.system, "params": asdict(self.params), "context": self.context},
            "answer": self.answer and self.answer._asdict() | {"params": asdict(self.answer.params)},
        }
        key, dumped = self.llm.between_steps(self._dump).result()
        if len(dumped["tokens"]) < len(self.tokens):  # some were evicted: compute them again
            self.llm.generate(self.tokens, SamplingParams(max_new_tokens=1))
            key, dumped = self.llm.between_steps(self._dump).result()
        remove_leftovers(path.parent, escape(path.name))
        write(path, KIND, dumped, {"model": key} | {name: json.dumps(value) for name, value in header.items()})

    @classmethod
    def load(cls, path: str | Path, llm: LLM, *, encode: Encode | None = None) -> Self:
        """Resume a saved session, with the same model, in the same dtype. Nothing is prefilled again.

        A file is trusted as weights are: requests that share a prefix with it use its pages.
        """
        path, memory = Path(path), llm.memory
        header, tensors = read(path, KIND)
        if header.get("model") != llm.between_steps(lambda _: memory.key).result():
            raise ValueError(
                f"{path} was saved with another model, hook, quantization, dtype, page size, processor, number of "
                "processes or version of infer, torch, numba or Triton: load it with the same"
            )
        try:
            settings = json.loads(header["settings"])
            settings["params"] = SamplingParams.from_json(settings["params"])
            check_prefill_chunk(settings.pop("prefill_chunk", None))  # in some files; an LLM has its own
            session = cls(llm, encode=encode, **settings)
            session.messages = _messages(json.loads(header["messages"]), session.system)
            session._starts = _starts(json.loads(header["turns"]), session)
            session.answer = _answer(json.loads(header.get("answer", "null")), session.turns)
            session.tokens = llm.between_steps(lambda _: session._restore(tensors)).result()
        except OutOfPages:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is not a session that can continue here: {error}") from None
        return session

    def prompt(self, text: str | None, dropped: int = 0) -> list[int]:
        """The tokens that a turn begins with. text: as for `make_room`. dropped: first turns to leave out."""
        messages = self.messages[: self._num_system] + self.messages[self._num_system + 2 * dropped :]
        if text is not None:
            return self.encode([*messages, {"role": "user", "content": text}])
        return [*self.encode(messages[:-1]), *(self.answer.token_ids if self.answer is not None else ())]

    def _begin(
        self, text: str | None, params: SamplingParams, trace: Trace | None
    ) -> Generator[GeneratedToken, None, GenerationResult]:
        """text: as for `make_room`."""
        self._check_idle()
        if params.n != 1:
            raise ValueError(f"n={params.n}: a session continues with one answer; `LLM.generate` gives several")
        if params.prompt_logprobs is not None:
            raise ValueError("a session does not return prompt_logprobs: use `LLM.generate`")
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        prompt, rendered = self.prompt(text), (copy.deepcopy(self.messages), self.answer)
        check_sequence(self.llm.model.config, prompt, params, self.context)
        guide_for(params, self.llm.tokenizer, self.llm.model.config)  # a constraint is refused here, too
        return self._stream(text, prompt, rendered, params, trace)

    def _stream(
        self, text: str | None, prompt: list[int], rendered: Any, params: SamplingParams, trace: Trace | None
    ) -> Generator[GeneratedToken, None, GenerationResult]:
        """rendered: the messages and the answer of which the prompt was made."""
        if not self._answering.acquire(blocking=False):
            raise ValueError(ANSWERING)
        handle, generated = None, list[GeneratedToken]()
        earlier = self.answer.token_ids if text is None and self.answer is not None else []
        pieces = Detokenizer(self.llm.tokenizer, params.stop)
        before = "".join(map(pieces.push, earlier))
        try:
            if (self.messages, self.answer) != rendered:
                raise ValueError("the conversation has changed since this stream was created: create another")
            handle = self.llm.submit(prompt, params, trace=trace)
            for token in handle:
                if earlier:  # its text may begin in the middle of a character
                    token = replace(token, text=pieces.push(token.token_id, token.finish_reason))
                generated.append(token)
                yield token
            result: GenerationResult = handle.result()
        except BaseException as error:
            if not isinstance(error, Exception):  # a reader that stops early keeps the text so far
                self._record(text, prompt, earlier, before, generated, params)
            raise
        else:
            self._record(text, prompt, earlier, before, generated, params)
            return result
        finally:
            if handle is not None:
                handle.abort()
            self._answering.release()

    def _record(
        self,
        text: str | None,
        prompt: list[int],
        earlier: list[int],
        before: str,
        generated: Sequence[GeneratedToken],
        params: SamplingParams,
    ) -> None:
        """earlier, before: tokens and text of the answer that was continued."""
        message = {"role": "assistant", "content": before + "".join(token.text for token in generated)}
        new, reason = [token.token_id for token in generated], generated[-1].finish_reason if generated else None
        first, given = prompt[: len(prompt) - len(earlier)], 0
        if text is not None:
            self.messages += [{"role": "user", "content": text}, message]
            self._starts.append(len(self.tokens))
        elif self.answer is not None:
            self.messages[-1] = message
            given = self.answer.given if first == self.answer.prompt else len(earlier)
        self.answer = Answer(first, [*earlier, *new], params, reason, given)
        if generated:  # then the prompt was computed, and all tokens but the last
            self.tokens = [*prompt, *new[:-1]]

    def _check_turns(self, action: str, turns: int) -> None:
        if type(turns) is not int or not 0 <= turns <= self.turns:
            raise ValueError(f"cannot {action} {turns!r} of {self.turns} turns")
        self._check_idle()

    def _check_idle(self) -> None:
        if self._answering.locked():
            raise ValueError(ANSWERING)

    # What runs in the thread that drives the LLM, whose memory is for one thread.

    def _dump(self, _: Engine) -> tuple[str, dict[str, Tensor]]:
        """The model's name, and the cached pages of its tokens."""
        memory = self.llm.memory
        key, cache = memory.key, memory.cache(self.context)
        memory.attach_prefix(cache, [*self.tokens, 0])  # less the last, as of each prompt
        dumped = memory.dump(cache)
        cache.reset()
        return key, dumped

    def _restore(self, dumped: dict[str, Tensor]) -> list[int]:
        """Insert saved pages into the prefix cache. Returns their tokens."""
        cache = self.llm.memory.cache(self.context)
        self.llm.memory.restore(cache, dumped)
        cache.reset()
        return dumped["tokens"].tolist()


def _system_message(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


# Parts of a file: what `save` would not have written is refused.


def _starts(starts: Any, session: Session) -> list[int]:
    if not isinstance(starts, list) or len(session.messages) != 2 * len(starts) + (session.system is not None):
        raise ValueError("the number of turns does not match the messages")
    if any(type(start) is not int or not 0 <= start <= session.context for start in starts):
        raise ValueError("a turn's start position is out of range")
    return starts


def _messages(saved: Any, system: Any) -> list[Message]:
    """The system's, where there is one, then the user's and the model's in turn."""
    if not isinstance(saved, list):
        raise ValueError("messages must be a list")
    first = _system_message(system)
    if saved[: len(first)] != first:
        raise ValueError("the system message does not match")
    for i, (role, message) in enumerate(zip(cycle(("user", "assistant")), saved[len(first) :], strict=False)):
        if message != {"role": role, "content": message["content"]} or not isinstance(message["content"], str):
            raise ValueError(f"message {i} must have the role {role!r} and string content")
    return saved


def _answer(saved: Any, turns: int) -> Answer | None:
    if saved is None:
        return None
    prompt, ids, params = token_ids(saved["prompt"]), token_ids(saved["token_ids"]), saved["params"]
    reason, given = saved["finish_reason"], saved["given"]
    if not turns or reason not in REASONS or type(given) is not int or not 0 <= given <= len(ids):
        raise ValueError("the saved answer is invalid")
    return Answer(prompt, ids, SamplingParams.from_json(params), reason, given)
