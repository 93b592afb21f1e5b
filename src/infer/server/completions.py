"""/v1/completions, the text that follows a prompt, and /v1/chat/completions, the answer to a chat's messages."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from infer.engine.llm import Handle
from infer.engine.logprobs import TokenLogprobs
from infer.engine.params import SamplingParams
from infer.engine.result import GeneratedToken, GenerationResult
from infer.engine.sequence import EMBED
from infer.engine.text import Detokenizer
from infer.loader.tokenizer import TooManyTokens
from infer.server.bodies import ChatCompletion, Completion, Embedding, Generation, StreamOptions, ToolChoice
from infer.server.chat_template import Chat, for_template
from infer.server.live import number_of
from infer.server.parser import Content, Delta, Parser, Reasoning, ToolCall, join_deltas
from infer.server.service import Answer, Service
from infer.server.wire import (
    DONE,
    as_event,
    bad_request,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    text_offsets,
    usage_of,
)

OnMessage = Callable[[dict[str, Any]], None]
# Variables that no client may set: the template's own, and arguments of the function that renders it.
RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
RESERVED |= {"self", "tokenizer", "model_type", "max_tokens"}


class _ChoicesAnswer(Answer):
    """The format of both endpoints: a list of choices, or chunks of one choice each, and the usage."""

    body: Generation

    def __init__(self, service: Service, body: Generation, id_prefix: str, kind: str) -> None:
        super().__init__(service, body)
        self.num_choices, self._options = body.n or 1, body.stream_options or StreamOptions()
        self.head: dict[str, Any] = {
            "id": f"{id_prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": service.settings.model_id,
        }

    @abstractmethod
    def choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """A finished choice."""

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first token."""

    @abstractmethod
    def new_events(self, index: int, pieces: Sequence[GeneratedToken]) -> bytes:
        """The events for new tokens of one choice."""

    @abstractmethod
    def usage(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """After all choices are finished."""

    def complete(self, handle: Handle) -> dict[str, Any]:
        results = self.finish(handle)
        choices = [self.choice(index, result) for index, result in enumerate(results)]
        return {**self.head, "choices": choices, "usage": self.usage(results)}

    async def events(self, handle: Handle) -> AsyncIterator[bytes]:
        if opening := self.opening():
            yield opening
        async for pieces in handle.token_batches():
            if self._options.include_request:
                self.head["infer"] = {"request": number_of(handle)}
            by_choice = groupby(pieces, attrgetter("index"))
            if data := b"".join(self.new_events(index, list(own)) for index, own in by_choice):
                yield data
        usage = self.usage(self.finish(handle))
        if self._options.include_usage:
            yield as_event({**self.head, "choices": [], "usage": usage})
        yield DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._options.include_usage else {}
        return as_event({**self.head, "choices": [choice], **usage})


def _prompts(given: Any) -> list[Any]:
    """Each text, or its token ids, of a field that may have one or several."""
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class EmbeddingAnswer(Answer):
    body_type, prompt_field = Embedding, "input"
    body: Embedding

    def __init__(self, service: Service, body: Embedding) -> None:
        super().__init__(service, body)
        self._given = _prompts(body.input)
        self.num_choices = len(self._given)

    def encode(self) -> list[list[int]]:
        prompts = [self.service.llm.encode(prompt, self.service.max_model_len) for prompt in self._given]
        if not all(prompts):
            raise bad_request("a text to embed is empty", "input")
        return prompts

    def settings(self, prompts: Sequence[list[int]]) -> SamplingParams:
        size, limit = self.service.llm.model.config.hidden_size, self.service.max_model_len
        if (self.body.dimensions or 0) > size:
            raise bad_request(f"embeddings of this model have {size} dimensions", "dimensions")
        if (longest := max(map(len, prompts))) > limit:
            message = f"a text has {longest} tokens: the limit is {limit}"
            raise bad_request(message, "input", "context_length_exceeded")
        return EMBED

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, **options: Any) -> Handle:
        return self.service.llm.submit_embeddings(prompts, **options)

    def complete(self, handle: Handle) -> dict[str, Any]:
        results, body = self.finish(handle), self.body
        found = torch.stack([result.embedding for result in results if result.embedding is not None])
        vectors = torch.nn.functional.normalize(found[:, : body.dimensions], dim=1).numpy()
        lists: list[Any] = vectors.tolist()
        if body.encoding_format == "base64":
            lists = [b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        tokens = sum(result.prompt_tokens for result in results)
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(lists)],
            "model": self.service.settings.model_id,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def events(self, handle: Handle) -> AsyncIterator[bytes]:
        raise NotImplementedError("embeddings are not streamed")


