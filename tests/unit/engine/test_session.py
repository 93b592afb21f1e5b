"""A session feeds only what is new, and answers as if it fed everything: forked, rewound, saved, loaded elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from amount import amount
from mocks import STORED
from tiny import make_tiny_model
from torch import Tensor

from infer import SamplingParams, generate
from infer.backend import Row
from infer.backend.cpu.backend import CpuBackend
from infer.cache.pool import NoPages, pages_for
from infer.engine.memory import CacheMemory
from infer.engine.session import KIND, Encode, Message, Session
from infer.engine.store import read, write
from infer.models.common import Decoder

EOS = 63
GREEDY = SamplingParams(max_new_tokens=8)
ENDING = SamplingParams(max_new_tokens=8, logit_bias={EOS: 100.0})
SEEDED = SamplingParams(temperature=1.0, seed=5, max_new_tokens=8)
CONTEXT = 200
SIZE = 10**6  # bytes: of some 4,000 positions
PAGES = [1, 3, 64]
STORES = amount([(page, dtype) for page in PAGES for dtype in STORED], [(1, "int8"), (3, "float32"), (64, "int8")])
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


def memory_of(model: Decoder, dtype: str = "float32", page: int = 3, size: int = SIZE, **options: Any) -> CacheMemory:
    return CacheMemory(model, size, cache_dtype="int8" if dtype == "int8" else "auto", page=page, **options)


@pytest.fixture(params=STORES, ids=str)
def memory(request: pytest.FixtureRequest, model: Watched) -> CacheMemory:
    page, dtype = request.param
    return memory_of(model.model, dtype, page)


def another(memory: CacheMemory) -> CacheMemory:
    """One like it, which remembers nothing."""
    dtype = "int8" if memory.pool.dtype is torch.int8 else "float32"
    return memory_of(memory.model, dtype, memory.pool.page)  # type: ignore[arg-type]


class Chat(Session):
    watched: Watched


def talk(model: Watched, memory: CacheMemory, encode: Encode = rendered, **options: Any) -> Chat:
    chat = Chat(model.model, Letters(), encode=encode, memory=memory, **{"context": CONTEXT} | options)
    chat.watched = model
    return chat


def fresh(chat: Chat, text: str, params: SamplingParams = GREEDY) -> list[int]:
    """What a run that remembers nothing answers; from a cache if that rounds, or there is nothing to compare with."""
    prompt = chat.encode([*chat.messages, {"role": "user", "content": text}])
    how: dict[str, Any] = {"cache_dtype": "int8"} if chat.cache.quantized else {"use_kv_cache": False}
    chat.watched.resting = True
    tokens = generate(chat.model, Letters(), prompt, params, **how).token_ids
    chat.watched.resting = False
    return tokens


def say(chat: Chat, text: str, params: SamplingParams = GREEDY) -> list[int]:
    """Take a turn, and check that it is kept and is what a fresh run gives."""
    before = list(chat.messages)
    expected = fresh(chat, text, params)
    steps = list(chat.stream(text, params))
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
    model: Watched, memory: CacheMemory, encode: Encode, params: SamplingParams
) -> None:
    chat = talk(model, memory, encode)
    for text in TURNS[:3]:
        say(chat, text, params)


def test_only_new_tokens_are_fed(model: Watched, memory: CacheMemory) -> None:
    chat = talk(model, memory)
    held: list[int] = []
    finished = set()
    for text in TURNS:
        prompt = rendered([*chat.messages, {"role": "user", "content": text}])
        assert prompt[: len(held)] == held
        model.fed.clear()
        steps = list(chat.stream(text, ENDING if text == TURNS[1] else GREEDY))
        tokens = [step.token_id for step in steps]
        assert model.fed == [prompt[len(held) :], *([token] for token in tokens[:-1])]
        held = prompt + tokens[:-1]
        assert chat.cache.seq_len == len(held)
        finished.add(steps[-1].finish_reason)
    assert finished == {"length", "eos"}


def test_end_of_sequence_is_part_of_the_history(model: Watched, memory: CacheMemory) -> None:
    """The token that ends an answer is the template's own, so nothing is fed twice after it either."""
    chat = talk(model, memory)
    assert [step.token_id for step in chat.stream("HI", ENDING)] == [EOS]
    held = chat.cache.seq_len
    prompt = rendered([*chat.messages, {"role": "user", "content": "YES"}])
    model.fed.clear()
    list(chat.stream("YES", GREEDY))
    assert model.fed[0] == prompt[held:]


def test_stop_strings_do_not_stay_in_the_history(model: Watched, memory: CacheMemory) -> None:
    chat = talk(model, memory)
    plain = {"max_new_tokens": 8, "ignore_eos": True}
    answer = Letters().decode(fresh(chat, "HELLO", SamplingParams(**plain)))
    stop = answer[4:6]
    say(chat, "HELLO", SamplingParams(**plain, stop=stop))
    assert chat.messages[-1]["content"] == answer[: answer.index(stop)]
    say(chat, "GO ON")


def test_a_prompt_that_is_held_already(model: Watched, memory: CacheMemory) -> None:
    """One token must be fed all the same, for logits."""
    chat = talk(model, memory, last_message_only)
    first = say(chat, "HELLO")
    model.fed.clear()
    assert say(chat, "HELLO") == first
    assert model.fed[0] == [rendered([])[-1]]


