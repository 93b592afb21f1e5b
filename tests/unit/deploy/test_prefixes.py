"""Which replica a prompt goes to: by what it begins with, and by how busy each is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.deploy.prefixes import CHUNK, MAX_PROMPT_CHUNKS, PrefixTable, ordered, prompt_keys


def chat(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": messages, **fields}).encode()


class TestKeys:
    def test_a_longer_chat_begins_alike(self) -> None:
        first, second = prompt_keys(chat("x" * 2000)), prompt_keys(chat("x" * 2000, "and then?" * 100))
        assert len(first) > 5
        assert second[: len(first) - 1] == first[:-1]  # the last chunk may hold the end of the list
        assert len(second) > len(first)

    def test_differ_from_where_prompts_differ(self) -> None:
        one, other = prompt_keys(chat("a" * 1000 + "b" * 1000)), prompt_keys(chat("a" * 1000 + "c" * 1000))
        same = sum(x == y for x, y in zip(one, other, strict=True))
        assert 1000 // CHUNK - 1 <= same <= 1000 // CHUNK + 1
        assert one[:same] == other[:same]

    def test_settings_do_not_count(self) -> None:
        assert prompt_keys(chat("x" * 900, temperature=0.5, model="a")) == prompt_keys(chat("x" * 900, seed=3))

    @pytest.mark.parametrize("field", ["prompt", "input", "messages", "tools", "instructions"])
    def test_all_that_a_prompt_is_made_of_counts(self, field: str) -> None:
        one, other = (prompt_keys(json.dumps({field: letter * 600}).encode()) for letter in "ab")
        assert one
        assert not set(one) & set(other)

    def test_token_ids(self) -> None:
        assert prompt_keys(json.dumps({"prompt": list(range(500))}).encode())

    @pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": NaN}'])
    def test_what_is_no_request_has_none(self, body: bytes) -> None:
        assert prompt_keys(body) == []

    def test_bounded(self) -> None:
        assert (
            len(prompt_keys(json.dumps({"prompt": "x" * (CHUNK * (MAX_PROMPT_CHUNKS + 50))}).encode()))
            == MAX_PROMPT_CHUNKS
        )


class TestTable:
    def test_longest_match_of_each(self) -> None:
        table = PrefixTable()
        table.record([1, 2, 3], "a")
        table.record([1, 2, 4, 5], "b")
        assert table.matches([1, 2, 4, 5, 6]) == {"a": 2, "b": 4}
        assert table.matches([1, 9]) == {"a": 1, "b": 1}
        assert table.matches([7]) == {}
        assert table.matches([]) == {}

    def test_forgets_what_was_used_least_recently(self) -> None:
        table = PrefixTable(max_chunks=4)
        table.record([1, 2], "a")
        table.record([3, 4], "b")
        table.record([1, 2], "a")
        table.record([5], "c")
        assert len(table) == 4
        assert table.matches([1, 2]) == {"a": 2}
        assert table.matches([3, 4]) == {"b": 1}  # of a prompt, its end goes first

    def test_a_replica_that_has_gone(self) -> None:
        table = PrefixTable()
        table.record([1, 2], "a")
        table.record([1], "b")
        table.retain({"b"})
        assert table.matches([1, 2]) == {"b": 1}
        assert len(table) == 1


class TestOrder:
    def test_who_knows_most(self) -> None:
        assert ordered({"a": 1, "b": 0, "c": 2}, {"a": 3, "c": 5}, slack=2) == ["c", "a", "b"]

    def test_unless_it_is_too_busy(self) -> None:
        assert ordered({"a": 3, "b": 0}, {"a": 9}, slack=2) == ["b", "a"]
        assert ordered({"a": 2, "b": 0}, {"a": 9}, slack=2) == ["a", "b"]

    def test_the_least_busy_where_nobody_knows_it(self) -> None:
        assert ordered({"a": 2, "b": 1, "c": 0}, {}, slack=8) == ["c", "b", "a"]

    def test_equals_take_turns(self) -> None:
        assert {ordered({"a": 0, "b": 0}, {})[0] for _ in range(100)} == {"a", "b"}

    def test_those_that_failed_come_last(self) -> None:
        assert ordered({"a": 0, "b": 9}, {"a": 5}, tried=["a"], slack=1) == ["b", "a"]

    def test_none(self) -> None:
        assert ordered({}, {}) == []
