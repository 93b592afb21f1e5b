"""Tokens as clients see them."""

from __future__ import annotations

from checkpoints import byte_tokenizer

from infer.engine.logprobs import TokenLogprobs
from infer.server.wire import MIN_LOGPROB, chat_logprobs, completion_logprobs, token_bytes, token_text


class Bytes:
    """The byte-level tokenizer of the tests."""

    def __init__(self) -> None:
        self.backend = byte_tokenizer()

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(self.backend.decode(tokens, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token: int) -> str | None:
        return self.backend.id_to_token(token)


def test_parts_of_characters_have_bytes() -> None:
    tokenizer = Bytes()
    ids = {token: token_bytes(tokenizer, token) for token in range(3, 120)}
    characters = [token for token in ids if token_text(tokenizer, token) != "\ufffd"]
    assert characters
    assert all(bytes(ids[token]).decode() == token_text(tokenizer, token) for token in characters)
    parts = [token for token in ids if token not in characters]
    assert parts
    assert all(len(ids[token]) == 1 and ids[token][0] > 127 for token in parts)


def test_a_probability_of_nothing_is_a_number() -> None:
    [found] = chat_logprobs([TokenLogprobs(5, -float("inf"), ((6, -0.5),))], Bytes())
    assert found["logprob"] == MIN_LOGPROB
    assert found["top_logprobs"][0]["logprob"] == -0.5


def test_tokens_with_the_same_text() -> None:
    """lm-eval takes the greatest of these for the most likely token's."""
    tokenizer = Bytes()
    first, second = [token for token in range(3, 120) if token_text(tokenizer, token) == "\ufffd"][:2]
    found = completion_logprobs([TokenLogprobs(first, -0.5, ((first, -0.5), (second, -2.0)))], [first], tokenizer, 0)
    assert found["top_logprobs"] == [{"\ufffd": -0.5}]