@pytest.mark.parametrize("taken", [1, 3])
def test_stopping_early_keeps_what_was_said(model: Watched, memory: CacheMemory, taken: int) -> None:
    chat = talk(model, memory)
    say(chat, "HELLO")
    expected = fresh(chat, "MORE")
    reply = chat.stream("MORE", GREEDY)
    said = [next(reply) for _ in range(taken)]
    reply.close()  # type: ignore[attr-defined]
    assert [step.token_id for step in said] == expected[:taken]
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(step.text for step in said)}
    say(chat, "GO ON")
    say(chat, "AND ON")


@pytest.mark.parametrize("when", ["break_before", "break_after", "inside"])
@pytest.mark.parametrize("number", [0, 2])
def test_interrupting_a_pass(
    model: Watched, memory: CacheMemory, when: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever Ctrl-C strikes, what is held still matches what is remembered."""
    chat = talk(model, memory)
    say(chat, "HELLO")
    expected = fresh(chat, "MORE")[:number]
    model.fed.clear()
    cache, attend = chat.cache, chat.cache.attend

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
            list(chat.stream("MORE", GREEDY))
    assert chat.messages[-1] == {"role": "assistant", "content": Letters().decode(expected)}
    say(chat, "GO ON")


def test_overflow_changes_nothing(model: Watched, memory: CacheMemory) -> None:
    chat = talk(model, memory)
    say(chat, "HELLO")
    messages, held = list(chat.messages), chat.cache.seq_len
    model.fed.clear()
    prompt = len(rendered([*messages, {"role": "user", "content": "X" * 190}]))
    message = rf"^{prompt} prompt tokens \+ 8 new tokens = {prompt + 8} positions exceed the cache's capacity of 200"
    with pytest.raises(ValueError, match=message):
        next(iter(chat.stream("X" * 190, GREEDY)))
    assert (chat.messages, chat.cache.seq_len, model.fed) == (messages, held, [])
    say(chat, "SHORTER")


def test_reset(model: Watched, memory: CacheMemory) -> None:
    """The memory remembers what the session does not."""
    chat = talk(model, memory)
    first = [say(chat, text) for text in TURNS[:2]]
    chat.reset()
    assert (chat.messages, chat.turns, chat.cache.seq_len) == ([], 0, 0)
    model.fed.clear()
    assert [say(chat, text) for text in TURNS[:2]] == first
    assert model.fed[0] == [rendered([])[-1]]
    chat.reset()
    chat.reset()


@pytest.mark.parametrize("system", ["BE BRIEF", ""])
def test_system_message(model: Watched, memory: CacheMemory, system: str) -> None:
    """Also an empty one: some templates put in their own where there is none."""
    chat = talk(model, memory, system=system)
    assert chat.messages == [{"role": "system", "content": system}]
    say(chat, "HELLO")
    assert model.fed[0] == rendered([{"role": "system", "content": system}, {"role": "user", "content": "HELLO"}])
    chat.reset()
    assert chat.messages == [{"role": "system", "content": system}]


def test_default_params(model: Watched) -> None:
    """As for `generate`: up to 256 tokens, which this context has no room for."""
    chat = talk(model, memory_of(model.model))
    with pytest.raises(ValueError, match=r"\+ 256 new tokens"):
        chat.stream("HELLO")
    assert [step.token_id for step in talk(model, chat.memory, params=GREEDY).stream("HELLO")] == fresh(chat, "HELLO")


class TestChunks:
    @pytest.mark.parametrize("chunk", [1, 4, 100])
    def test_replies_are_those_of_a_fresh_run(self, model: Watched, memory: CacheMemory, chunk: int) -> None:
        chat = talk(model, memory, prefill_chunk=chunk)
        for text in TURNS[:3]:
            model.fed.clear()
            new = len(rendered([*chat.messages, {"role": "user", "content": text}])) - chat.cache.seq_len
            said = say(chat, text)
            sizes = [len(tokens) for tokens in model.fed]
            assert sizes[: len(sizes) - len(said) + 1] == [chunk] * (new // chunk) + [new % chunk] * bool(new % chunk)

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_interrupting_the_prefill(self, model: Watched, memory: CacheMemory, number: int) -> None:
        """The chunks that were fed stay, and are not fed again."""
        chat = talk(model, memory, prefill_chunk=2)
        say(chat, "HELLO")
        held = chat.cache.seq_len
        model.fed.clear()
        model.break_before = number
        with pytest.raises(KeyboardInterrupt):
            list(chat.stream("AND SO ON", GREEDY))
        model.break_before = None
        assert chat.cache.seq_len == held + 2 * number
        say(chat, "GO ON")

    @pytest.mark.parametrize("chunk", [0, 1.5])
    def test_refused(self, model: Watched, memory: CacheMemory, chunk: Any) -> None:
        with pytest.raises(ValueError, match="prefill_chunk must be"):
            talk(model, memory, prefill_chunk=chunk)
        assert model.fed == []


class TestWindows:
    """A model whose first layer sees six positions: their pages are let go of within one turn."""

    @pytest.fixture
    def model(self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> Watched:
        return Watched(tiny_model(eos_token_ids=(EOS,), **WINDOWS), monkeypatch)

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    @pytest.mark.parametrize("encode", ENCODERS)
    def test_replies_are_those_of_a_fresh_run(
        self, model: Watched, memory: CacheMemory, encode: Encode, params: SamplingParams
    ) -> None:
        chat = talk(model, memory, encode)
        for text in TURNS[:3]:
            say(chat, text, params)

    def test_only_new_tokens_are_fed_while_the_history_stays(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory)
        for text in TURNS[:3]:
            held = chat.cache.seq_len
            prompt = rendered([*chat.messages, {"role": "user", "content": text}])
            model.fed.clear()
            say(chat, text)
            assert model.fed[0] == prompt[held:]

    def test_what_the_cache_has_lost_is_found(self, model: Watched, memory: CacheMemory) -> None:
        """A template that drops earlier answers asks for a truncation, which a cache without these pages refuses."""
        chat = talk(model, memory, without_earlier_answers)
        say(chat, "HELLO")
        before = without_earlier_answers([{"role": "user", "content": "HELLO"}])
        prompt = without_earlier_answers([*chat.messages, {"role": "user", "content": "GO ON"}])
        keep = len(before)  # "U:HELLO_A:" stays, the answer goes
        assert prompt[:keep] == before
        assert chat.cache.seq_len > keep
        model.fed.clear()
        say(chat, "GO ON")
        assert model.fed[0] == prompt[keep:]

    def test_stopping_early(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory, prefill_chunk=3)
        reply = chat.stream("A QUESTION OF SOME LENGTH", GREEDY)
        next(reply)
        reply.close()  # type: ignore[attr-defined]
        say(chat, "GO ON")
        chat.reset()
        assert chat.cache.seq_len == 0
        say(chat, "AGAIN")

    def test_rewind_and_fork(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory)
        for text in TURNS[:3]:
            say(chat, text)
        twin = chat.fork()
        chat.rewind(2)
        say(chat, "OTHERWISE")
        say(twin, "AND ON")
        twin.rewind(1)
        say(twin, "OR ELSE")

    def test_save_and_load(self, model: Watched, memory: CacheMemory, tmp_path: Path) -> None:
        chat = talk(model, memory)
        say(chat, "A QUESTION OF SOME LENGTH")
        chat.save(tmp_path / "chat")
        other = load(model, tmp_path / "chat", another(memory))
        assert_goes_on(chat, other)

    @pytest.mark.parametrize("window", [1, 2])
    @pytest.mark.parametrize("kept", [0, 1])
    def test_saved_after_a_rewind(
        self, monkeypatch: pytest.MonkeyPatch, window: int, kept: int, tmp_path: Path
    ) -> None:
        """Of a window of one position nothing is held then."""
        model = Watched(make_tiny_model(eos_token_ids=(EOS,), **WINDOWS | {"sliding_window": window}), monkeypatch)
        chat = talk(model, memory_of(model.model, page=4))
        for text in TURNS[:3]:
            say(chat, text)
        chat.truncate(kept)
        chat.save(tmp_path / "chat")
        assert_goes_on(chat, load(model, tmp_path / "chat", memory_of(model.model, page=4)))


def test_send(model: Watched, memory: CacheMemory) -> None:
    chat = talk(model, memory, params=GREEDY)
    expected, prompt = fresh(chat, "HELLO"), rendered([{"role": "user", "content": "HELLO"}])
    result = chat.send("HELLO")
    assert (result.prompt_token_ids, result.token_ids) == (prompt, expected)
    assert (result.text, result.finish_reason) == (chat.messages[-1]["content"], "eos")
    assert result.cache_memory_bytes == chat.cache.memory_bytes > 0
    assert chat.send("HI", ENDING).finish_reason == "eos"
    assert chat.turns == 2


class TestFork:
    def test_twins(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory, system="BE BRIEF")
        say(chat, "HELLO")
        twin, used = fork(chat), used_pages(memory)
        assert twin.messages == chat.messages
        for text in ("AND THEN?", "WHY"):
            say(chat, text)
            say(twin, text + " NOT")
            assert chat.messages != twin.messages
        assert used_pages(memory) > used

    def test_costs_no_page(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory)
        say(chat, "HELLO")
        used = used_pages(memory)
        twins = [fork(chat) for _ in range(50)]
        assert used_pages(memory) == used
        for twin in twins[:3]:
            say(twin, "AND THEN?")  # each feeds its own, and remembers what the first has found
        del twins, twin
        memory.index.clear()
        assert used_pages(memory) == chat.cache.held == used

    def test_forks_of_forks(self, model: Watched, memory: CacheMemory) -> None:
        family = [talk(model, memory)]
        for number in range(4):
            say(family[-1], f"TURN {number}")
            family.append(fork(family[-1]))
        for number, chat in enumerate(reversed(family)):
            say(chat, f"LAST {number}")
        assert [chat.turns for chat in family] == [2, 3, 4, 5, 5]

    def test_interrupted(self, model: Watched, memory: CacheMemory) -> None:
        """A twin that is left in the middle of a pass takes nothing from the other."""
        chat = talk(model, memory)
        say(chat, "HELLO")
        twin = fork(chat)
        model.break_after = len(model.fed) + 1
        with pytest.raises(KeyboardInterrupt):
            list(twin.stream("AND SO ON", GREEDY))
        model.break_after = None
        say(chat, "AND SO ON")
        say(twin, "GO ON")


class TestRewind:
    @pytest.mark.parametrize("turns", [0, 1, 2, 3])
    def test_as_if_never_said(self, model: Watched, memory: CacheMemory, turns: int) -> None:
        one, other = talk(model, memory), talk(model, memory)
        for text in TURNS[:3]:
            say(one, text)
            say(other, text)
        one.rewind(turns)
        other.truncate(3 - turns)
        assert one.messages == other.messages
        assert one.turns == other.turns == 3 - turns
        for chat in (one, other):
            say(chat, "OTHERWISE")
            say(chat, TURNS[3])

    def test_what_is_kept_is_not_fed_again(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory)
        say(chat, "HELLO")
        held = chat.cache.seq_len
        say(chat, "AND THEN?")
        chat.rewind()
        assert chat.cache.seq_len == held
        model.fed.clear()
        prompt = rendered([*chat.messages, {"role": "user", "content": "WHY"}])
        say(chat, "WHY")
        assert model.fed[0] == prompt[held + len("_U:") :]  # as far as the memory knows another turn

    @pytest.mark.parametrize("turns", [-1, 3, 1.0, True, None, "1"])
    def test_refused(self, model: Watched, turns: Any) -> None:
        chat = talk(model, memory_of(model.model), system="BE BRIEF")
        for text in TURNS[:2]:
            say(chat, text)
        messages, held = list(chat.messages), chat.cache.seq_len
        for change in (chat.rewind, chat.truncate):
            with pytest.raises(ValueError, match=f"cannot (rewind|keep) {turns!r} of 2 turns"):
                change(turns)
        assert (chat.messages, chat.turns, chat.cache.seq_len) == (messages, 2, held)
        chat.rewind(2)
        assert chat.messages == [{"role": "system", "content": "BE BRIEF"}]


class TestSharing:
    SYSTEM = "YOU ANSWER AT LENGTH, AND NEVER SAY WHAT YOU DO NOT KNOW"

    def test_a_system_prompt_is_held_once(self, model: Watched, memory: CacheMemory) -> None:
        one, other = (talk(model, memory, system=self.SYSTEM) for _ in range(2))
        say(one, "HELLO")
        model.fed.clear()
        say(other, "BYE")
        common = len(f"S:{self.SYSTEM}_U:")
        prompt = rendered([*other.messages[:2]])
        assert model.fed[0] == prompt[common:]
        held = [{*chat.cache.pages[chat.cache.pages >= 0].tolist()} for chat in (one, other)]
        assert len(held[0] & held[1]) == common // memory.pool.page
        assert used_pages(memory) == len(held[0] | held[1])

    def test_a_session_that_is_gone(self, model: Watched, memory: CacheMemory) -> None:
        first = say(talk(model, memory, system=self.SYSTEM), "HELLO")
        model.fed.clear()
        assert say(talk(model, memory, system=self.SYSTEM), "HELLO") == first
        assert model.fed[0] == [rendered([])[-1]]

    @pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "windows"])
    @pytest.mark.parametrize("page", PAGES)
    def test_a_small_pool(self, monkeypatch: pytest.MonkeyPatch, windows: dict[str, Any], page: int) -> None:
        """What is forgotten is computed again, and sessions that go on lose nothing."""
        model = Watched(make_tiny_model(eos_token_ids=(EOS,), **windows), monkeypatch)
        context = 100
        per_page = memory_of(model.model, page=page).pool.page_bytes
        size = per_page * (pages_for(model.config, context, page) + 1 + 128 // page)
        memory = memory_of(model.model, page=page, size=size)
        stays = talk(model, memory, context=context)
        first = [say(stays, "I STAY")]
        for number in range(6):
            chat = talk(model, memory, context=context)
            for text in (f"{number} IS MY NUMBER", "AND YOURS?"):
                first.append(say(chat, text))
        del chat
        model.fed.clear()
        again = talk(model, memory, context=context)
        assert say(again, "0 IS MY NUMBER") == first[1]
        assert len(model.fed[0]) > 2  # it was gone
        say(stays, "AND GO ON")

    @pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "windows"])
    @pytest.mark.parametrize("page", [1, 3, 16])
    def test_all_memory_for_one(self, monkeypatch: pytest.MonkeyPatch, windows: dict[str, Any], page: int) -> None:
        """A context that is accepted can be filled, turn by turn."""
        model = Watched(make_tiny_model(eos_token_ids=(EOS,), **windows), monkeypatch)
        per_page = memory_of(model.model, page=page).pool.page_bytes
        for pages in range(1, 400):
            try:
                chat = talk(model, memory_of(model.model, page=page, size=per_page * pages), context=96)
                break
            except ValueError:
                continue
        while len(rendered([*chat.messages, {"role": "user", "content": "ON"}])) + 8 <= 96:
            say(chat, "ON")
        assert chat.turns > 5


def test_refused(model: Watched, tiny_model: Callable[..., Decoder]) -> None:
    memory = memory_of(model.model)
    for context in (0, 257, 1.5, True, "9"):
        with pytest.raises(ValueError, match="context must be from 1 to the model's 256"):
            talk(model, memory, context=context)
    with pytest.raises(ValueError, match="the memory is of another model"):
        talk(model, memory_of(tiny_model(1)))
    with pytest.raises(ValueError, match=r"200 positions take .* ask for a shorter context"):
        talk(model, memory_of(model.model, size=5000))


def load(model: Watched, path: Path, memory: CacheMemory, encode: Encode = rendered) -> Chat:
    chat = Chat.load(path, model.model, Letters(), memory=memory, encode=encode)
    chat.watched = model
    return chat


def assert_goes_on(chat: Chat, loaded: Chat) -> None:
    """Both answer alike, and nothing is prefilled again."""
    assert loaded.messages == chat.messages
    assert loaded.cache.contents.tokens(loaded.cache.seq_len) == chat.cache.contents.tokens(chat.cache.seq_len)
    for text in ("AND AFTER?", "WHY"):
        prompt = rendered([*chat.messages, {"role": "user", "content": text}])
        for each in (chat, loaded):
            each.watched.fed.clear()
            held = each.cache.seq_len
            say(each, text)
            fed = each.watched.fed[0]
            assert prompt[-len(fed) :] == fed
            assert len(fed) <= len(prompt) - held
    loaded.rewind(loaded.turns)
    assert loaded.messages == chat.messages[: len(loaded.messages)]


class TestSave:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "a chat.session"

    def test_goes_on(self, model: Watched, memory: CacheMemory, path: Path) -> None:
        params = SamplingParams(max_new_tokens=7, logit_bias={3: -float("inf")}, stop=["!!"], seed=2**64 - 1)
        chat = talk(model, memory, system="BE BRIEF", params=params, prefill_chunk=100)
        for text in TURNS[:2]:
            say(chat, text)
        chat.save(path)
        elsewhere = another(memory)
        loaded = load(model, path, elsewhere)
        assert (loaded.params, loaded.context, loaded.prefill_chunk, loaded.system) == (
            params,
            CONTEXT,
            100,
            "BE BRIEF",
        )
        assert used_pages(elsewhere) == loaded.cache.held
        model.fed.clear()
        expected = fresh(chat, "THREE", params)
        assert loaded.send("THREE").token_ids == expected
        assert loaded.fork().turns == 3
        loaded.rewind()
        assert_goes_on(chat, load(model, path, memory))  # beside the first

    def test_before_the_first_turn(self, model: Watched, memory: CacheMemory, path: Path) -> None:
        chat = talk(model, memory, system="BE BRIEF")
        chat.save(path)
        assert_goes_on(chat, load(model, path, memory))

    def test_any_text(self, model: Watched, path: Path) -> None:
        chat = talk(model, memory_of(model.model), lambda messages: [1, 2, 3], system='ünï\n"\\ \ud800 😀\0')
        list(chat.stream("\N{SNOWMAN}" * 100, GREEDY))
        chat.save(path)
        loaded = load(model, path, chat.memory, chat.encode)
        assert (loaded.messages, loaded.system) == (chat.messages, chat.system)

    def test_again_and_again(self, model: Watched, memory: CacheMemory, path: Path) -> None:
        chat = talk(model, memory)
        for text in TURNS:
            say(chat, text)
            chat.save(path)
            used = used_pages(memory)
            chat = load(model, path, memory)
            assert used_pages(memory) <= used + chat.cache.held
        assert [*path.parent.iterdir()] == [path]

    @pytest.mark.parametrize("name", ["a**b", "[x]", "x" * 200, ".hidden"])
    def test_any_name(self, model: Watched, tmp_path: Path, name: str) -> None:
        chat = talk(model, memory_of(model.model))
        say(chat, "HELLO")
        chat.save(str(tmp_path / name))
        load(model, tmp_path / name, chat.memory)

    def test_where_nothing_can_be_written(self, model: Watched, tmp_path: Path) -> None:
        chat = talk(model, memory_of(model.model))
        with pytest.raises(IsADirectoryError, match="is a folder, not a file"):
            chat.save(tmp_path)
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            chat.save(tmp_path / "none" / "chat")
        assert [*tmp_path.iterdir()] == []

    def test_a_save_that_fails(self, model: Watched, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The file that was there stays, and nothing else is left."""
        chat = talk(model, memory_of(model.model))
        say(chat, "HELLO")
        chat.save(path)
        before = path.read_bytes()
        say(chat, "MORE")

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        for name in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, full)
                with pytest.raises(OSError, match="No space left"):
                    chat.save(path)
            assert path.read_bytes() == before
            assert [*path.parent.iterdir()] == [path]

    @pytest.mark.parametrize("page", PAGES)
    @pytest.mark.parametrize("dtype", STORED)
    @pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "windows"])
    def test_nothing_of_others(
        self, monkeypatch: pytest.MonkeyPatch, page: int, dtype: str, windows: dict[str, Any], path: Path
    ) -> None:
        """Pages are not cleared when they change hands; what lies behind the end of the last one stays here."""
        model = Watched(make_tiny_model(eos_token_ids=(EOS,), **windows), monkeypatch)
        memory = memory_of(model.model, dtype, page)
        marker = 77 if dtype == "int8" else 1234.5
        memory.pool.memory.fill_(marker)
        chat = talk(model, memory)
        for text in TURNS[:2]:
            say(chat, text)
            twin = fork(chat)  # has a copy of the last page, with what lay behind
            say(twin, "HI")
            twin.rewind()
            for each in (chat, twin):
                each.save(path)
                pages = read(path, KIND)[1]["pages"]
                assert not (pages == marker).all(-1).any()
                used = each.cache.seq_len % page
                assert not used or not pages[-1, :, :, :, used:].any()
        stored = np.full(8, marker, np.int8 if dtype == "int8" else np.float32).tobytes()
        assert stored not in path.read_bytes()

    def test_another_process(self, model: Watched, path: Path) -> None:
        chat = talk(model, memory_of(model.model, page=16), params=GREEDY)
        for text in TURNS[:2]:
            say(chat, text)
        chat.save(path)
        held, prompt = chat.cache.seq_len, chat._prompt("WHY")
        answer = json.loads(python(ELSEWHERE, str(path)))
        expected = fresh(chat, "WHY")
        assert answer["tokens"] == expected
        assert answer["fed"] == [prompt[held:], *([token] for token in expected[:-1])]
        assert answer["messages"] == chat.messages

    def test_killed(self, tmp_path: Path) -> None:
        """At any moment, while it writes over a file: that one is there still, or the next."""
        assert python(KILLED, str(tmp_path / "chat"), str(amount(200, 25))) == "always whole\n"


