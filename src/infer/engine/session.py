"""A chat with an LLM, turn by turn: it can be forked, rewound, saved and loaded, and answers can be gone on with."""

from __future__ import annotations

import copy
import json
import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from torch import Tensor

from infer.cache.pool import NoPages, pages_for
from infer.engine.params import PARAMS, SamplingParams
from infer.engine.request import CacheExceeded, Request, check_chunk, token_ids
from infer.engine.result import GeneratedToken, GenerationResult
from infer.engine.store import read, remove_leftovers, write
from infer.engine.text import TextStream
from infer.trace.record import Trace
from infer.values import STRING, Kind, takes

if TYPE_CHECKING:
    from infer.engine.llm import LLM

CONTEXT = 4096  # positions, where the model has them
KIND = "session"
REASONS = (None, "eos", "stop", "length")  # why an answer has ended; None: whoever read it stopped
ANSWERING = "this session is answering: read that stream to its end, or close it, first"
Message = dict[str, str]
Encode = Callable[[list[Message]], list[int]]


class Answer(NamedTuple):
    """The last answer, as it was generated."""

    prompt: list[int]
    token_ids: list[int]
    params: SamplingParams  # with the seed that was drawn
    finish_reason: str | None  # one of REASONS
    given: int = 0  # of the tokens, those that a longer prompt has given before its first turns were dropped


