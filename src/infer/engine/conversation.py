"""A chat whose cache is kept between turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from infer.cache.base import Cache
from infer.engine.generate import stream
from infer.engine.model import Model
from infer.engine.params import SamplingParams
from infer.engine.request import check_chunk, check_request
from infer.engine.result import GeneratedToken
from infer.engine.text import Decodes

Message = dict[str, str]
Encode = Callable[[list[Message]], list[int]]


class Conversation:
    """Each turn renders the whole chat anew, and prefills only what the cache does not hold of it yet.

    The cache knows its tokens, so a template that rewrites earlier turns, or text that comes back as other tokens than
    were generated, costs some prefill but never correctness.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Decodes,
        encode: Encode,
        cache: Cache,
        system: str | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """encode: from messages to the token ids of the prompt; prefill_chunk: as for `stream`."""
        self.model = model
        self.tokenizer = tokenizer
        self.encode = encode
        self.cache = cache
        self.system = system
        self.prefill_chunk = prefill_chunk
        check_chunk(prefill_chunk)
        self.reset()

    def reset(self) -> None:
        self.messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.cache.reset()

    def reply(self, text: str, params: SamplingParams | None = None) -> Iterator[GeneratedToken]:
        """Answer the user's next message. Stopping early keeps what was said until then."""
        params = params or SamplingParams()
        prompt = self.encode([*self.messages, {"role": "user", "content": text}])
        check_request(self.model.config, prompt, params, self.cache.capacity)
        tokens = stream(
            self.model,
            self.tokenizer,
            prompt,
            params,
            cache=self.cache,
            prefill_chunk=self.prefill_chunk,
        )
        answer = ""
        try:
            for token in tokens:
                answer += token.text
                yield token
        finally:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
