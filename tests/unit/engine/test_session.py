"""A session feeds only what is new, and answers as if it fed everything: forked, rewound, saved, loaded elsewhere.

Between turns it holds nothing: what others need in the meantime is computed again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from amount import amount
from mocks import STORED
from tiny import make_tiny_model
from torch import Tensor

from infer import LLM, SamplingParams, Trace, generate
from infer.backend import Row
from infer.backend.cpu.backend import CpuBackend
from infer.cache.paged import PagedCache
from infer.cache.pool import OutOfPages, pages_for
from infer.engine.memory import CacheMemory
from infer.engine.sequence import CacheExceeded
from infer.engine.session import KIND, Encode, Message, Session
from infer.engine.store import read, write
from infer.models.common import Decoder

EOS = 63
WAIT = 300.0  # seconds: longer than anything takes
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
    """Notes what a model is fed, and can interrupt whoever reads, as Ctrl-C does, before or after a chosen pass."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.config = model.config
        self.fed: list[list[int]] = []
        self.break_before: int | None = None  # the number of the pass
        self.break_after: int | None = None
        self.read = 0  # tokens that the reader has
        self.noticed = False  # whether the reader was interrupted
        self.struck, self.given_up = threading.Event(), threading.Event()
        self.hold_at: int | None = None  # the number of a pass that waits until it is let go
        self.let_go = threading.Event()
        self.resting = False
        self.run = CpuBackend.run
        monkeypatch.setattr(CpuBackend, "run", lambda backend, rows: self.watch(backend, rows))

    def watch(self, backend: CpuBackend, rows: Sequence[Row]) -> list[Tensor]:
        if self.resting:
            return self.run(backend, rows)
        number = len(self.fed)
        self.fed.append(list(rows[0].tokens))
        if number == self.hold_at:
            assert self.let_go.wait(WAIT)
        if number == self.break_before:
            self.interrupt(number)
        logits = self.run(backend, rows)
        if number == self.break_after:
            self.interrupt(number)
        return logits

    def interrupt(self, read: int) -> None:
        """Once so many tokens are read, and wait until the reader has given up."""
        wait_until(lambda: self.read >= read)
        wait_until(self._strike)
        self.struck.set()
        assert self.given_up.wait(WAIT)

    def _strike(self) -> bool:
        """Again until it is noticed: a signal that comes just before a thread falls asleep does not wake it."""
        if not self.noticed:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return self.noticed

    def read_until_interrupted(self, chat: Session, text: str) -> None:
        self.read = 0

        def read() -> None:
            with closing(chat.stream(text, GREEDY)) as reply:
                for _ in reply:
                    self.read += 1

        def notice(*_: Any) -> None:
            if not self.noticed:
                self.noticed = True
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, notice)
        with pytest.raises(KeyboardInterrupt):
            read()
        self.break_before = self.break_after = None
        self.given_up.set()
        assert self.struck.wait(WAIT)
        signal.signal(signal.SIGINT, before)


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
    return CacheMemory(model, size, cache_dtype="int8" if dtype == "int8" else "auto", page_size=page, **options)


def llm_of(
    model: Decoder, dtype: str = "float32", page: int = 3, size: int = SIZE, prefill_chunk: int | None = None
) -> LLM:
    return LLM(model, Letters(), memory=memory_of(model, dtype, page, size), prefill_chunk=prefill_chunk)


@pytest.fixture(params=STORES, ids=str)
def llm(request: pytest.FixtureRequest, model: Watched) -> LLM:
    page, dtype = request.param
    return llm_of(model.model, dtype, page)


def another(llm: LLM, prefill_chunk: int | None = None) -> LLM:
    """One like it, which remembers nothing."""
    pool = llm.memory.pool
    dtype = "int8" if pool.dtype is torch.int8 else "float32"
    return llm_of(llm.model, dtype, pool.page_size, prefill_chunk=prefill_chunk)  # type: ignore[arg-type]


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


def settle(llm: LLM) -> None:
    """Wait until nothing runs or waits."""
    wait_until(lambda: llm.between_steps(lambda engine: engine.is_idle).result())


def used_pages(llm: LLM) -> int:
    return llm.memory.pool.num_pages - llm.memory.pool.num_free_pages


class Chat(Session):
    watched: Watched


def talk(model: Watched, llm: LLM, encode: Encode = rendered, **options: Any) -> Chat:
    chat = Chat(llm, encode=encode, **{"context": CONTEXT} | options)
    chat.watched = model
    return chat


def fresh(chat: Chat, text: str, params: SamplingParams = GREEDY) -> list[int]:
    """What a run that remembers nothing answers; from a cache if that rounds, or there is nothing to compare with."""
    settle(chat.llm)
    prompt = chat.encode([*chat.messages, {"role": "user", "content": text}])
    rounds = chat.llm.memory.pool.dtype is torch.int8
    how: dict[str, Any] = {"cache_dtype": "int8"} if rounds else {"use_kv_cache": False}
    chat.watched.resting = True
    tokens = generate(chat.llm.model, Letters(), prompt, params, **how).token_ids
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
def test_replies_are_those_of_a_fresh_run(model: Watched, llm: LLM, encode: Encode, params: SamplingParams) -> None:
    chat = talk(model, llm, encode)
    for text in TURNS[:3]:
        say(chat, text, params)


def test_only_new_tokens_are_fed(model: Watched, llm: LLM) -> None:
    chat = talk(model, llm)
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
        assert len(chat.tokens) == len(held)
        finished.add(steps[-1].finish_reason)
    assert finished == {"length", "eos"}


def test_end_of_sequence_is_part_of_the_history(model: Watched, llm: LLM) -> None:
    """The token that ends an answer is the template's own, so nothing is fed twice after it either."""
    chat = talk(model, llm)
    assert [step.token_id for step in chat.stream("HI", ENDING)] == [EOS]
    held = len(chat.tokens)
    prompt = rendered([*chat.messages, {"role": "user", "content": "YES"}])
    model.fed.clear()
    list(chat.stream("YES", GREEDY))
    assert model.fed[0] == prompt[held:]


def test_stop_strings_do_not_stay_in_the_history(model: Watched, llm: LLM) -> None:
    chat = talk(model, llm)
    plain = {"max_new_tokens": 8, "ignore_eos": True}
    answer = Letters().decode(fresh(chat, "HELLO", SamplingParams(**plain)))
    stop = answer[4:6]
    say(chat, "HELLO", SamplingParams(**plain, stop=stop))
    assert chat.messages[-1]["content"] == answer[: answer.index(stop)]
    say(chat, "GO ON")


def test_a_prompt_that_is_held_already(model: Watched, llm: LLM) -> None:
    """One token must be fed all the same, for logits."""
    chat = talk(model, llm, last_message_only)
    first = say(chat, "HELLO")
    model.fed.clear()
    assert say(chat, "HELLO") == first
    assert model.fed[0] == [rendered([])[-1]]