class Session:
    """Each turn renders the whole chat anew, as a request to the LLM; only what its memory does not hold is prefilled.

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
        _check_memory(llm, context)
        self.llm, self.system, self.context = llm, system, context
        self.params = params or SamplingParams()
        self.encode: Encode = llm.tokenizer.encode_chat if encode is None else encode
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.tokens: list[int] = []  # computed so far; the memory has their pages until others need them
        self._starts: list[int] = []  # how many there were before each turn
        self.answer: Answer | None = None  # the last one, unless it was rewound
        self._answering = threading.Lock()

    def __repr__(self) -> str:
        return f"Session({self.turns} turn{'s' * (self.turns != 1)}, {len(self.tokens)} of {self.context} positions)"

    @property
    def turns(self) -> int:
        """How often the user has spoken."""
        return len(self._starts)

    def send(
        self, text: str, params: SamplingParams | None = None, *, trace: Trace | None = None, **settings: Any
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
    def stream(
        self, text: str, params: SamplingParams | None = None, *, trace: Trace | None = None, **settings: Any
    ) -> Generator[GeneratedToken, None, GenerationResult]:
        """Answer the user's next message token by token. Stopping early keeps what was said until then.

        params: of this turn, instead of the session's. settings: of this turn, such as max_new_tokens=20, beside the
        session's others. trace: records the turn.
        """
        return self._begin(text, replace(params or self.params, **settings), trace)

    @takes(params=PARAMS)
    def more(self, params: SamplingParams | None = None) -> Generator[GeneratedToken, None, GenerationResult]:
        """Go on with the last answer, which a limit has cut, or whoever read it.

        Its tokens are those of an answer that was not cut, presence and frequency penalties aside: these count anew.
        """
        if self.answer is None:
            raise ValueError("there is no answer to go on with")
        if self.answer.finish_reason in ("eos", "stop"):
            raise ValueError("the last answer is whole: the model has ended it itself")
        return self._begin(None, replace(params or self.params, seed=self.answer.params.seed), None)

    def make_room(self, text: str | None, new_tokens: int) -> int:
        """Forget the first turns until a message has room for so long an answer; returns how many were forgotten.

        text: of the message; None: the last answer is to go on. Where not even forgetting all helps, nothing is.
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
        """Another session that has heard the same. What they have in common is held once."""
        twin = copy.copy(self)
        twin.messages, twin.tokens, twin._starts = list(self.messages), list(self.tokens), list(self._starts)
        twin._answering = threading.Lock()
        return twin

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns: what the user said, and the answers."""
        if type(turns) is not int or not 0 <= turns <= self.turns:
            raise ValueError(f"cannot rewind {turns!r} of {self.turns} turns")
        self.truncate(self.turns - turns)

    def truncate(self, turns: int) -> None:
        """Keep the first turns alone."""
        if type(turns) is not int or not 0 <= turns <= self.turns:
            raise ValueError(f"cannot keep {turns!r} of {self.turns} turns")
        self._check_idle()
        if turns == self.turns:
            return
        del self.tokens[self._starts[turns] :]
        del self.messages[len(self.messages) - 2 * (self.turns - turns) :]
        del self._starts[turns:]
        self.answer = None

    def reset(self) -> None:
        """Forget all turns."""
        self.truncate(0)

    def drop(self, turns: int = 1) -> None:
        """Forget the first turns. What follows them is computed again."""
        if type(turns) is not int or not 0 <= turns <= self.turns:
            raise ValueError(f"cannot drop {turns!r} of {self.turns} turns")
        self._check_idle()
        if turns:
            first = len(self.messages) - 2 * self.turns
            del self.messages[first : first + 2 * turns]
            self.tokens, self._starts = [], [0] * (self.turns - turns)

    def instruct(self, system: str | None) -> None:
        """Give the chat another system message, or none. All turns stay, and are computed again."""
        self._check_idle()
        first = [] if system is None else [{"role": "system", "content": system}]
        self.encode([*first, {"role": "user", "content": "hello"}])  # some templates refuse it
        self.messages[: len(self.messages) - 2 * self.turns] = first
        self.system, self.tokens, self._starts = system, [], [0] * self.turns

    def pages(self) -> set[int]:
        """The pages that hold its tokens, by their numbers in the pool, as far as they are remembered."""
        memory = self.llm.memory

        def find() -> set[int]:
            found = memory.index.match(self.tokens)
            pages = {page for some in found.pages for page in some if page >= 0}
            memory.pool.release(page for some in found.pages for page in some if page >= 0)
            return pages

        return self.llm._driver.call(find)

    def save(self, path: str | Path) -> None:
        """Tokens, messages, settings and the pages themselves, to go on from in another process."""
        self._check_idle()
        path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file to write to")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        settings = {"system": self.system, "params": asdict(self.params), "context": self.context}
        header = {
            "messages": json.dumps(self.messages),
            "turns": json.dumps(self._starts),
            "settings": json.dumps(settings),
            "answer": json.dumps(self.answer and self.answer._asdict() | {"params": asdict(self.answer.params)}),
        }
        key, dumped = self.llm._driver.call(self._dump)
        if len(dumped["tokens"]) < len(self.tokens):  # the others were evicted: whoever computes them leaves them there
            self.llm.generate(self.tokens, SamplingParams(max_new_tokens=1))
            key, dumped = self.llm._driver.call(self._dump)
        remove_leftovers(path.parent, escape(path.name))
        write(path, KIND, dumped, {"model": key, **header})

    @classmethod
    def load(cls, path: str | Path, llm: LLM, *, encode: Encode | None = None) -> Self:
        """Go on where `save` was called: with the same model, in the same dtype. Nothing is prefilled again.

        A file is trusted as weights are: others whose prompts begin alike go on behind its pages.
        """
        path, memory, call = Path(path), llm.memory, llm._driver.call
        header, tensors = read(path, KIND)
        if header.get("model") != call(lambda: memory.key):
            raise ValueError(
                f"{path} is a session with another model, quantisation, dtype, page size, processor, number of "
                "processes or version of torch: load it with the same"
            )
        try:
            settings = json.loads(header["settings"])
            settings["params"] = SamplingParams(**_whole_keys(settings["params"]))
            check_chunk(settings.pop("prefill_chunk", None))  # in some files; an LLM has its own
            session = cls(llm, encode=encode, **settings)
            session.messages = _messages(json.loads(header["messages"]), session.system)
            session._starts = _check_turns(session, json.loads(header["turns"]))
            session.answer = _answer(json.loads(header.get("answer", "null")), session.turns)
            session.tokens = call(lambda: session._restore(tensors))
        except NoPages:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is no session that can go on here: {error}") from None
        return session

    def prompt(self, text: str | None, dropped: int = 0) -> list[int]:
        """The tokens that a turn begins with. text: as for `make_room`. dropped: first turns to leave out."""
        first = len(self.messages) - 2 * self.turns
        messages = [*self.messages[:first], *self.messages[first + 2 * dropped :]]
        if text is not None:
            return self.encode([*messages, {"role": "user", "content": text}])
        return [*self.encode(messages[:-1]), *(self.answer.token_ids if self.answer is not None else ())]

    def _begin(
        self, text: str | None, params: SamplingParams, trace: Trace | None
    ) -> Generator[GeneratedToken, None, GenerationResult]:
        """text: as for `make_room`."""
        self._check_idle()
        if params.n != 1:
            raise ValueError(f"n={params.n}: a session goes on with one answer; `LLM.generate` gives several")
        if params.prompt_logprobs is not None:
            raise ValueError("a session has no place for prompt_logprobs: `LLM.generate` gives them")
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        prompt = self.prompt(text)
        Request(self.llm.model.config, self.llm.tokenizer, prompt, params, self.context)  # refused here, if at all
        return self._stream(text, prompt, params, trace)

    def _stream(
        self, text: str | None, prompt: list[int], params: SamplingParams, trace: Trace | None
    ) -> Generator[GeneratedToken, None, GenerationResult]:
        if not self._answering.acquire(blocking=False):
            raise ValueError(ANSWERING)
        handle, said = None, list[GeneratedToken]()
        pieces = None if text is not None or self.answer is None else TextStream(self.llm.tokenizer, params.stop)
        before = "" if pieces is None or self.answer is None else "".join(map(pieces.push, self.answer.token_ids))
        try:
            if self.prompt(text) != prompt:
                raise ValueError("something else was said since this stream was made: make another")
            handle = self.llm.submit(prompt, params, trace=trace)
            for token in handle:
                said.append(token if pieces is None else replace(token, text=_text(pieces, token)))
                yield said[-1]
            result: GenerationResult = handle.result()
        except BaseException as error:
            if not isinstance(error, Exception):  # who stops early, or interrupts, keeps what was said
                self._record(text, before, prompt, said, params)
            raise
        else:
            self._record(text, before, prompt, said, params)
            return result
        finally:
            if handle is not None:
                handle.abort()
            self._answering.release()

    def _record(
        self,
        text: str | None,
        before: str,
        prompt: list[int],
        said: Sequence[GeneratedToken],
        params: SamplingParams,
    ) -> None:
        """before: the answer's text so far, where it went on."""
        message = {"role": "assistant", "content": before + "".join(token.text for token in said)}
        new, reason = [token.token_id for token in said], said[-1].finish_reason if said else None
        if text is None and self.answer is not None:
            self.messages[-1] = message
            earlier = self.answer.token_ids
            same = prompt[: len(prompt) - len(earlier)] == self.answer.prompt
            given = self.answer.given if same else len(earlier)
            self.answer = Answer(prompt[: len(prompt) - len(earlier)], [*earlier, *new], params, reason, given)
        elif text is not None:
            self.messages += [{"role": "user", "content": text}, message]
            self._starts.append(len(self.tokens))
            self.answer = Answer(prompt, new, params, reason)
        if said:  # then the prompt was computed, and all tokens but the last
            self.tokens = [*prompt, *new[:-1]]

    def _check_idle(self) -> None:
        if self._answering.locked():
            raise ValueError(ANSWERING)

    # What runs in the thread that drives the LLM, whose memory is for one thread.

    def _dump(self) -> tuple[str, dict[str, Tensor]]:
        """The model's name, and what is there of the tokens."""
        memory = self.llm.memory
        cache = memory.cache(self.context)
        memory.recall(cache, [*self.tokens, 0])  # less the last, as of each prompt
        dumped = memory.dump(cache)
        cache.reset()
        return memory.key, dumped

    def _restore(self, dumped: dict[str, Tensor]) -> list[int]:
        """Let the memory know them."""
        memory = self.llm.memory
        cache = memory.cache(self.context)
        memory.restore(cache, dumped)
        cache.reset()
        tokens: list[int] = dumped["tokens"].tolist()
        return tokens


