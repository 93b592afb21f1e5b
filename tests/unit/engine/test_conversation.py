"""A chat that keeps its cache: it feeds only what is new, and answers as if it fed everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from mocks import CACHES, STORED
from torch import Tensor

from infer import SamplingParams, SlidingCache, generate
from infer.backend import Row
from infer.backend.cpu.backend import CpuBackend
from infer.cache import BaseCache
from infer.engine.conversation import Conversation, Encode, Message
from infer.models.common import Decoder

EOS = 63
GREEDY = SamplingParams(max_new_tokens=8)
ENDING = SamplingParams(max_new_tokens=8, logit_bias={EOS: 100.0})
SEEDED = SamplingParams(temperature=1.0, seed=5, max_new_tokens=8)
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
TURNS = ["HELLO", "AND THEN?", "WHY IS THAT", "HELLO"]


class Letters:
    """One token per character, 64 of them: text and tokens turn into each other without loss."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(32 + i) for i in token_ids)


class Watched:
    """Notes what a model is fed, and can break off before or after a chosen pass."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.config = model.config
        self.fed: list[list[int]] = []
        self.break_before: int | None = None  # the number of the pass
        self.break_after: int | None = None
        self.resting = False
        self.run = CpuBackend.run
        monkeypatch.setattr(CpuBackend, "run", lambda backend, rows: self.watch(backend, rows))

    def watch(self, backend: CpuBackend, rows: Sequence[Row]) -> list[Tensor]:
        if self.resting:
            return self.run(backend, rows)
        number = len(self.fed)
        self.fed.append(list(rows[0].tokens))
        if number == self.break_before:
            raise KeyboardInterrupt
        logits = self.run(backend, rows)
        if number == self.break_after:
            raise KeyboardInterrupt
        return logits


def rendered(messages: list[Message]) -> list[int]:
    """Every message ends with the end-of-sequence token, as chat templates have it."""
    turns = "".join(f"{message['role'][0].upper()}:{message['content']}_" for message in messages)
    return Letters().encode(f"{turns}A:")


def without_earlier_answers(messages: list[Message]) -> list[int]:
    return rendered([m | {"content": ""} if m["role"] == "assistant" else m for m in messages])


def with_other_answers(messages: list[Message]) -> list[int]:
    """As when text comes back as other tokens than were generated."""
    return rendered([m | {"content": m["content"][::-1]} if m["role"] == "assistant" else m for m in messages])


def last_message_only(messages: list[Message]) -> list[int]:
    return rendered(messages[-1:])


def counting_turns(messages: list[Message]) -> list[int]:
    """Nothing in common with the turn before."""
    return Letters().encode(f"{len(messages)} ") + rendered(messages)


ENCODERS = [rendered, without_earlier_answers, with_other_answers, last_message_only, counting_turns]


@pytest.fixture
def model(tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tiny_model(eos_token_ids=(EOS,)), monkeypatch)


@pytest.fixture(params=STORED)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest, dtype: str, model: Watched) -> BaseCache:
    return request.param.from_model_config(model.config, 200, dtype=dtype, device="cpu")


class Chat(Conversation):
    watched: Watched


def talk(model: Watched, cache: BaseCache, encode: Encode = rendered, **options: Any) -> Chat:
    chat = Chat(model.model, Letters(), encode, cache, **options)
    chat.watched = model
    return chat


def fresh(chat: Chat, text: str, params: SamplingParams = GREEDY) -> list[int]:
    """What a run that remembers nothing answers; from a cache if that rounds, or there is nothing to compare with."""
    prompt = chat.encode([*chat.messages, {"role": "user", "content": text}])
    how: dict[str, Any] = {"cache_dtype": "int8"} if chat.cache.quantized else {"use_kv_cache": False}  # type: ignore[attr-defined]
    chat.watched.resting = True
    tokens = generate(chat.model, Letters(), prompt, params, **how).token_ids
    chat.watched.resting = False
    return tokens


def say(chat: Chat, text: str, params: SamplingParams = GREEDY) -> list[int]:
    """Take a turn, and check that it is kept and is what a fresh run gives."""
    before = list(chat.messages)
    expected = fresh(chat, text, params)
    steps = list(chat.reply(text, params))
    assert [step.token_id for step in steps] == expected
    answer = "".join(step.text for step in steps)
    assert chat.messages == [
        *before,
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer},
    ]
    return expected


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("encode", ENCODERS)
def test_replies_are_those_of_a_fresh_run(
    model: Watched, cache: BaseCache, encode: Encode, params: SamplingParams
) -> None:
    chat = talk(model, cache, encode)
    for text in TURNS[:3]:
        say(chat, text, params)


def test_only_new_tokens_are_fed(model: Watched, cache: BaseCache) -> None:
    chat = talk(model, cache)
    held: list[int] = []
    finished = set()
    for text in TURNS:
        prompt = rendered([*chat.messages, {"role": "user", "content": text}])
        assert prompt[: len(held)] == held
        model.fed.clear()
        steps = list(chat.reply(text, ENDING if text == TURNS[1] else GREEDY))
        tokens = [step.token_id for step in steps]
        assert model.fed == [prompt[len(held) :], *([token] for token in tokens[:-1])]
        held = prompt + tokens[:-1]
        assert cache.seq_len == len(held)
        finished.add(steps[-1].finish_reason)
    assert finished == {"length", "eos"}


def test_end_of_sequence_is_part_of_the_history(model: Watched, cache: BaseCache) -> None:
    """The token that ends an answer is the template's own, so nothing is fed twice after it either."""
    chat = talk(model, cache)
    assert [step.token_id for step in chat.reply("HI", ENDING)] == [EOS]
    held = cache.seq_len
    prompt = rendered([*chat.messages, {"role": "user", "content": "YES"}])
    model.fed.clear()
    list(chat.reply("YES", GREEDY))
    assert model.fed[0] == prompt[held:]


