"""A chat whose cache is kept between turns: it can be forked, rewound, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any, Protocol, Self

from infer.cache.pool import NoPages, pages_for
from infer.engine.generate import stream
from infer.engine.memory import CacheMemory, pass_tokens
from infer.engine.model import Model
from infer.engine.params import SamplingParams
from infer.engine.request import check_chunk, check_request
from infer.engine.result import GeneratedToken, GenerationResult, collect
from infer.engine.store import read, remove_leftovers, write
from infer.engine.text import Decodes

CONTEXT = 4096  # positions, where the model has them
KIND = "session"
Message = dict[str, str]
Encode = Callable[[list[Message]], list[int]]


class ChatTokenizer(Decodes, Protocol):
    def encode_chat(self, messages: list[Message]) -> list[int]: ...


class Session:
    """Each turn renders the whole chat anew, and prefills only what no cache holds of it yet.

    A cache knows its tokens, so a template that rewrites earlier turns, or text that comes back as other tokens than
    were generated, costs some prefill but never correctness.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: ChatTokenizer | Decodes,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        prefill_chunk: int | None = None,
        memory: CacheMemory | None = None,
        encode: Encode | None = None,
    ) -> None:
        """params: of turns that bring none. context: positions that it may take, 4,096 if the model has them.

        memory: shared with other sessions of the model; None: its own. encode: from messages to the token ids of a
        prompt; None: the tokenizer's chat template. prefill_chunk: as for `stream`.
        """
        check_chunk(prefill_chunk)
        most = model.config.max_position_embeddings
        context = min(CONTEXT, most) if context is None else context
        if type(context) is not int or not 1 <= context <= most:
            raise ValueError(f"context must be from 1 to the model's {most}, not {context!r}")
        if memory is not None and memory.model is not model:
            raise ValueError("the memory is of another model: keys and values are each model's own")
        self.model, self.tokenizer, self.system = model, tokenizer, system
        self.params, self.prefill_chunk = params or SamplingParams(), prefill_chunk
        self.memory = CacheMemory(model) if memory is None else memory
        self.encode: Encode = tokenizer.encode_chat if encode is None else encode  # type: ignore[union-attr]
        self._check_memory(context)
        self.cache = self.memory.cache(context)
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._starts: list[int] = []  # positions that the cache held before each turn
        self._answering = False

    @property
    def turns(self) -> int:
        """How often the user has spoken."""
        return len(self._starts)

    @property
    def context(self) -> int:
        return self.cache.capacity

    def send(self, text: str, params: SamplingParams | None = None) -> GenerationResult:
        """Answer the user's next message."""
        prompt = self._prompt(text)
        steps = list(self.stream(text, params))
        return collect(prompt, steps, self.cache.memory_bytes)

    def stream(self, text: str, params: SamplingParams | None = None) -> Iterator[GeneratedToken]:
        """Answer the user's next message token by token. Stopping early keeps what was said until then."""
        self._check_idle()
        params = params or self.params
        prompt = self._prompt(text)
        check_request(self.model.config, prompt, params, self.cache.capacity)
        return self._stream(text, prompt, params)

    def fork(self) -> Session:
        """Another session that has heard the same. The two share all pages until they part."""
        twin = Session.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.messages, twin._starts, twin.cache = list(self.messages), list(self._starts), self.cache.fork()
        twin._answering = False
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
        held = self._starts[turns]
        del self.messages[len(self.messages) - 2 * (self.turns - turns) :]
        del self._starts[turns:]
        self._forget(held)

    def reset(self) -> None:
        """Forget all turns."""
        self.truncate(0)

    def save(self, path: str | Path) -> None:
        """Tokens, messages, settings and the cache itself, to go on from in another process."""
        self._check_idle()
        path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file to write to")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        settings = {
            "system": self.system,
            "params": asdict(self.params),
            "context": self.context,
            "prefill_chunk": self.prefill_chunk,
        }
        header = {
            "model": self.memory.key,
            "messages": json.dumps(self.messages),
            "turns": json.dumps(self._starts),
            "settings": json.dumps(settings),
        }
        remove_leftovers(path.parent, escape(path.name))
        write(path, KIND, self.memory.dump(self.cache), header)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Model,
        tokenizer: ChatTokenizer | Decodes,
        *,
        memory: CacheMemory | None = None,
        encode: Encode | None = None,
    ) -> Self:
        """Go on where `save` was called: with the same model, in the same dtype. Nothing is prefilled again.

        A file is trusted as weights are: other sessions of the memory that begin alike go on behind its pages.
        """
        path = Path(path)
        header, tensors = read(path, KIND)
        memory = CacheMemory(model) if memory is None else memory
        if header.get("model") != memory.key:
            raise ValueError(
                f"{path} is a session with another model, dtype, page size, processor or version of torch: load it "
                "with the same"
            )
        try:
            settings = json.loads(header["settings"])
            settings["params"] = SamplingParams(**_whole_keys(settings["params"]))
            session = cls(model, tokenizer, memory=memory, encode=encode, **settings)
            session.messages = _messages(json.loads(header["messages"]), session.system)
            session._starts = _check_turns(session, json.loads(header["turns"]))
            memory.restore(session.cache, tensors)
        except NoPages:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is no session that can go on here: {error}") from None
        return session

    def _prompt(self, text: str) -> list[int]:
        return self.encode([*self.messages, {"role": "user", "content": text}])

    def _stream(self, text: str, prompt: list[int], params: SamplingParams) -> Iterator[GeneratedToken]:
        self._check_idle()
        if self._prompt(text) != prompt:
            raise ValueError("something else was said since this stream was made: make another")
        self._answering = True
        start, answer = self.cache.seq_len, ""
        tokens: Iterator[GeneratedToken] = iter(())
        try:
            self.memory.recall(self.cache, prompt)
            chunk = pass_tokens(self.model.config, self.prefill_chunk)
            tokens = stream(self.model, self.tokenizer, prompt, params, cache=self.cache, prefill_chunk=chunk)
            for token in tokens:
                answer += token.text
                yield token
        except Exception:  # nothing was said; who stops early, or interrupts, keeps what was
            _close(tokens)
            self._forget(start)
            raise
        except BaseException:
            self._record(text, answer, start, tokens)
            raise
        else:
            self._record(text, answer, start, tokens)
        finally:
            self._answering = False

    def _record(self, text: str, answer: str, start: int, tokens: Iterator[GeneratedToken]) -> None:
        _close(tokens)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self._starts.append(start)
        self.memory.keep(self.cache)

    def _forget(self, held: int) -> None:
        """What the cache holds from there on."""
        try:
            self.cache.truncate(min(held, self.cache.seq_len))
        except ValueError:  # the pages of a window are gone: the next turn finds or computes them
            self.cache.reset()

    def _check_idle(self) -> None:
        if self._answering:
            raise ValueError("this session is answering: read that stream to its end, or close it, first")

    def _check_memory(self, context: int) -> None:
        """With a copy of the last page of each list, which others may hold."""
        pool, chunk = self.memory.pool, pass_tokens(self.model.config, self.prefill_chunk) or context
        needed = pages_for(self.model.config, context, pool.page, chunk) + len(self.memory.index.windows)
        if needed > pool.count:
            raise ValueError(
                f"{context} positions take {needed * pool.page_bytes / 1e6:.0f} MB, but the memory for caches has "
                f"{pool.memory_bytes / 1e6:.0f}: ask for a shorter context, or give caches more memory"
            )


def _close(tokens: Iterator[GeneratedToken]) -> None:
    """Steps launched ahead are rolled back."""
    if isinstance(tokens, Generator):
        tokens.close()


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


def _whole_keys(params: dict[str, Any]) -> dict[str, Any]:
    """JSON has no other keys than texts."""
    return params | {"logit_bias": {int(token): bias for token, bias in params["logit_bias"].items()}}