def _text(pieces: TextStream, token: GeneratedToken) -> str:
    """Of a token behind others, of which the stream knows."""
    piece = "" if token.finish_reason == "eos" else pieces.push(token.token_id)
    return piece if token.finish_reason is None else piece + pieces.finish()


def _check_memory(llm: LLM, context: int) -> None:
    """With a copy of the last page of each list, which others may hold."""
    pool, chunk = llm.memory.pool, min(context, llm._driver.loop.scheduler.prefill_chunk)
    needed = pages_for(llm.model.config, context, pool.page, chunk) + len(llm.memory.index.windows)
    if needed > pool.count:
        raise ValueError(
            f"{context} positions take {needed * pool.page_bytes / 1e6:.0f} MB, but the memory for caches has "
            f"{pool.memory_bytes / 1e6:.0f}: ask for a shorter context, or give caches more memory"
        )


def _check_turns(session: Session, starts: Any) -> list[int]:
    """Refuse what `save` would not have written."""
    system = session.system is not None
    if not isinstance(starts, list) or len(session.messages) != 2 * len(starts) + system:
        raise ValueError("turns and messages do not fit")
    if any(type(start) is not int or not 0 <= start <= session.context for start in starts):
        raise ValueError("a turn begins nowhere")
    return starts


def _messages(saved: Any, system: Any) -> list[Message]:
    """The system's, where there is one, then the user's and the model's in turn."""
    if not isinstance(saved, list):
        raise ValueError("its messages are none")
    roles = [*([] if system is None else ["system"]), *("user", "assistant") * len(saved)]
    for role, message in zip(roles, saved, strict=False):
        if not isinstance(message, dict) or message.keys() != {"role", "content"} or message["role"] != role:
            raise ValueError(f"where the {role} should speak is no such message")
        if not isinstance(message["content"], str) or (role == "system" and message["content"] != system):
            raise ValueError(f"what the {role} says is no text, or another")
    return saved


def _answer(saved: Any, turns: int) -> Answer | None:
    """Refuse what `save` would not have written."""
    if saved is None:
        return None
    prompt, ids, params = token_ids(saved["prompt"]), token_ids(saved["token_ids"]), _whole_keys(saved["params"])
    reason, given = saved["finish_reason"], saved["given"]
    if not turns or reason not in REASONS or type(given) is not int or not 0 <= given <= len(ids):
        raise ValueError("its last answer is none")
    return Answer(prompt, ids, SamplingParams(**params), reason, given)


def _whole_keys(params: dict[str, Any]) -> dict[str, Any]:
    """JSON has no other keys than texts."""
    return params | {"logit_bias": {int(token): bias for token, bias in params["logit_bias"].items()}}