def test_stop_strings_do_not_stay_in_the_history(model: Watched, cache: BaseCache) -> None:
    chat = talk(model, cache)
    plain = {"max_new_tokens": 8, "ignore_eos": True}
    answer = Letters().decode(fresh(chat, "HELLO", SamplingParams(**plain)))
    stop = answer[4:6]
    say(chat, "HELLO", SamplingParams(**plain, stop=stop))
    assert chat.messages[-1]["content"] == answer[: answer.index(stop)]
    say(chat, "GO ON")


def test_a_prompt_that_is_held_already(model: Watched, cache: BaseCache) -> None:
    """One token must be fed all the same, for logits."""
    chat = talk(model, cache, last_message_only)
    first = say(chat, "HELLO")
    model.fed.clear()
    assert say(chat, "HELLO") == first
    assert model.fed[0] == [rendered([])[-1]]


@pytest.mark.parametrize("taken", [1, 3])
def test_stopping_early_keeps_what_was_said(model: Watched, cache: BaseCache, taken: int) -> None:
    chat = talk(model, cache)
    say(chat, "HELLO")
    expected = fresh(chat, "MORE")
    reply = chat.reply("MORE", GREEDY)
    said = [next(reply) for _ in range(taken)]
    reply.close()  # type: ignore[attr-defined]
    assert [step.token_id for step in said] == expected[:taken]
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(step.text for step in said)}
    say(chat, "GO ON")
    say(chat, "AND ON")