class TestLoadRefuses:
    """With one line, and without keeping a page."""

    @pytest.fixture
    def chat(self, model: Watched) -> Chat:
        chat = talk(model, memory_of(model.model, page=4), system="BE BRIEF", params=GREEDY)
        for text in TURNS[:2]:
            chat.send(text)
        return chat

    @pytest.fixture
    def path(self, chat: Chat, tmp_path: Path) -> Path:
        chat.save(tmp_path / "chat")
        return tmp_path / "chat"

    def refuse(self, path: Path, memory: CacheMemory, match: str | None = None, error: Any = ValueError) -> None:
        free, size = memory.pool.free, len(memory.index)
        with pytest.raises(error, match=match) as caught:
            Session.load(path, memory.model, Letters(), memory=memory, encode=rendered)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        assert (memory.pool.free, len(memory.index)) == (free, size)
        memory.index.check()

    @pytest.mark.parametrize(
        ("changes", "how"),
        [
            ({"seed": 1}, {}),
            ({"intermediate_size": 40}, {}),
            ({"num_hidden_layers": 3}, {}),
            ({"vocab_size": 80}, {}),
            ({"eos_token_ids": (1,)}, {}),
            ({}, {"dtype": "int8"}),
            ({"dtype": torch.bfloat16}, {}),
            ({}, {"page": 5}),
            (WINDOWS, {}),
        ],
        ids=["weights", "shape", "layers", "vocabulary", "config", "int8", "bfloat16", "page", "windows"],
    )
    def test_another_model(self, path: Path, changes: dict[str, Any], how: dict[str, Any]) -> None:
        model = make_tiny_model(**{"eos_token_ids": (EOS,)} | changes)
        self.refuse(path, memory_of(model, **{"page": 4} | how), "is a session with another model, dtype")

    def test_int8_as_float(self, model: Watched, tmp_path: Path) -> None:
        chat = talk(model, memory_of(model.model, "int8"))
        say(chat, "HELLO")
        chat.save(tmp_path / "chat")
        self.refuse(tmp_path / "chat", memory_of(model.model), "another model, dtype")

    def test_truncated(self, path: Path, chat: Chat) -> None:
        whole = path.read_bytes()
        for length in sorted({0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1, *range(0, len(whole), 997)}):
            path.write_bytes(whole[:length])
            self.refuse(path, chat.memory, "is damaged|is no session")

    def test_a_flipped_byte(self, path: Path, chat: Chat) -> None:
        """Is found, or changes nothing."""
        whole = path.read_bytes()
        step = amount(1, max(1, len(whole) // 150))
        start = int.from_bytes(whole[:8], "little") + 8
        for at in (*range(0, start, amount(1, 7)), *range(start, len(whole), step)):
            for bit in (1, 128):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
                memory = memory_of(chat.model, page=4, size=10**5)
                try:
                    loaded = Session.load(path, chat.model, Letters(), memory=memory, encode=rendered)
                except ValueError as error:
                    assert "\n" not in str(error)  # noqa: PT017
                    assert memory.pool.free == memory.pool.count
                else:
                    assert (loaded.messages, loaded._starts) == (chat.messages, chat._starts)
                    assert (loaded.params, loaded.context) == (chat.params, chat.context)
                    dumps = [each.memory.dump(each.cache) for each in (loaded, chat)]
                    assert all(torch.equal(dumps[0][name], dumps[1][name]) for name in dumps[0])

    @pytest.mark.parametrize(
        ("contents", "match"),
        [
            (b"", "is damaged, or no session"),
            (b"HELLO", "is damaged, or no session"),
            (b"\0" * 1000, "is damaged, or no session"),
            (b"\xff" * 1000, "is damaged, or no session"),
            (b'{"messages": []}', "is damaged, or no session"),
            ((2).to_bytes(8, "little") + b"{}", "is no session of infer's"),
        ],
    )
    def test_not_a_session(self, chat: Chat, tmp_path: Path, contents: bytes, match: str) -> None:
        path = tmp_path / "other"
        path.write_bytes(contents)
        self.refuse(path, chat.memory, match)

    def test_another_kind(self, chat: Chat, tmp_path: Path) -> None:
        path = tmp_path / "page"
        write(path, "page", {"pages": torch.zeros(3)}, {"groups": "[0]"})
        self.refuse(path, chat.memory, "is no session of infer's")

    def test_another_version(self, chat: Chat, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.engine.store.VERSION", "0")
        chat.save(path)
        monkeypatch.undo()
        self.refuse(path, chat.memory, "was written by another version of infer: '0'")

    def test_no_file(self, chat: Chat, tmp_path: Path) -> None:
        for path in (tmp_path / "none", tmp_path / "none" / "chat"):
            self.refuse(path, chat.memory, "there is no file", FileNotFoundError)
        self.refuse(tmp_path, chat.memory, "is a folder, not a session", IsADirectoryError)

    def test_no_room(self, path: Path, chat: Chat) -> None:
        memory = memory_of(chat.model, page=4, size=chat.memory.pool.page_bytes * 60)
        held = memory.pool.take(55)
        with pytest.raises(NoPages, match="no memory is left"):
            Session.load(path, chat.model, Letters(), memory=memory, encode=rendered)
        assert memory.pool.free == 5
        memory.pool.release(held)
        Session.load(path, chat.model, Letters(), memory=memory, encode=rendered)
        small = memory_of(chat.model, page=4, size=chat.memory.pool.page_bytes * 40)
        self.refuse(path, small, "give caches more memory")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[("messages", value) for value in ("", "{", "null", "5", '"text"', "{}", "[]", "[5]", "[[]]", "[null] ")],
            ("messages", "[" * 100_000),
            ("messages", "9" * 5000),
            ("turns", "[" * 100_000),
            ("settings", '{"a":' * 100_000),
            *[("turns", value) for value in ("", "null", "{}", "[0]", "[0, 1, 2]", "[0, -1]", "[0, 201]", "[0, 1e9]")],
            *[("turns", value) for value in ('["0", "1"]', "[0, true]", "[0, 1.0]", "[0, NaN]", "[[0], [1]]")],
            *[("settings", value) for value in ("", "null", "[]", "5", "{}", '{"params": {}}', '{"params": null}')],
            ("model", ""),
        ],
    )
    def test_hostile_header(self, path: Path, chat: Chat, name: str, value: str) -> None:
        tamper(path, header={name: value})
        self.refuse(path, chat.memory)

    @pytest.mark.parametrize("name", ["messages", "turns", "settings", "model"])
    def test_missing_header(self, path: Path, chat: Chat, name: str) -> None:
        tamper(path, header={name: None})
        self.refuse(path, chat.memory)

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "user", "content": 5},
            {"role": "user", "content": None},
            {"role": "user", "content": ["HELLO"]},
            {"role": 1, "content": "HELLO"},
            {"role": "user"},
            {"content": "HELLO"},
            {},
            {"role": "assistant", "content": "HELLO"},  # where the user speaks
            {"role": "owner", "content": "HELLO"},
            {"role": "user", "content": "HELLO", "name": "x"},
        ],
    )
    def test_hostile_messages(self, path: Path, chat: Chat, message: Any) -> None:
        messages = [chat.messages[0], message, *chat.messages[2:]]
        tamper(path, header={"messages": json.dumps(messages)})
        self.refuse(path, chat.memory)

    @pytest.mark.parametrize(
        "changes",
        [
            {"context": 10**9},
            {"context": 2**70},
            {"context": 1e400},
            {"context": 0},
            {"context": -1},
            {"context": "200"},
            {"context": True},
            {"context": 10},  # fewer than it holds
            {"prefill_chunk": 0},
            {"prefill_chunk": -4},
            {"prefill_chunk": 1.5},
            {"prefill_chunk": "4"},
            {"unknown": 1},
            {"memory": None},
            {"encode": None},
            {"system": None},  # the messages begin with one
            {"system": 5},
            {"system": ["BE BRIEF"]},
            {"params": 5},
            {"params": []},
            {"params": {"logit_bias": 5}},
            {"params": {"logit_bias": {"x": 1}}},
            {"params": {"logit_bias": {}, "unknown": 1}},
            {"params": {"logit_bias": {}, "temperature": -1}},
            {"params": {"logit_bias": {}, "temperature": "hot"}},
            {"params": {"logit_bias": {}, "temperature": float("nan")}},
            {"params": {"logit_bias": {}, "max_new_tokens": 10**400}},
            {"params": {"logit_bias": {}, "stop": 5}},
            {"params": {"logit_bias": {}, "seed": 2**64}},
        ],
        ids=str,
    )
    def test_hostile_settings(self, path: Path, chat: Chat, changes: dict[str, Any]) -> None:
        settings = json.loads(read(path, KIND)[0]["settings"])
        tamper(path, header={"settings": json.dumps(settings | changes)})
        self.refuse(path, chat.memory)

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: {"tokens": t["tokens"].where(t["tokens"] != t["tokens"][0], 64)},
            lambda t: {"tokens": t["tokens"].where(t["tokens"] != t["tokens"][0], -1)},
            lambda t: {"tokens": t["tokens"].where(t["tokens"] != t["tokens"][0], 2**62)},
            lambda t: {"tokens": t["tokens"].int()},
            lambda t: {"tokens": t["tokens"].float()},
            lambda t: {"tokens": t["tokens"][None]},
            lambda t: {"tokens": t["tokens"][0]},
            lambda t: {"tokens": t["tokens"][:0]},
            lambda t: {"tokens": t["tokens"][:-5]},
            lambda t: {"tokens": t["tokens"].repeat(9)},
            lambda t: {"tokens": None},
            lambda t: {"pages": None},
            lambda t: {"pages": t["pages"][:-1]},
            lambda t: {"pages": t["pages"][:0]},
            lambda t: {"pages": t["pages"].half()},
            lambda t: {"pages": t["pages"].flatten()},
            lambda t: {"pages": t["pages"].transpose(3, 4).contiguous()},
            lambda t: {"numbers": None},
            lambda t: {"numbers": t["numbers"] + 1},
            lambda t: {"numbers": t["numbers"].flip(0)},
            lambda t: {"numbers": t["numbers"].int()},
            lambda t: {"numbers": t["numbers"].flatten()},
            lambda t: {"numbers": t["numbers"] * 0},
            lambda t: {"numbers": t["numbers"] * 0 - 1},
            lambda t: {"numbers": t["numbers"] - 2},
            lambda t: {"numbers": t["numbers"] - 1},
            lambda t: {"numbers": t["numbers"] + 2**40},
            lambda t: {"numbers": t["numbers"][:-1]},
            lambda t: {"numbers": t["numbers"] - 1, "pages": t["pages"][1:]},  # the first is missing
        ],
    )
    def test_hostile_tensors(self, path: Path, chat: Chat, change: Callable[[dict[str, Tensor]], Any]) -> None:
        tamper(path, tensors=change(read(path, KIND)[1]))
        self.refuse(path, chat.memory)

    def test_windows(self, tmp_path: Path) -> None:
        """Pages that the next token sees must be there; others may be missing."""
        model, path = make_tiny_model(**WINDOWS), tmp_path / "chat"
        chat = Session(model, Letters(), memory=memory_of(model, page=2), encode=rendered, context=CONTEXT)
        chat.send("HELLO", GREEDY)
        chat.save(path)
        numbers, pages = (read(path, KIND)[1][name] for name in ("numbers", "pages"))
        gone = numbers.clone()
        gone[-1][gone[-1] == gone.max()] = -1
        tamper(path, tensors={"numbers": gone, "pages": pages[:-1]})
        self.refuse(path, chat.memory, "some of its pages are missing")