@pytest.mark.parametrize("taken", [1, 3])
def test_stopping_early_keeps_what_was_said(model: Watched, llm: LLM, taken: int) -> None:
    chat = talk(model, llm)
    say(chat, "HELLO")
    expected = fresh(chat, "MORE")
    reply = chat.stream("MORE", GREEDY)
    said = [next(reply) for _ in range(taken)]
    reply.close()
    assert [step.token_id for step in said] == expected[:taken]
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(step.text for step in said)}
    say(chat, "GO ON")
    say(chat, "AND ON")


@pytest.mark.parametrize("when", ["break_before", "break_after", "inside"])
@pytest.mark.parametrize("number", [0, 2])
def test_interrupting_a_pass(model: Watched, llm: LLM, when: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever Ctrl-C strikes, what is held still matches what is remembered."""
    chat = talk(model, llm)
    say(chat, "HELLO")
    expected = fresh(chat, "MORE")[:number]
    model.fed.clear()
    attend = PagedCache.attend

    def interrupted(cache: PagedCache, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        if layer_idx == 1 and len(model.fed) == number + 1 and not model.given_up.is_set():
            model.interrupt(number)
        return attend(cache, layer_idx, *args, **options)

    with monkeypatch.context() as patch:
        if when == "inside":
            patch.setattr(PagedCache, "attend", interrupted)
            patch.setattr(PagedCache, "table", lambda *_: None)  # every layer attends
        else:
            setattr(model, when, number)
        model.read_until_interrupted(chat, "MORE")
        settle(llm)
    assert chat.messages[-1] == {"role": "assistant", "content": Letters().decode(expected)}
    say(chat, "GO ON")


def test_overflow_changes_nothing(model: Watched, llm: LLM) -> None:
    chat = talk(model, llm)
    say(chat, "HELLO")
    messages, held = list(chat.messages), len(chat.tokens)
    model.fed.clear()
    prompt = len(rendered([*messages, {"role": "user", "content": "X" * 190}]))
    message = rf"^{prompt} prompt tokens \+ 8 new tokens = {prompt + 8} positions exceed the cache's capacity of 200"
    with pytest.raises(ValueError, match=message):
        next(iter(chat.stream("X" * 190, GREEDY)))
    assert (chat.messages, len(chat.tokens), model.fed) == (messages, held, [])
    say(chat, "SHORTER")


def test_reset(model: Watched, llm: LLM) -> None:
    """The memory remembers what the session does not."""
    chat = talk(model, llm)
    first = [say(chat, text) for text in TURNS[:2]]
    chat.reset()
    assert (chat.messages, chat.turns, len(chat.tokens)) == ([], 0, 0)
    model.fed.clear()
    assert [say(chat, text) for text in TURNS[:2]] == first
    assert model.fed[0] == [rendered([])[-1]]
    chat.reset()
    chat.reset()


@pytest.mark.parametrize("system", ["BE BRIEF", ""])
def test_system_message(model: Watched, llm: LLM, system: str) -> None:
    """Also an empty one: some templates put in their own where there is none."""
    chat = talk(model, llm, system=system)
    assert chat.messages == [{"role": "system", "content": system}]
    say(chat, "HELLO")
    assert model.fed[0] == rendered([{"role": "system", "content": system}, {"role": "user", "content": "HELLO"}])
    chat.reset()
    assert chat.messages == [{"role": "system", "content": system}]


def test_default_params(model: Watched) -> None:
    """As for `generate`: up to 256 tokens, which this context has no room for."""
    chat = talk(model, llm_of(model.model))
    with pytest.raises(ValueError, match=r"\+ 256 new tokens"):
        chat.stream("HELLO")
    assert [step.token_id for step in talk(model, chat.llm, params=GREEDY).stream("HELLO")] == fresh(chat, "HELLO")


class TestChunks:
    @pytest.mark.parametrize("chunk", [1, 4, 100])
    def test_replies_are_those_of_a_fresh_run(self, model: Watched, llm: LLM, chunk: int) -> None:
        chat = talk(model, another(llm, chunk))
        for text in TURNS[:3]:
            model.fed.clear()
            new = len(rendered([*chat.messages, {"role": "user", "content": text}])) - len(chat.tokens)
            said = say(chat, text)
            sizes = [len(tokens) for tokens in model.fed]
            assert sizes[: len(sizes) - len(said) + 1] == [chunk] * (new // chunk) + [new % chunk] * bool(new % chunk)

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_interrupting_the_prefill(
        self, model: Watched, llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The chunks that were fed stay, and are not fed again."""
        chat = talk(model, another(llm, 2))
        say(chat, "HELLO")
        held, prompt = len(chat.tokens), chat.prompt("AND SO ON")
        model.fed.clear()
        model.break_before = number
        monkeypatch.setattr(model, "interrupt", lambda _: Watched.interrupt(model, 0))  # there is nothing to read
        model.read_until_interrupted(chat, "AND SO ON")
        assert chat.messages[-1] == {"role": "assistant", "content": ""}
        twin = fork(chat)
        twin.rewind()
        assert len(twin.tokens) == held
        model.fed.clear()
        say(twin, "AND SO ON")
        assert model.fed[0] == prompt[held + 2 * (number + 1) :][:2]
        say(chat, "GO ON")

    @pytest.mark.parametrize("chunk", [0, 1.5])
    def test_refused(self, llm: LLM, chunk: Any) -> None:
        with pytest.raises(ValueError, match="prefill_chunk must be"):
            another(llm, chunk)


class TestWindows:
    """A model whose first layer sees six positions: their pages are let go of within one turn."""

    @pytest.fixture
    def model(self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> Watched:
        return Watched(tiny_model(eos_token_ids=(EOS,), **WINDOWS), monkeypatch)

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    @pytest.mark.parametrize("encode", ENCODERS)
    def test_replies_are_those_of_a_fresh_run(
        self, model: Watched, llm: LLM, encode: Encode, params: SamplingParams
    ) -> None:
        chat = talk(model, llm, encode)
        for text in TURNS[:3]:
            say(chat, text, params)

    def test_only_new_tokens_are_fed_while_the_history_stays(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        for text in TURNS[:3]:
            held = len(chat.tokens)
            prompt = rendered([*chat.messages, {"role": "user", "content": text}])
            model.fed.clear()
            say(chat, text)
            assert model.fed[0] == prompt[held:]

    def test_what_the_cache_has_lost_is_found(self, model: Watched, llm: LLM) -> None:
        """A template that drops earlier answers asks for a truncation, which a cache without these pages refuses."""
        chat = talk(model, llm, without_earlier_answers)
        say(chat, "HELLO")
        before = without_earlier_answers([{"role": "user", "content": "HELLO"}])
        prompt = without_earlier_answers([*chat.messages, {"role": "user", "content": "GO ON"}])
        keep = len(before)  # "U:HELLO_A:" stays, the answer goes
        assert prompt[:keep] == before
        assert len(chat.tokens) > keep
        model.fed.clear()
        say(chat, "GO ON")
        assert model.fed[0] == prompt[keep:]

    def test_stopping_early(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, another(llm, 3))
        reply = chat.stream("A QUESTION OF SOME LENGTH", GREEDY)
        next(reply)
        reply.close()
        say(chat, "GO ON")
        chat.reset()
        assert len(chat.tokens) == 0
        say(chat, "AGAIN")

    def test_rewind_and_fork(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        for text in TURNS[:3]:
            say(chat, text)
        twin = chat.fork()
        chat.rewind(2)
        say(chat, "OTHERWISE")
        say(twin, "AND ON")
        twin.rewind(1)
        say(twin, "OR ELSE")

    def test_save_and_load(self, model: Watched, llm: LLM, tmp_path: Path) -> None:
        chat = talk(model, llm)
        say(chat, "A QUESTION OF SOME LENGTH")
        chat.save(tmp_path / "chat")
        other = load(model, tmp_path / "chat", another(llm))
        assert_goes_on(chat, other)

    @pytest.mark.parametrize("window", [1, 2])
    @pytest.mark.parametrize("kept", [0, 1])
    def test_saved_after_a_rewind(
        self, monkeypatch: pytest.MonkeyPatch, window: int, kept: int, tmp_path: Path
    ) -> None:
        """Of a window of one position nothing is held then."""
        model = Watched(make_tiny_model(eos_token_ids=(EOS,), **WINDOWS | {"sliding_window": window}), monkeypatch)
        chat = talk(model, llm_of(model.model, page=4))
        for text in TURNS[:3]:
            say(chat, text)
        chat.truncate(kept)
        chat.save(tmp_path / "chat")
        assert_goes_on(chat, load(model, tmp_path / "chat", llm_of(model.model, page=4)))


def test_send(model: Watched, llm: LLM) -> None:
    chat = talk(model, llm, params=GREEDY)
    expected, prompt = fresh(chat, "HELLO"), rendered([{"role": "user", "content": "HELLO"}])
    result = chat.send("HELLO")
    assert (result.prompt_token_ids, result.token_ids) == (prompt, expected)
    assert (result.text, result.finish_reason) == (chat.messages[-1]["content"], "eos")
    assert result.cache_memory_bytes == len(chat.pages()) * llm.memory.pool.page_bytes > 0
    assert chat.send("HI", ENDING).finish_reason == "eos"
    assert chat.turns == 2
    assert chat.send("HELLO", max_new_tokens=1).generated_tokens == 1
    assert chat.params == GREEDY
    with pytest.raises(TypeError, match="'max_tokens': did you mean max_new_tokens"):
        chat.send("HELLO", max_tokens=1)
    assert chat.turns == 3


class TestFork:
    def test_twins(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm, system="BE BRIEF")
        say(chat, "HELLO")
        twin, used = fork(chat), used_pages(llm)
        assert twin.messages == chat.messages
        for text in ("AND THEN?", "WHY"):
            say(chat, text)
            say(twin, text + " NOT")
            assert chat.messages != twin.messages
        assert used_pages(llm) > used

    def test_costs_no_page(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        say(chat, "HELLO")
        used = used_pages(llm)
        twins = [fork(chat) for _ in range(50)]
        assert used_pages(llm) == used
        for twin in twins[:3]:
            say(twin, "AND THEN?")  # each feeds its own, and remembers what the first has found
        llm.memory.index.clear()
        assert used_pages(llm) == 0

    def test_forks_of_forks(self, model: Watched, llm: LLM) -> None:
        family = [talk(model, llm)]
        for number in range(4):
            say(family[-1], f"TURN {number}")
            family.append(fork(family[-1]))
        for number, chat in enumerate(reversed(family)):
            say(chat, f"LAST {number}")
        assert [chat.turns for chat in family] == [2, 3, 4, 5, 5]

    def test_interrupted(self, model: Watched, llm: LLM) -> None:
        """A twin that is left in the middle of a pass takes nothing from the other."""
        chat = talk(model, llm)
        say(chat, "HELLO")
        twin = fork(chat)
        model.fed.clear()
        model.break_after = 1
        model.read_until_interrupted(twin, "AND SO ON")
        say(chat, "AND SO ON")
        say(twin, "GO ON")


class TestRewind:
    @pytest.mark.parametrize("turns", [0, 1, 2, 3])
    def test_as_if_never_said(self, model: Watched, llm: LLM, turns: int) -> None:
        one, other = talk(model, llm), talk(model, llm)
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

    def test_what_is_kept_is_not_fed_again(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        say(chat, "HELLO")
        held = len(chat.tokens)
        say(chat, "AND THEN?")
        chat.rewind()
        assert len(chat.tokens) == held
        model.fed.clear()
        prompt = rendered([*chat.messages, {"role": "user", "content": "WHY"}])
        say(chat, "WHY")
        assert model.fed[0] == prompt[held + len("_U:") :]  # as far as the memory knows another turn

    @pytest.mark.parametrize("turns", [-1, 3, 1.0, True, None, "1"])
    def test_refused(self, model: Watched, turns: Any) -> None:
        chat = talk(model, llm_of(model.model), system="BE BRIEF")
        for text in TURNS[:2]:
            say(chat, text)
        messages, held = list(chat.messages), len(chat.tokens)
        for change in (chat.rewind, chat.truncate):
            with pytest.raises(ValueError, match=f"cannot (rewind|keep) {turns!r} of 2 turns"):
                change(turns)
        assert (chat.messages, chat.turns, len(chat.tokens)) == (messages, 2, held)
        chat.rewind(2)
        assert chat.messages == [{"role": "system", "content": "BE BRIEF"}]


class TestSharing:
    SYSTEM = "YOU ANSWER AT LENGTH, AND NEVER SAY WHAT YOU DO NOT KNOW"

    def test_a_system_prompt_is_held_once(self, model: Watched, llm: LLM) -> None:
        one, other = (talk(model, llm, system=self.SYSTEM) for _ in range(2))
        say(one, "HELLO")
        model.fed.clear()
        say(other, "BYE")
        common = len(f"S:{self.SYSTEM}_U:")
        prompt = rendered([*other.messages[:2]])
        assert model.fed[0] == prompt[common:]
        held = [chat.pages() for chat in (one, other)]
        assert len(held[0] & held[1]) == common // llm.memory.pool.page_size
        assert used_pages(llm) == len(held[0] | held[1])

    def test_a_session_that_is_gone(self, model: Watched, llm: LLM) -> None:
        first = say(talk(model, llm, system=self.SYSTEM), "HELLO")
        model.fed.clear()
        assert say(talk(model, llm, system=self.SYSTEM), "HELLO") == first
        assert model.fed[0] == [rendered([])[-1]]

    @pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "windows"])
    @pytest.mark.parametrize("page", PAGES)
    def test_a_small_pool(self, monkeypatch: pytest.MonkeyPatch, windows: dict[str, Any], page: int) -> None:
        """What is forgotten is computed again."""
        model = Watched(make_tiny_model(eos_token_ids=(EOS,), **windows), monkeypatch)
        context = 100
        per_page = memory_of(model.model, page=page).pool.page_bytes
        size = per_page * (pages_for(model.config, context, page) + 1 + 128 // page)
        llm = llm_of(model.model, page=page, size=size)
        stays = talk(model, llm, context=context)
        first = [say(stays, "I STAY")]
        for number in range(6):
            chat = talk(model, llm, context=context)
            for text in (f"{number} IS MY NUMBER", "AND YOURS?"):
                first.append(say(chat, text))
        del chat
        model.fed.clear()
        again = talk(model, llm, context=context)
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
                chat = talk(model, llm_of(model.model, page=page, size=per_page * pages), context=96)
                break
            except ValueError:
                continue
        while len(rendered([*chat.messages, {"role": "user", "content": "ON"}])) + 8 <= 96:
            say(chat, "ON")
        assert chat.turns > 5


def test_refused(model: Watched) -> None:
    llm = llm_of(model.model)
    for context in (0, 257, 1.5, True, "9"):
        with pytest.raises(ValueError, match="context must be from 1 to the model's 256"):
            talk(model, llm, context=context)
    chat = talk(model, llm)
    with pytest.raises(ValueError, match="n=2: a session continues with one answer"):
        chat.stream("HELLO", SamplingParams(n=2, max_new_tokens=8))
    with pytest.raises(ValueError, match="does not return prompt_logprobs"):
        chat.send("HELLO", SamplingParams(prompt_logprobs=0, max_new_tokens=8))
    assert (chat.messages, model.fed) == ([], [])
    with pytest.raises(ValueError, match=r"200 positions take .* ask for fewer positions"):
        talk(model, llm_of(model.model, size=5000))


def load(model: Watched, path: Path, llm: LLM, encode: Encode = rendered) -> Chat:
    chat = Chat.load(path, llm, encode=encode)
    chat.watched = model
    return chat


def assert_goes_on(chat: Chat, loaded: Chat) -> None:
    """Both answer alike, and nothing is prefilled again."""
    assert loaded.messages == chat.messages
    assert loaded.tokens == chat.tokens
    for text in ("AND AFTER?", "WHY"):
        prompt = rendered([*chat.messages, {"role": "user", "content": text}])
        for each in (chat, loaded):
            each.watched.fed.clear()
            held = len(each.tokens)
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

    def test_goes_on(self, model: Watched, llm: LLM, path: Path) -> None:
        params = SamplingParams(max_new_tokens=7, logit_bias={3: -float("inf")}, stop=["!!"], seed=2**64 - 1)
        chat = talk(model, llm, system="BE BRIEF", params=params)
        for text in TURNS[:2]:
            say(chat, text)
        chat.save(path)
        elsewhere = another(llm)
        loaded = load(model, path, elsewhere)
        assert (loaded.params, loaded.context, loaded.system) == (params, CONTEXT, "BE BRIEF")
        assert used_pages(elsewhere) == len(loaded.pages()) > 0
        model.fed.clear()
        expected = fresh(chat, "THREE", params)
        assert loaded.send("THREE").token_ids == expected
        assert loaded.fork().turns == 3
        loaded.rewind()
        assert_goes_on(chat, load(model, path, llm))  # beside the first

    def test_an_answer_that_was_cut_goes_on(self, model: Watched, llm: LLM, path: Path) -> None:
        params = SamplingParams(max_new_tokens=5, ignore_eos=True, temperature=1.0, logit_bias={3: -1.0}, stop=["!!"])
        chat = talk(model, llm)
        list(chat.stream("HELLO", params))
        chat.save(path)
        loaded = load(model, path, another(llm))
        assert loaded.answer == chat.answer
        assert [*loaded.more(params)][-1].token_id == [*chat.more(params)][-1].token_id
        assert (loaded.messages, loaded.tokens) == (chat.messages, chat.tokens)

    def test_before_the_first_turn(self, model: Watched, llm: LLM, path: Path) -> None:
        chat = talk(model, llm, system="BE BRIEF")
        chat.save(path)
        assert_goes_on(chat, load(model, path, llm))

    def test_any_text(self, model: Watched, path: Path) -> None:
        chat = talk(model, llm_of(model.model), lambda messages: [1, 2, 3], system='ünï\n"\\ \ud800 😀\0')
        list(chat.stream("\N{SNOWMAN}" * 100, GREEDY))
        chat.save(path)
        loaded = load(model, path, chat.llm, chat.encode)
        assert (loaded.messages, loaded.system) == (chat.messages, chat.system)

    def test_again_and_again(self, model: Watched, llm: LLM, path: Path) -> None:
        chat = talk(model, llm)
        for text in TURNS:
            say(chat, text)
            chat.save(path)
            used = used_pages(llm)
            chat = load(model, path, llm)
            assert used_pages(llm) == used  # what is known already is not held twice
        assert [*path.parent.iterdir()] == [path]

    @pytest.mark.parametrize("name", ["a**b", "[x]", "x" * 200, ".hidden"])
    def test_any_name(self, model: Watched, tmp_path: Path, name: str) -> None:
        chat = talk(model, llm_of(model.model))
        say(chat, "HELLO")
        chat.save(str(tmp_path / name))
        load(model, tmp_path / name, chat.llm)

    def test_where_nothing_can_be_written(self, model: Watched, tmp_path: Path) -> None:
        chat = talk(model, llm_of(model.model))
        with pytest.raises(IsADirectoryError, match="is a folder, not a file"):
            chat.save(tmp_path)
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            chat.save(tmp_path / "none" / "chat")
        assert [*tmp_path.iterdir()] == []

    @pytest.mark.parametrize("kind", ["device", "fifo", "link"])
    def test_what_is_no_regular_file(
        self, model: Watched, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is not replaced, and nothing is left beside it."""
        path, chat = tmp_path / "chat", talk(model, llm_of(model.model))
        say(chat, "HELLO")
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(tmp_path / "other")
        else:
            monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("replaced"))
            path = Path("/dev/full")
        before = os.lstat(path)
        with pytest.raises(OSError, match=f"{path} is not a regular file"):
            chat.save(path)
        assert os.lstat(path) == before
        assert [*tmp_path.iterdir()] == ([] if kind == "device" else [path])

    @pytest.mark.parametrize("seed", range(amount(60, 4)))
    def test_after_any_operations(self, tmp_path: Path, seed: int) -> None:
        """What `save` has written, `load` reads; and the conversation goes on as if it had not been saved."""
        chance, llm = random.Random(seed), llm_of(make_tiny_model(eos_token_ids=(EOS,)), "float32", 4)
        chat = llm.session(encode=rendered, params=SamplingParams(max_new_tokens=3), context=CONTEXT)

        def cut() -> None:
            with closing(chat.stream("CUT")) as reply:
                next(reply)

        def more() -> None:
            if chat.answer is not None and chat.answer.finish_reason not in ("eos", "stop"):
                list(chat.more())

        operations: list[Callable[[], Any]] = [
            *[lambda: chat.send(chance.choice(TURNS))] * 4,
            lambda: chat.send("END", ENDING),
            cut,
            more,
            lambda: chat.drop(chance.randint(0, chat.turns)),
            lambda: chat.rewind(chance.randint(0, chat.turns)),
            lambda: chat.instruct(chance.choice([None, "BE BRIEF"])),
            chat.reset,
            lambda: chat.make_room("HELLO", chance.choice([3, CONTEXT - 30])),
        ]
        for step in range(30):
            with suppress(CacheExceeded):
                chance.choice(operations)()
            chat.save(tmp_path / "chat")
            twin = llm.load_session(tmp_path / "chat", encode=rendered)
            for name in ("messages", "system", "params", "context", "answer", "tokens", "_starts"):
                assert getattr(twin, name) == getattr(chat, name), (step, name)
            if chance.random() < 0.5:
                chat = twin

    def test_all_turns_dropped(self, model: Watched, path: Path) -> None:
        chat = talk(model, llm_of(model.model))
        say(chat, "HELLO")
        chat.drop(1)
        chat.save(path)
        assert load(model, path, chat.llm).answer is None
        with pytest.raises(ValueError, match="there is no answer to continue"):
            chat.more()

    def test_a_save_that_fails(self, model: Watched, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The file that was there stays, and nothing else is left."""
        chat = talk(model, llm_of(model.model))
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
        llm = llm_of(model.model, dtype, page)
        marker = 77 if dtype == "int8" else 1234.5
        llm.memory.pool.memory.fill_(marker)
        chat = talk(model, llm)
        for text in TURNS[:2]:
            say(chat, text)
            twin = fork(chat)  # has a copy of the last page, with what lay behind
            say(twin, "HI")
            twin.rewind()
            for each in (chat, twin):
                each.save(path)
                pages = read(path, KIND)[1]["pages"]
                assert not (pages == marker).all(-1).any()
                used = len(each.tokens) % page
                assert not used or not pages[-1, :, :, :, used:].any()
        stored = np.full(8, marker, np.int8 if dtype == "int8" else np.float32).tobytes()
        assert stored not in path.read_bytes()

    def test_another_process(self, model: Watched, path: Path) -> None:
        chat = talk(model, llm_of(model.model, page=16), params=GREEDY)
        for text in TURNS[:2]:
            say(chat, text)
        chat.save(path)
        held, prompt = len(chat.tokens), chat.prompt("WHY")
        answer = json.loads(python(ELSEWHERE, str(path)))
        expected = fresh(chat, "WHY")
        assert answer["tokens"] == expected
        assert answer["fed"] == [prompt[held:], *([token] for token in expected[:-1])]
        assert answer["messages"] == chat.messages

    def test_killed(self, tmp_path: Path) -> None:
        """At any line, while it writes over a file: that one is there still, or the next."""
        assert python(KILLED, str(tmp_path / "chat"), str(amount(200, 25))) == "always whole\n"


class TestLoadRefuses:
    """With one line, and without keeping a page."""

    @pytest.fixture
    def chat(self, model: Watched) -> Chat:
        chat = talk(model, llm_of(model.model, page=4), system="BE BRIEF", params=GREEDY)
        for text in TURNS[:2]:
            chat.send(text)
        return chat

    @pytest.fixture
    def path(self, chat: Chat, tmp_path: Path) -> Path:
        chat.save(tmp_path / "chat")
        return tmp_path / "chat"

    def refuse(self, path: Path, llm: LLM, match: str | None = None, error: Any = ValueError) -> None:
        memory = llm.memory
        free, size = memory.pool.num_free_pages, len(memory.index)
        with pytest.raises(error, match=match) as caught:
            llm.load_session(path, encode=rendered)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        assert (memory.pool.num_free_pages, len(memory.index)) == (free, size)
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
        self.refuse(path, llm_of(model, **{"page": 4} | how), "was saved with another model, hook, quantization, dtype")

    def test_int8_as_float(self, model: Watched, tmp_path: Path) -> None:
        chat = talk(model, llm_of(model.model, "int8"))
        say(chat, "HELLO")
        chat.save(tmp_path / "chat")
        self.refuse(tmp_path / "chat", llm_of(model.model), "another model, hook, quantization, dtype")

    def test_truncated(self, path: Path, chat: Chat) -> None:
        whole = path.read_bytes()
        for length in sorted({0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1, *range(0, len(whole), 997)}):
            path.write_bytes(whole[:length])
            self.refuse(path, chat.llm, "is damaged|is not a valid")

    def test_a_flipped_byte(self, path: Path, chat: Chat) -> None:
        """Is found, or changes nothing."""
        whole = path.read_bytes()
        step = amount(1, max(1, len(whole) // 150))
        start = int.from_bytes(whole[:8], "little") + 8
        llm = llm_of(chat.llm.model, page=4, size=10**5)  # type: ignore[arg-type]
        memory, expected = llm.memory, chat.llm.between_steps(chat._dump).result()
        for at in (*range(0, start, amount(1, 7)), *range(start, len(whole), step)):
            for bit in (1, 128):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
                memory.index.clear()
                try:
                    loaded = llm.load_session(path, encode=rendered)
                except ValueError as error:
                    assert "\n" not in str(error)  # noqa: PT017
                    assert memory.pool.num_free_pages == memory.pool.num_pages
                else:
                    assert (loaded.messages, loaded._starts) == (chat.messages, chat._starts)
                    assert (loaded.params, loaded.context, loaded.answer) == (chat.params, chat.context, chat.answer)
                    assert_same_dump(llm.between_steps(loaded._dump).result(), expected)

    @pytest.mark.parametrize(
        ("contents", "match"),
        [
            (b"", "is not a valid infer session file"),
            (b"HELLO", "is not a valid infer session file"),
            (b"\0" * 1000, "is not a valid infer session file"),
            (b"\xff" * 1000, "is not a valid infer session file"),
            (b'{"messages": []}', "is not a valid infer session file"),
            ((2).to_bytes(8, "little") + b"{}", "is not a valid infer session file"),
        ],
    )
    def test_not_a_session(self, chat: Chat, tmp_path: Path, contents: bytes, match: str) -> None:
        path = tmp_path / "other"
        path.write_bytes(contents)
        self.refuse(path, chat.llm, match)

    def test_another_kind(self, chat: Chat, tmp_path: Path) -> None:
        path = tmp_path / "page"
        write(path, "page", {"pages": torch.zeros(3)}, {"groups": "[0]"})
        self.refuse(path, chat.llm, "is not a valid infer session file")

    def test_another_version(self, chat: Chat, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.engine.store.VERSION", "0")
        chat.save(path)
        monkeypatch.undo()
        self.refuse(path, chat.llm, "was written by another version of infer: '0'")

    def test_no_file(self, chat: Chat, tmp_path: Path) -> None:
        for path in (tmp_path / "none", tmp_path / "none" / "chat"):
            self.refuse(path, chat.llm, "there is no file", FileNotFoundError)
        self.refuse(tmp_path, chat.llm, "is a folder, not an infer session", IsADirectoryError)

    def test_no_room(self, path: Path, chat: Chat) -> None:
        page_bytes = chat.llm.memory.pool.page_bytes
        llm, small = (llm_of(chat.llm.model, page=4, size=page_bytes * pages) for pages in (60, 40))  # type: ignore[arg-type]
        pool = llm.memory.pool
        held = pool.allocate(55)
        with pytest.raises(OutOfPages, match="the cache memory is full"):
            llm.load_session(path, encode=rendered)
        assert pool.num_free_pages == 5
        pool.release(held)
        llm.load_session(path, encode=rendered)
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
            *[("answer", value) for value in ("", "[]", "5", "{}", "[" * 100_000)],
            ("model", ""),
        ],
    )
    def test_hostile_header(self, path: Path, chat: Chat, name: str, value: str) -> None:
        tamper(path, header={name: value})
        self.refuse(path, chat.llm)

    @pytest.mark.parametrize(
        "change",
        [
            {"prompt": "text"},
            {"prompt": None},
            {"token_ids": [1.5]},
            {"token_ids": [[1]]},
            {"params": None},
            {"params": {"temperature": "hot"}},
            {"finish_reason": "bored"},
            {"finish_reason": []},
            {"given": -1},
            {"given": 1000},
            {"given": True},
        ],
        ids=str,
    )
    def test_hostile_answer(self, path: Path, chat: Chat, change: dict[str, Any]) -> None:
        assert chat.answer is not None
        saved = chat.answer._asdict() | {"params": asdict(chat.answer.params)} | change
        tamper(path, header={"answer": json.dumps(saved)})
        self.refuse(path, chat.llm)

    @pytest.mark.parametrize("name", ["messages", "turns", "settings", "model"])
    def test_missing_header(self, path: Path, chat: Chat, name: str) -> None:
        tamper(path, header={name: None})
        self.refuse(path, chat.llm)

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
        self.refuse(path, chat.llm)

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
        self.refuse(path, chat.llm)

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
        self.refuse(path, chat.llm)

    def test_windows(self, tmp_path: Path) -> None:
        """Pages that the next token sees must be there; others may be missing."""
        model, path = make_tiny_model(**WINDOWS), tmp_path / "chat"
        chat = llm_of(model, page=2).session(encode=rendered, context=CONTEXT)
        chat.send("HELLO", GREEDY)
        chat.save(path)
        numbers, pages = (read(path, KIND)[1][name] for name in ("numbers", "pages"))
        gone = numbers.clone()
        gone[-1][gone[-1] == gone.max()] = -1
        tamper(path, tensors={"numbers": gone, "pages": pages[:-1]})
        self.refuse(path, chat.llm, "some of its pages are missing")


def assert_same_dump(one: tuple[str, dict[str, Tensor]], other: tuple[str, dict[str, Tensor]]) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


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


def python(script: str, *arguments: str) -> str:
    """What a script prints, in a process of its own."""
    tests = Path(__file__).parents[2]
    paths = [str(tests), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


ELSEWHERE = """
import json, sys
import pytest
from test_session import EOS, Watched, llm_of, make_tiny_model, rendered

model = Watched(make_tiny_model(eos_token_ids=(EOS,)), pytest.MonkeyPatch())
chat = llm_of(model.model, page=16).load_session(sys.argv[1], encode=rendered)
messages = list(chat.messages)
tokens = chat.send("WHY").token_ids
print(json.dumps({"tokens": tokens, "fed": model.fed, "messages": messages}))
"""

# One process forks those that are killed: importing torch takes longer than they live.
KILLED = """
import os, shutil, signal, sys
os.environ["INFER_KERNELS"] = "0"  # a forked process cannot run them
import torch
torch.set_num_threads(1)
from test_session import GREEDY, llm_of, make_tiny_model, rendered

path, times = sys.argv[1], int(sys.argv[2])
model = make_tiny_model()
with llm_of(model, page=16) as llm:
    chat = llm.session(encode=rendered, context=200)
    chat.send("HELLO", GREEDY)
    longer = chat.fork()
    longer.send("AND THEN? " * 8, GREEDY)
    chat.save(path)
    chat.save(path + ".chat")
    longer.save(path + ".longer")
found, lines = set(), 0
reading, writing = os.pipe()
for number in range(times + 1):
    shutil.copy(path + ".chat", path)
    child = os.fork()
    if not child:
        llm = llm_of(model, page=16)  # threads do not come along
        session = llm.load_session(path + ".longer", encode=rendered)
        seen = 0

        def trace(frame, event, argument):
            global seen
            seen += event == "line"
            if number and seen > (number - 1) * lines // times:  # the first is not killed: it counts the lines
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        session.save(path)
        sys.settrace(None)
        os.write(writing, b"%d" % seen)
        os._exit(0)
    os.waitpid(child, 0)
    lines = lines or int(os.read(reading, 20))
    with llm_of(model, page=16) as llm:
        loaded = llm.load_session(path, encode=rendered)
        assert (loaded.messages, loaded.tokens) in [(each.messages, each.tokens) for each in (chat, longer)]
    found.add(loaded.turns)
assert found == {1, 2}, found
print("always whole")
"""


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("page", PAGES)
class TestBetweenTurns:
    """An idle session holds tokens, no pages."""

    @pytest.fixture
    def model(self, windows: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Watched:
        return Watched(make_tiny_model(eos_token_ids=(EOS,), **windows), monkeypatch)

    @pytest.fixture
    def llm(self, model: Watched, page: int) -> LLM:
        return llm_of(model.model, page=page)

    def test_no_page_is_held(self, model: Watched, llm: LLM, tmp_path: Path) -> None:
        chats = [talk(model, llm, system=f"NUMBER {number}") for number in range(3)]
        for chat in chats:
            say(chat, "HELLO")
            assert len(chat.pages()) > 0
            assert_all_idle(llm)
        chats.append(fork(chats[0]))
        chats[1].save(tmp_path / "chat")
        chats.append(load(model, tmp_path / "chat", llm))
        chats[2].rewind()
        model.hold_at = len(model.fed) + 1  # after the pass over the prompt
        reply = chats[0].stream("AND THEN?", SamplingParams(max_new_tokens=100))
        next(reply)
        assert len(llm.memory.index.pages_in_use()) > 0
        model.let_go.set()
        reply.close()
        settle(llm)
        assert_all_idle(llm)
        llm.memory.index.clear()
        assert used_pages(llm) == 0
        assert [chat.pages() for chat in chats] == [set()] * 5
        for chat in chats:
            say(chat, "GO ON")

    def test_evicted_by_others(self, model: Watched, page: int) -> None:
        """What is gone is computed again: the text is that of a session that nobody disturbed."""
        undisturbed = talk(model, llm_of(model.model, page=page), params=SEEDED)
        expected = [undisturbed.send(text).token_ids for text in TURNS]
        per_page = memory_of(model.model, page=page).pool.page_bytes
        size = per_page * (pages_for(model.config, CONTEXT, page, CONTEXT) + 2)
        llm = llm_of(model.model, page=page, size=size)
        chat = talk(model, llm, params=SEEDED)
        for number, text in enumerate(TURNS):
            prompt, held = chat.prompt(text), len(chat.tokens)
            model.fed.clear()
            answer = chat.send(text).token_ids
            assert answer == expected[number] == generate(llm.model, Letters(), prompt, SEEDED).token_ids
            assert (len(model.fed[0]) > len(prompt) - held) == number % 2
            for other in range(2 if number % 2 == 0 else 0):  # more than the pool has beside it
                long = [(other + number + i) % 60 for i in range(CONTEXT - 10)]
                llm.generate(long, max_new_tokens=10, ignore_eos=True)
        assert chat.messages == undisturbed.messages

    @pytest.mark.parametrize("left", [0, 5])
    def test_saved_after_eviction(self, model: Watched, llm: LLM, tmp_path: Path, left: int) -> None:
        """What is gone is computed again, so the file is that of a session that nobody disturbed."""
        chat = talk(model, llm)
        for text in TURNS[:2]:
            say(chat, text)
        chat.save(tmp_path / "before")
        llm.memory.index.evict(used_pages(llm) - left)
        assert used_pages(llm) <= left
        chat.save(tmp_path / "after")
        files = [read(tmp_path / name, KIND) for name in ("before", "after")]
        assert files[0][0] == files[1][0]
        assert all(torch.equal(files[0][1][name], files[1][1][name]) for name in ("tokens", "pages", "numbers"))
        elsewhere = another(llm)
        loaded = load(model, tmp_path / "after", elsewhere)
        elsewhere.memory.index.evict(used_pages(elsewhere))
        assert loaded.pages() == set()
        for each in (chat, loaded):
            say(each, "AND AFTER?")
        assert loaded.messages == chat.messages

    def test_beside_others(self, model: Watched, page: int) -> None:
        """Sessions, their twins and other requests, from several threads, in a pool that does not hold them all."""
        per_page = memory_of(model.model, page=page).pool.page_bytes
        size = per_page * (2 * pages_for(model.config, CONTEXT, page, CONTEXT) + 2)
        model.resting = True
        wrong: list[Any] = []

        def chats(llm: LLM, number: int) -> list[Message]:
            """Takes turns, forks, rewinds; each answer is drawn with its own seed."""
            chance, chat = random.Random(number), talk(model, llm, system="THE SAME FOR ALL")
            said: list[Message] = []
            for turn in range(6):
                params = SamplingParams(temperature=1.0, seed=10 * number + turn, max_new_tokens=chance.randint(1, 12))
                if turn % 3 == 2:
                    chat = fork(chat)
                    chat.rewind(chance.randint(0, 2))
                chat.send(f"{number} SAYS {turn}", params)
                said += chat.messages
            return said

        def requests(llm: LLM, number: int) -> list[Any]:
            prompt = Letters().encode(f"S:THE SAME FOR ALL_U:{number}")
            params = SamplingParams(temperature=1.0, seed=number, max_new_tokens=40)
            return [llm.generate(prompt * i, params).token_ids for i in range(1, 6)]

        jobs = [(chats, number) for number in range(4)] + [(requests, number) for number in range(3)]
        expected = [job(llm_of(model.model, page=page), number) for job, number in jobs]
        llm = llm_of(model.model, page=page, size=size)

        def run(i: int) -> None:
            job, number = jobs[i]
            found = job(llm, number)
            if found != expected[i]:
                wrong.append((job.__name__, number, found, expected[i]))

        in_threads([lambda i=i: run(i) for i in range(len(jobs))])  # type: ignore[misc]
        assert wrong == []
        settle(llm)
        assert_all_idle(llm)
        llm.memory.index.check()


def assert_all_idle(llm: LLM) -> None:
    """Each page is free, or only remembered."""
    memory = llm.memory
    assert len(memory.index.pages_in_use()) == 0
    assert memory.pool.num_free_pages + memory.index.num_pages == memory.pool.num_pages


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """All at once; each must come to its end."""
    ended: list[int] = []

    def run(number: int) -> None:
        jobs[number]()
        ended.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert sorted(ended) == list(range(len(jobs)))


class TestOneLLM:
    def test_twins_at_once(self, model: Watched, llm: LLM) -> None:
        """Forked and rewound, they answer at the same time as they do one after the other."""
        chat = talk(model, llm)
        for text in TURNS[:3]:
            say(chat, text)
        twins = [fork(chat) for _ in TURNS]
        for number, twin in enumerate(twins):
            twin.rewind(number)
        expected = [fresh(twin, text, SEEDED) for twin, text in zip(twins, TURNS, strict=True)]
        found: dict[int, list[int]] = {}

        def answer(number: int) -> None:
            found[number] = twins[number].send(TURNS[number], SEEDED).token_ids

        in_threads([lambda i=i: answer(i) for i in range(4)])  # type: ignore[misc]
        assert [found[number] for number in range(4)] == expected
        assert [twin.turns for twin in twins] == [4, 3, 2, 1]

    def test_one_thread_at_a_time(self, model: Watched, llm: LLM) -> None:
        chat, refused = talk(model, llm), []

        def answer() -> None:
            try:
                chat.send("HELLO", GREEDY)
            except ValueError as error:
                refused.append(str(error))

        in_threads([answer] * 8)
        assert chat.turns + len(refused) == 8
        assert all("this session is answering" in each or "the conversation has changed" in each for each in refused)
        other = talk(model, llm)
        for _ in range(chat.turns):
            other.send("HELLO", GREEDY)
        assert (chat.messages, chat.tokens) == (other.messages, other.tokens)

    def test_closed(self, model: Watched, llm: LLM) -> None:
        """A turn that runs ends with an error, and was not said."""
        chat = talk(model, llm)
        say(chat, "HELLO")
        before = list(chat.messages), list(chat.tokens)
        reply = chat.stream("MORE", SamplingParams(max_new_tokens=100, ignore_eos=True))
        next(reply)
        llm.close()
        with pytest.raises(RuntimeError, match="the engine was closed"):
            list(reply)
        assert (chat.messages, chat.tokens) == before
        for last in (lambda: chat.send("MORE", GREEDY), lambda: chat.save("nowhere"), chat.pages):
            with pytest.raises(RuntimeError, match="this LLM is closed"):
                last()
        assert (chat.messages, chat.tokens) == before

    def test_an_llm_lives_as_long_as_its_sessions(self, model: Watched) -> None:
        say(talk(model, llm_of(model.model)), "HELLO")

    def test_made_by_the_llm(self, model: Watched, tmp_path: Path) -> None:
        llm = llm_of(model.model)
        chat = llm.session(system="BE BRIEF", params=GREEDY, context=100, encode=rendered)
        assert (chat.system, chat.params, chat.context, chat.encode) == ("BE BRIEF", GREEDY, 100, rendered)
        chat.send("HELLO")
        chat.save(tmp_path / "chat")
        assert llm.load_session(tmp_path / "chat", encode=rendered).tokens == chat.tokens

    def test_a_trace(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        say(chat, "HELLO")
        trace, expected, prompt = Trace(), Trace(), chat.prompt("MORE")
        tokens = chat.send("MORE", GREEDY, trace=trace).token_ids
        settle(llm)
        dtype = "int8" if llm.memory.pool.dtype is torch.int8 else "auto"
        assert tokens == generate(llm.model, Letters(), prompt, GREEDY, trace=expected, cache_dtype=dtype).token_ids
        assert [step.alternatives for step in trace.steps] == [step.alternatives for step in expected.steps]

    def test_a_file_with_a_chunk_of_its_own(self, model: Watched, llm: LLM, tmp_path: Path) -> None:
        chat, path = talk(model, llm), tmp_path / "chat"
        say(chat, "HELLO")
        chat.save(path)
        settings = json.loads(read(path, KIND)[0]["settings"])
        for chunk in (None, 100):
            tamper(path, header={"settings": json.dumps(settings | {"prefill_chunk": chunk})})
            assert_goes_on(fork(chat), load(model, path, another(llm)))


class TestGoingOn:
    """Answers that were cut go on; turns are forgotten from the beginning."""

    LONG = replace(GREEDY, ignore_eos=True)

    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    def test_as_if_it_had_not_been_cut(self, model: Watched, llm: LLM, params: SamplingParams) -> None:
        whole, chat = talk(model, llm), talk(model, another(llm))
        for each in (whole, chat):
            say(each, "HELLO")
        expected = whole.send("MORE", replace(params, max_new_tokens=20))
        chat.send("MORE", params)
        pieces = [*chat.more(params), *chat.more(replace(params, max_new_tokens=4))]
        assert len(pieces) == 12
        assert chat.answer is not None
        assert chat.answer.token_ids == expected.token_ids
        assert (chat.messages, chat.tokens, chat.turns) == (whole.messages, whole.tokens, whole.turns)
        assert whole.messages[-1]["content"].endswith("".join(piece.text for piece in pieces))
        say(chat, "AND THEN?", params)
        chat.rewind(2)
        say(chat, "AND THEN?", params)

    def test_a_drawn_seed_is_kept(self, model: Watched, llm: LLM) -> None:
        """What was drawn without a seed goes on with the one that was."""
        drawn = replace(SEEDED, seed=None, ignore_eos=True)
        chat = talk(model, llm)
        chat.send("HELLO", drawn)
        list(chat.more(drawn))
        assert chat.answer is not None
        prompt, tokens, params, *_ = chat.answer
        assert tokens == llm.generate(prompt, replace(params, max_new_tokens=16)).token_ids

    def test_after_whoever_read_stopped(self, model: Watched, llm: LLM) -> None:
        whole, chat = talk(model, llm), talk(model, another(llm))
        expected = whole.send("HELLO", self.LONG).token_ids
        with closing(chat.stream("HELLO", self.LONG)) as stream:
            next(stream)
            next(stream)
        list(chat.more(replace(self.LONG, max_new_tokens=6)))
        assert chat.answer is not None
        assert chat.answer.token_ids == expected
        assert chat.messages == whole.messages

    def test_nothing_to_go_on_with(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        with pytest.raises(ValueError, match="there is no answer to continue"):
            chat.more()
        chat.send("HELLO", ENDING)
        with pytest.raises(ValueError, match="the last answer is complete"):
            chat.more()
        chat.send("HELLO", GREEDY)
        chat.rewind()
        with pytest.raises(ValueError, match="there is no answer to continue"):
            chat.more()

    @pytest.mark.parametrize("system", [None, "BE BRIEF"])
    def test_the_first_turns_are_forgotten(self, model: Watched, llm: LLM, system: str | None) -> None:
        chat = talk(model, llm, system=system)
        for text in ("HELLO", "AND THEN?", "WHY IS THAT"):
            say(chat, text)
        first, messages = int(system is not None), list(chat.messages)
        chat.drop(2)
        assert chat.turns == 1
        assert chat.messages == [*messages[:first], *messages[first + 4 :]]
        say(chat, "HELLO")
        chat.rewind()
        assert chat.turns == 1
        say(chat, "MORE")
        with pytest.raises(ValueError, match="cannot drop 3 of 2 turns"):
            chat.drop(3)

    def test_room_for_an_answer(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm, context=70)
        for text in ("HELLO", "WHY"):
            say(chat, text, self.LONG)
        assert chat.make_room("AND", 8) == 0
        assert chat.turns == 2
        before = list(chat.messages)
        with pytest.raises(CacheExceeded, match=r"tokens of this turn alone \+ 8 new tokens exceed the context of 70"):
            chat.make_room("X" * 80, 8)
        assert chat.messages == before
        dropped = chat.make_room("X" * 30, 8)
        assert dropped == 1
        assert chat.messages == before[2:]
        say(chat, "X" * 30)

    def test_going_on_with_room_made(self, model: Watched, llm: LLM) -> None:
        """The answer stays, and goes on behind fewer turns."""
        chat = talk(model, llm, context=48)
        say(chat, "HELLO", self.LONG)
        chat.send("WHY", self.LONG)
        answer = chat.messages[-1]["content"]
        assert chat.make_room(None, 16) == 1
        list(chat.more(replace(self.LONG, max_new_tokens=16)))
        assert chat.messages[-1]["content"].startswith(answer)
        assert [message["content"] for message in chat.messages[:-1]] == ["WHY"]
        assert chat.answer is not None
        prompt, tokens, params, _, given = chat.answer
        assert given == 8
        again = chat.llm.generate([*prompt, *tokens[:given]], replace(params, max_new_tokens=16))
        assert again.token_ids == tokens[given:]

    def test_another_system_message(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        say(chat, "HELLO")
        for system in ("BE KIND", "BE BRIEF", None):
            chat.instruct(system)
            assert chat.system == system
            assert chat.turns == 1
            say(fork(chat), "WHY")
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]

    def test_a_system_message_that_the_template_refuses(self, model: Watched, llm: LLM) -> None:
        def refusing(messages: list[Message]) -> list[int]:
            if messages[0]["role"] == "system":
                raise ValueError("no system message here")
            return rendered(messages)

        chat = talk(model, llm, refusing)
        say(chat, "HELLO")
        before = list(chat.messages)
        with pytest.raises(ValueError, match="no system message here"):
            chat.instruct("BE KIND")
        assert (chat.system, chat.messages) == (None, before)


class TestOneAnswerAtATime:
    def test_a_second_stream_waits(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
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

    def test_a_stream_that_comes_late(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        late = chat.stream("HELLO", GREEDY)
        say(chat, "FIRST")
        with pytest.raises(ValueError, match="the conversation has changed"):
            next(late)
        say(chat, "SECOND")

    def test_a_turn_that_fails_was_not_said(self, model: Watched, llm: LLM) -> None:
        chat = talk(model, llm)
        say(chat, "HELLO")
        before, held = list(chat.messages), len(chat.tokens)
        memory = llm.memory
        spare = memory.pool.allocate(memory.pool.num_free_pages)
        memory.index.clear()
        with pytest.raises(OutOfPages):
            list(chat.stream("X" * 120, GREEDY))
        assert (chat.messages, chat.turns, len(chat.tokens)) == (before, 1, held)
        memory.pool.release(spare)
        say(chat, "X" * 20)