@pytest.mark.parametrize("when", ["break_before", "break_after", "inside"])
@pytest.mark.parametrize("number", [0, 2])
def test_interrupting_a_pass(
    model: Watched, cache: BaseCache, when: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever Ctrl-C strikes, what is held still matches what is remembered."""
    chat = talk(model, cache)
    say(chat, "HELLO")
    expected = fresh(chat, "MORE")[:number]
    model.fed.clear()
    attend = cache.attend

    def interrupted(layer_idx: int, *args: Any, **options: Any) -> Tensor:
        if layer_idx == 1 and len(model.fed) == number + 1:
            raise KeyboardInterrupt
        return attend(layer_idx, *args, **options)

    with monkeypatch.context() as patch:
        if when == "inside":
            patch.setattr(cache, "attend", interrupted)
            patch.setattr(cache, "table", lambda *_: None)  # every layer attends
        else:
            patch.setattr(model, when, number)
        with pytest.raises(KeyboardInterrupt):
            list(chat.reply("MORE", GREEDY))
    assert chat.messages[-1] == {"role": "assistant", "content": Letters().decode(expected)}
    say(chat, "GO ON")


def test_overflow_changes_nothing(model: Watched, cache: BaseCache) -> None:
    chat = talk(model, cache)
    say(chat, "HELLO")
    messages, held = list(chat.messages), cache.seq_len
    model.fed.clear()
    prompt = len(rendered([*messages, {"role": "user", "content": "X" * 190}]))
    message = rf"^{prompt} prompt tokens \+ 8 new tokens = {prompt + 8} positions exceed the cache's capacity of 200"
    with pytest.raises(ValueError, match=message):
        next(iter(chat.reply("X" * 190, GREEDY)))
    assert (chat.messages, cache.seq_len, model.fed) == (messages, held, [])
    say(chat, "SHORTER")


def test_reset(model: Watched, cache: BaseCache) -> None:
    chat = talk(model, cache)
    first = [say(chat, text) for text in TURNS[:2]]
    chat.reset()
    assert (chat.messages, cache.seq_len) == ([], 0)
    assert [say(chat, text) for text in TURNS[:2]] == first


@pytest.mark.parametrize("system", ["BE BRIEF", ""])
def test_system_message(model: Watched, cache: BaseCache, system: str) -> None:
    """Also an empty one: some templates put in their own where there is none."""
    chat = talk(model, cache, system=system)
    assert chat.messages == [{"role": "system", "content": system}]
    say(chat, "HELLO")
    assert model.fed[0] == rendered([{"role": "system", "content": system}, {"role": "user", "content": "HELLO"}])
    chat.reset()
    assert chat.messages == [{"role": "system", "content": system}]


def test_default_params(model: Watched) -> None:
    """As for `generate`: up to 256 tokens, which this cache has no room for."""
    chat = talk(model, CACHES[0].from_model_config(model.config, 200, dtype="float32", device="cpu"))
    with pytest.raises(ValueError, match=r"\+ 256 new tokens"):
        next(iter(chat.reply("HELLO")))


class TestChunks:
    @pytest.mark.parametrize("chunk", [1, 4, 100])
    def test_replies_are_those_of_a_fresh_run(self, model: Watched, cache: BaseCache, chunk: int) -> None:
        chat = talk(model, cache, prefill_chunk=chunk)
        for text in TURNS[:3]:
            model.fed.clear()
            new = len(rendered([*chat.messages, {"role": "user", "content": text}])) - cache.seq_len
            said = say(chat, text)
            sizes = [len(tokens) for tokens in model.fed]
            assert sizes[: len(sizes) - len(said) + 1] == [chunk] * (new // chunk) + [new % chunk] * bool(new % chunk)

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_interrupting_the_prefill(self, model: Watched, cache: BaseCache, number: int) -> None:
        """The chunks that were fed stay, and are not fed again."""
        chat = talk(model, cache, prefill_chunk=2)
        say(chat, "HELLO")
        held = cache.seq_len
        model.fed.clear()
        model.break_before = number
        with pytest.raises(KeyboardInterrupt):
            list(chat.reply("AND SO ON", GREEDY))
        model.break_before = None
        assert cache.seq_len == held + 2 * number
        say(chat, "GO ON")

    @pytest.mark.parametrize("chunk", [0, 1.5])
    def test_refused(self, model: Watched, cache: BaseCache, chunk: Any) -> None:
        with pytest.raises(ValueError, match="prefill_chunk must be"):
            list(talk(model, cache, prefill_chunk=chunk).reply("HELLO", GREEDY))
        assert model.fed == []


class TestRing:
    """A model with windows and a ring that wraps within one turn."""

    @pytest.fixture
    def model(self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> Watched:
        return Watched(tiny_model(eos_token_ids=(EOS,), **WINDOWS), monkeypatch)

    @pytest.fixture(params=[1, 4, 512])
    def cache(self, request: pytest.FixtureRequest, dtype: str, model: Watched) -> BaseCache:
        ring = {"prefill_chunk": request.param, "dtype": dtype, "device": "cpu"}
        return SlidingCache.from_model_config(model.config, 200, **ring)

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    @pytest.mark.parametrize("encode", ENCODERS)
    def test_replies_are_those_of_a_fresh_run(
        self, model: Watched, cache: BaseCache, encode: Encode, params: SamplingParams
    ) -> None:
        chat = talk(model, cache, encode)
        for text in TURNS[:3]:
            say(chat, text, params)

    def test_only_new_tokens_are_fed_while_the_history_stays(self, model: Watched, cache: BaseCache) -> None:
        chat = talk(model, cache)
        for text in TURNS[:3]:
            held = cache.seq_len
            prompt = rendered([*chat.messages, {"role": "user", "content": text}])
            model.fed.clear()
            say(chat, text)
            assert model.fed[0] == prompt[held:]

    def test_what_the_ring_has_lost_is_fed_again(self, model: Watched, cache: BaseCache) -> None:
        """A template that drops earlier answers asks for a truncation, which a narrow ring must refuse."""
        chat = talk(model, cache, without_earlier_answers)
        say(chat, "HELLO")
        before = without_earlier_answers([{"role": "user", "content": "HELLO"}])
        prompt = without_earlier_answers([*chat.messages, {"role": "user", "content": "GO ON"}])
        keep = len(before)  # "U:HELLO_A:" stays, the answer goes
        assert prompt[:keep] == before
        assert cache.seq_len > keep
        model.fed.clear()
        wide = cache.k[0].shape[2] > cache.seq_len  # type: ignore[attr-defined]
        say(chat, "GO ON")
        assert model.fed[0] == (prompt[keep:] if wide else prompt)

    def test_stopping_early(self, model: Watched, cache: BaseCache) -> None:
        chat = talk(model, cache, prefill_chunk=3)
        reply = chat.reply("A QUESTION OF SOME LENGTH", GREEDY)
        next(reply)
        reply.close()  # type: ignore[attr-defined]
        say(chat, "GO ON")
        chat.reset()
        assert cache.seq_len == 0
        say(chat, "AGAIN")