def tamper(path: Path, header: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> None:
    """Change a session as one who knows the format can. None: leave it out."""
    old_header, old_tensors = read(path, KIND)
    for name in ("format", "version"):
        del old_header[name]
    changed = [
        {name: value for name, value in (old | (new or {})).items() if value is not None}
        for old, new in ((old_header, header), (old_tensors, tensors))
    ]
    write(path, KIND, changed[1], changed[0])


def fork(chat: Chat) -> Chat:
    twin = chat.fork()
    assert isinstance(twin, Chat)
    return twin


def used_pages(memory: CacheMemory) -> int:
    return memory.pool.count - memory.pool.free


def python(script: str, *arguments: str) -> str:
    """What a script prints, in a process of its own."""
    tests = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(Path(__file__).parent)])}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


ELSEWHERE = """
import json, sys
import pytest
from test_session import EOS, Letters, Watched, make_tiny_model, memory_of, rendered
from infer.engine.session import Session

model = Watched(make_tiny_model(eos_token_ids=(EOS,)), pytest.MonkeyPatch())
chat = Session.load(sys.argv[1], model.model, Letters(), memory=memory_of(model.model, page=16), encode=rendered)
messages = list(chat.messages)
tokens = chat.send("WHY").token_ids
print(json.dumps({"tokens": tokens, "fed": model.fed, "messages": messages}))
"""