class CompletionAnswer(_ChoicesAnswer):
    body_type, prompt_field = Completion, "prompt"
    body: Completion

    def __init__(self, service: Service, body: Completion) -> None:
        super().__init__(service, body, "cmpl", "text_completion")
        self._given = _prompts(body.prompt)
        self._choices_of_each = self.num_choices
        self.num_choices *= len(self._given)

    def encode(self) -> list[list[int]]:
        service, decode = self.service, self.service.tokenizer.decode
        prompts = [service.llm.encode(prompt, service.max_model_len) for prompt in self._given]
        self._echoed = [decode(prompt, skip_special_tokens=False) if self.body.echo else "" for prompt in prompts]
        self._texts = [Detokenizer(service.tokenizer) for _ in range(self.num_choices)]  # for offsets of tokens
        return prompts

    def settings(self, prompts: Sequence[list[int]]) -> SamplingParams:
        body = self.body
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not (body.echo and body.logprobs is not None):
            raise bad_request("max_tokens is 0: that needs echo and logprobs", "max_tokens")
        if body.stream and body.echo and body.logprobs is not None:
            raise bad_request("echo with logprobs cannot be streamed", "stream", "unsupported_parameter")
        for prompt in prompts:
            self.max_new_tokens(prompt, max_tokens)
        return body.settings(
            max_new_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._choices_of_each]

    def choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            found: list[TokenLogprobs | None] = [*(result.logprobs or [])]
            tokens, offsets = result.token_ids, self._new_offsets(index, result.token_ids)
            if result.prompt_logprobs is not None:
                found, tokens = [*result.prompt_logprobs, *found], result.prompt_token_ids + tokens
                echoed = Detokenizer(_WithSpecialTokens(self.service.tokenizer))
                offsets = text_offsets(echoed, result.prompt_token_ids, 0) + offsets
            logprobs = completion_logprobs(found, tokens, self.service.tokenizer, offsets)
        return self._choice(index, self._echo(index) + result.text, logprobs, result.finish_reason)

    def opening(self) -> bytes:
        if not self.body.echo:
            return b""
        indices = range(self.num_choices)
        return b"".join(self._chunk(self._choice(index, self._echo(index), None, None)) for index in indices)

    def new_events(self, index: int, pieces: Sequence[GeneratedToken]) -> bytes:
        text, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
        logprobs = None
        if self.body.logprobs is not None:
            found, tokens = [piece.logprobs for piece in pieces], [piece.token_id for piece in pieces]
            logprobs = completion_logprobs(found, tokens, self.service.tokenizer, self._new_offsets(index, tokens))
        if not text and logprobs is None and reason is None:
            return b""
        return self._chunk(self._choice(index, text, logprobs, reason))

    def _new_offsets(self, index: int, tokens: Sequence[int]) -> list[int]:
        return text_offsets(self._texts[index], tokens, len(self._echo(index)))

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason(reason)}

    def usage(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return usage_of(results, range(0, self.num_choices, self._choices_of_each))


class _WithSpecialTokens(NamedTuple):
    """Decodes tokens as `echo` shows a prompt."""

    tokenizer: Any

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class _ChatChoice:
    """One choice while it is generated."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.deltas: list[Delta] = []
        self.logprobs: list[TokenLogprobs] = []  # of tokens without a delta so far

    def read(self, text: str, last: bool) -> list[Delta]:
        deltas = self.parser.feed(text)
        if last:
            deltas = [*deltas, *self.parser.finish()]
        self.deltas += deltas
        return deltas

    def message(self) -> dict[str, Any]:
        """The message so far."""
        content = "".join(delta.text for delta in self.deltas if isinstance(delta, Content))
        reasoning = self.reasoning()
        calls: list[dict[str, Any]] = []
        for delta in self.deltas:
            if isinstance(delta, ToolCall):
                if delta.id is not None:
                    function = {"name": delta.name, "arguments": ""}
                    calls.append({"id": delta.id, "type": "function", "function": function})
                calls[delta.index]["function"]["arguments"] += delta.arguments
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def reasoning(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, Reasoning))

    def finish_reason(self, reason: str | None) -> str | None:
        reason = finish_reason(reason)
        calls = any(isinstance(delta, ToolCall) for delta in self.deltas)
        return "tool_calls" if calls and reason == "stop" else reason


class ChatAnswer(_ChoicesAnswer):
    body_type, prompt_field = ChatCompletion, "messages"
    body: ChatCompletion

    def __init__(self, service: Service, body: ChatCompletion, on_message: OnMessage | None = None) -> None:
        """on_message: called with the model's complete message."""
        super().__init__(service, body, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
        self._on_message = on_message
        self._prediction: bool | list[int] = True  # tokens that the answer may repeat; True: none are given

    def encode(self) -> list[list[int]]:
        body = self.body
        variables = body.chat_template_kwargs or {}
        if reserved := RESERVED & variables.keys():
            raise bad_request(f"{min(reserved)} is reserved and cannot be set", "chat_template_kwargs")
        choice = body.tool_choice
        chat = Chat(
            for_template(body.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or []],
            tool_choice=choice.model_dump() if isinstance(choice, ToolChoice) else choice,
            parallel_calls=body.parallel_tool_calls is not False,
            effort=body.reasoning_effort,
            variables=variables,
            constraint=body.constraint | (body.response_format.constraint if body.response_format else {}),
        )
        prompt = self.service.chat_template.prompt(chat, self.service.max_model_len)
        self._constraint = prompt.constraint
        if body.prediction is not None:
            self._prediction = self._encode_prediction(body.prediction.text)
        self.choices = [_ChatChoice(prompt.parser()) for _ in range(self.num_choices)]
        return [prompt.tokens]

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, **options: Any) -> Handle:
        return super().submit(prompts, params, draft=self._prediction, **options)

    def _encode_prediction(self, text: str) -> list[int]:
        limit = self.service.max_model_len
        try:
            tokens: list[int] = self.service.tokenizer.encode(text, add_special_tokens=False, max_tokens=limit)
            return tokens
        except TooManyTokens:
            raise bad_request(f"the prediction has more than {limit} tokens", "prediction") from None
        except ValueError as error:
            raise bad_request(str(error), "prediction") from None

    def settings(self, prompts: Sequence[list[int]]) -> SamplingParams:
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return body.settings(
            max_new_tokens=self.max_new_tokens(prompts[0], body.token_limit),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            **self._constraint,
        )

    def choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        choice = self.choices[index]
        choice.read(result.text, last=True)
        message = {"refusal": None, **choice.message()}
        logprobs = None if result.logprobs is None else self._logprobs(result.logprobs)
        reason = choice.finish_reason(result.finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._delta_chunk(index, delta) for index in range(len(self.choices)))

    def new_events(self, index: int, pieces: Sequence[GeneratedToken]) -> bytes:
        choice, reason = self.choices[index], pieces[-1].finish_reason
        deltas: list[tuple[Delta, list[TokenLogprobs]]] = []
        for piece in pieces:
            if piece.logprobs is not None:
                choice.logprobs.append(piece.logprobs)
            for delta in choice.read(piece.text, last=piece.finish_reason is not None):
                deltas.append((delta, choice.logprobs))
                choice.logprobs = []
        chunks = [self._delta_chunk(index, _delta_fields(delta), logprobs) for delta, logprobs in join_deltas(deltas)]
        if reason is not None:
            chunks.append(self._delta_chunk(index, {}, choice.logprobs, choice.finish_reason(reason)))
        return b"".join(chunks)

    def usage(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        if self._on_message is not None:
            self._on_message(self.choices[0].message())
        return usage_of(results, reasoning=sum(map(self._reasoning_tokens, self.choices, results)))

    def _reasoning_tokens(self, choice: _ChatChoice, result: GenerationResult) -> int:
        """Counted by encoding the reasoning: the same number whether it was streamed or not."""
        text = choice.reasoning()
        encode = self.service.tokenizer.encode
        return min(len(encode(text, add_special_tokens=False)), result.generated_tokens) if text else 0

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(logprobs, self.service.tokenizer), "refusal": None}

    def _delta_chunk(
        self, index: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprobs] = (), reason: str | None = None
    ) -> bytes:
        found = self._logprobs(logprobs) if logprobs else None
        return self._chunk({"index": index, "delta": delta, "logprobs": found, "finish_reason": reason})


def _delta_fields(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Reasoning):
        return {"reasoning": delta.text}
    if isinstance(delta, Content):
        return {"content": delta.text}
    call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
    if delta.id is not None:
        call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": delta.arguments}}
    return {"tool_calls": [call]}