# One process forks those that are killed: importing torch takes longer than they live.
KILLED = """
import os, random, signal, sys, time
os.environ["INFER_KERNELS"] = "0"  # a forked process cannot run them
import torch
torch.set_num_threads(1)
from test_session import GREEDY, Letters, make_tiny_model, memory_of, rendered
from infer.engine.session import Session

path, times = sys.argv[1], int(sys.argv[2])
model = make_tiny_model()
chat = Session(model, Letters(), memory=memory_of(model, page=16), encode=rendered, context=200)
chat.send("HELLO", GREEDY)
longer = chat.fork()
longer.send("AND THEN? " * 8, GREEDY)
chat.save(path)
found = set()
for number in range(times):
    child = os.fork()
    if not child:
        while True:
            longer.save(path)
            chat.save(path)
    time.sleep(random.Random(number).uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    loaded = Session.load(path, model, Letters(), memory=memory_of(model, page=16), encode=rendered)
    assert loaded.messages in (chat.messages, longer.messages)
    assert loaded.cache.seq_len in (chat.cache.seq_len, longer.cache.seq_len)
    found.add(loaded.turns)
assert found == {1, 2}, found
print("always whole")
"""


class TestOneAnswerAtATime:
    def test_a_second_stream_waits(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory)
        first = chat.stream("HELLO", GREEDY)
        next(first)
        for other in (lambda: chat.stream("MORE", GREEDY), chat.reset, lambda: chat.save("nowhere")):
            with pytest.raises(ValueError, match="this session is answering"):
                other()
        twin = chat.fork()
        list(first)
        assert chat.turns == 1
        say(twin, "MORE")
        say(chat, "MORE")

    def test_a_stream_that_comes_late(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory)
        late = chat.stream("HELLO", GREEDY)
        say(chat, "FIRST")
        with pytest.raises(ValueError, match="something else was said"):
            next(late)
        say(chat, "SECOND")

    def test_a_turn_that_fails_was_not_said(self, model: Watched, memory: CacheMemory) -> None:
        chat = talk(model, memory)
        say(chat, "HELLO")
        before, held = list(chat.messages), chat.cache.seq_len
        spare = memory.pool.take(memory.pool.free)
        memory.index.clear()
        with pytest.raises(NoPages):
            list(chat.stream("X" * 120, GREEDY))
        assert (chat.messages, chat.turns) == (before, 1)
        assert chat.cache.seq_len <= held
        memory.pool.release(spare)
        say(chat, "X" * 20)
