"""Constrained output: every text matches, and is the same however the request is run."""

from __future__ import annotations

import builtins
import copy
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import tokenizers
from checkpoints import byte_tokenizer
from commands import Run, assert_refused
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from tiny import make_tiny_model
from tokenizers import decoders, models, pre_tokenizers
from typing_extensions import TypedDict

from infer import LLM, CacheMemory, SamplingParams, Tokenizer, generate, generate_batch, stream
from infer.backend.cpu.backend import CpuBackend
from infer.backend.plain import TorchBackend
from infer.engine import guide as guides
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.engine.drafters import NgramDrafter
from infer.engine.engine import Engine
from infer.engine.guide import Guide, guide_for, vocabulary_of
from infer.engine.params import MAX_RULES
from infer.engine.schema import MAX_CONSTRAINT, MAX_NESTING, Schema
from infer.engine.sequence import NoToken, Sequence
from infer.loader.gguf_tokenizer import build_tokenizer
from infer.loader.text_tokenizers import character_tokenizer
from infer.models.common import Decoder

EOS = 2
PROMPT = [1, 9, 20]
PERSON = {
    "x-guidance": {"whitespace_flexible": False},  # or a random model would spend its tokens on blanks
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'start: item ("," item)*\nitem: /[a-z]{1,3}/ | "(" start ")"\n'
REGEXES = [r"\d{3}-\d{4}", r"(yes|no|maybe)!?", r"[a-f]{2,9}", r"[^a-z]{1,4}x", r"(?i)hello, [a-zé]{1,6}"]


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        {"name", "age", "tags"} <= value.keys() <= set(PERSON["properties"])  # type: ignore[call-overload]
        and isinstance(value["name"], str)
        and 1 <= len(value["name"]) <= 5
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value.get("kind") in ("cat", "dog", None)
        and len(value["tags"]) <= 3
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


def is_list(text: str) -> bool:
    """By taking away the innermost lists until none is left."""
    flat = r"[a-z]{1,3}(,[a-z]{1,3})*"
    while text != (text := re.sub(rf"\({flat}\)", "x", text)):
        pass
    return re.fullmatch(flat, text) is not None


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json_schema": ({"json_schema": PERSON}, is_person),
    "grammar": ({"grammar": LIST}, is_list),
    **{f"regex-{i}": ({"regex": regex}, re.compile(regex).fullmatch) for i, regex in enumerate(REGEXES)},
}


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer._single = {}
    tokenizer._backend = backend
    tokenizer.chat_template = tokenizer.bos_token = tokenizer.eos_token = None
    return tokenizer


@cache
def all_bytes() -> Tokenizer:
    """Byte-level, with merges across characters, two tokens that look alike, and an added one that is not special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("{", '"'), ('"', ":"), ("Ã", "©"), ("a", "Ã"), ("Ġ", "a"), ("t", "r"), ("tr", "u"), ("tru", "e")]
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.add_tokens(["<tool>"])
    return tokenizer_of(backend)


@cache
def sentencepiece() -> Tokenizer:
    """As a GGUF file of Llama 2 has it: bytes for what has no token, and a space in front that is dropped."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁{", "{", "}", '"', ":", ",", "1", "2", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return tokenizer_of(
        build_tokenizer(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
                "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.eos_token_id": 2,
            }
        )
    )


@cache
def characters() -> Tokenizer:
    return tokenizer_of(character_tokenizer({letter: i for i, letter in enumerate(' !"(),:[]{}-.0123456789abcxyz')}))


@cache
def tiny(tokenizer: Tokenizer, seed: int = 0, more: int = 0, eos: bool = True) -> Decoder:
    """more: ids of the model that the tokenizer does not have."""
    ends = (EOS,) if eos else ()
    size = tokenizer.vocab_size + more
    return make_tiny_model(seed, vocab_size=size, eos_token_ids=ends, max_position_embeddings=512)


def params(seed: int = 0, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_new_tokens": 200} | settings)


Outcome = tuple[list[int], str, str, Any]


def taken(text: str, **constraint: Any) -> str:
    """As much of the text as may be generated."""
    guide = guide_for(params(**constraint), all_bytes(), tiny(all_bytes()).config)
    assert guide is not None
    for i, token in enumerate(tokens := all_bytes().encode(text)):
        if not guide.allowed()[token]:
            return all_bytes().decode(tokens[:i])
        guide.append_token(token)
    return text


def outcome(result: Any) -> Outcome:
    return result.token_ids, result.text, result.finish_reason, result.logprobs


class TestTextsMatch:
    @pytest.mark.parametrize("name", CONSTRAINTS)
    @pytest.mark.parametrize("make", [all_bytes, lambda: tokenizer_of(byte_tokenizer())], ids=["all bytes", "few"])
    def test_whatever_is_drawn(self, name: str, make: Callable[[], Tokenizer]) -> None:
        settings, matches = CONSTRAINTS[name]
        tokenizer = make()
        texts = set()
        for seed in range(8):
            result = generate(tiny(tokenizer, seed % 3), tokenizer, PROMPT, params(seed, **settings))
            if result.finish_reason == "length":  # a list may be of any length
                assert name == "grammar"
                continue
            assert result.finish_reason == "eos"
            assert result.token_ids[-1] == EOS
            assert matches(result.text), result.text
            texts.add(result.text)
        assert len(texts) > 1

    @pytest.mark.parametrize("name", [name for name in CONSTRAINTS if name != "grammar"])
    def test_other_ways_to_choose(self, name: str) -> None:
        """Greedily, through filters that would leave nothing of what is allowed, and against every penalty."""
        settings, matches = CONSTRAINTS[name]
        ways: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"top_k": 1},
            {"top_p": 0.01},
            {"top_k": 3, "min_p": 0.9, "temperature": 5.0},
            {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 1e30},
            {"logit_bias": dict.fromkeys(range(40), 1e300)},
        ]
        for way in ways:
            result = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(**settings | way))
            assert result.finish_reason == "eos"
            assert matches(result.text), (way, result.text)

    @pytest.mark.parametrize("kind", CONSTRAINTS)
    def test_drafts_change_no_text(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A draft ends before the first token that the constraint refuses."""
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
        monkeypatch.setattr(Guide, "forced_tokens", lambda *_: [])
        settings, _ = CONSTRAINTS[kind]
        expected = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(**settings))
        offered: list[int] = []

        class Drafter(NgramDrafter):
            def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
                [(sequence, count)] = counts.items()
                done = sequence.num_tokens - sequence.prompt_len
                right = expected.token_ids[done : done + count]
                offered.extend(right[:1])
                return {sequence: [*right[: 1 + done % 3], sequence.prompt[0], *right]}

        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(**settings), speculate=Drafter())
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert result.accepted >= len(offered) > 0
        monkeypatch.setattr(Guide, "num_allowed", lambda _, tokens: len(tokens))
        unchecked = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(**settings), speculate=Drafter())
        assert unchecked.token_ids == expected.token_ids
        assert unchecked.drafted > result.drafted

    def test_forced_tokens_are_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the text that has to come next; a token that the model prefers to cut otherwise is corrected."""
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))
        schema = {"type": "object", "properties": {"a_long_name": {"enum": ["certain"]}}, "required": ["a_long_name"]}
        settings = params(json_schema=json.dumps(schema | {"additionalProperties": False}), logprobs=1)
        without = generate(tiny(all_bytes()), all_bytes(), PROMPT, settings)
        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, settings, speculate=lambda *_: [])
        assert (result.token_ids, result.logprobs) == (without.token_ids, without.logprobs)
        assert result.accepted > len(result.token_ids) / 2
        guide = guide_for(settings, all_bytes(), tiny(all_bytes()).config)
        assert guide is not None
        guide.append_token(without.token_ids[0])
        drafted = guide.forced_tokens(100)
        texts = all_bytes().token_bytes(tiny(all_bytes()).config.vocab_size)[0]
        assert without.text.encode().startswith(b"".join(texts[i] for i in [without.token_ids[0], *drafted]))
        assert guide.forced_tokens(2) == drafted[:2]
        assert guide.num_allowed(drafted) == len(drafted) > 5  # and nothing was appended

    def test_any_object(self) -> None:
        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(json_schema='{"type": "object"}'))
        assert result.text.startswith("{")

    @pytest.mark.parametrize("separators", [(", ", ": "), (",", ":"), (",", ": ")])
    def test_at_most_one_blank(self, separators: tuple[str, str]) -> None:
        text = json.dumps({"a": [1, {"b": [2, {"c": {}}]}], "d": None}, separators=separators)
        assert taken(text, json_schema={"type": "object"}) == text

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("{ ", "{"), ("{\n", "{"), ('{"a":  1', '{"a": '), ('{"a":1 ', '{"a":1'), ('{"a":\n', '{"a":')],
    )
    def test_no_more_white_space(self, text: str, expected: str) -> None:
        """A model that has lost its way would write it up to max_new_tokens."""
        assert taken(text, json_schema={"type": "object"}) == expected

    def test_white_space_that_the_schema_allows(self) -> None:
        text = '{"a":\n  1}'
        flexible = {"type": "object", "x-guidance": {"whitespace_pattern": r"[ \n]{1,3}"}}
        assert taken(text, json_schema=flexible) == text

    def test_parts_of_characters(self) -> None:
        """é and 日 have no token of their own, but for one with a letter before it."""
        for seed in range(10):
            result = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(seed, regex="a?é{1,3}日?"))
            assert re.fullmatch("a?é{1,3}日?", result.text)

    @pytest.mark.parametrize("regex", ["a b( ab)?", "é{2}", '\\{"a":[12]\\}', "[^{]b"])
    def test_sentencepiece(self, regex: str) -> None:
        """Where the first token's space is not shown, none is taken that has one."""
        tokenizer = sentencepiece()
        for seed in range(8):
            result = generate(tiny(tokenizer, seed % 2), tokenizer, PROMPT, params(seed, regex=regex))
            assert re.fullmatch(regex, result.text), (result.text, result.token_ids)
        with pytest.raises(ValueError, match="no token of this vocabulary can begin a text that the regex allows"):
            generate(tiny(tokenizer), tokenizer, PROMPT, params(regex=" a"))

    def test_characters_without_an_end(self) -> None:
        """Nothing can follow a whole text: that ends it."""
        tokenizer = characters()
        model = tiny(tokenizer, eos=False)
        for seed in range(6):
            result = generate(model, tokenizer, PROMPT, params(seed, regex="[abc]{2,4}!"))
            assert re.fullmatch("[abc]{2,4}!", result.text)
            assert result.finish_reason == "stop"
        pieces = list(stream(model, tokenizer, PROMPT, params(regex="abc", temperature=0.0)))
        assert ["".join(piece.text for piece in pieces), pieces[-1].finish_reason] == ["abc", "stop"]
        # What may go on does, as there is nothing to end it with; `d`, which it lacks, cannot follow.
        assert generate(model, tokenizer, PROMPT, params(regex="a*", max_new_tokens=9)).text == "a" * 9
        assert generate(model, tokenizer, PROMPT, params(regex="ad?")).finish_reason == "stop"

    def test_an_end_that_has_text(self) -> None:
        """It ends, and is no part of the text."""
        tokenizer = characters()
        model = tiny(tokenizer)
        assert tokenizer.decode([EOS]) == '"'
        for seed in range(6):
            result = generate(model, tokenizer, PROMPT, params(seed, regex='"?[ab]*', max_new_tokens=100))
            assert result.finish_reason == "eos"
            assert re.fullmatch("[ab]*", result.text)

    def test_ids_that_the_tokenizer_lacks(self) -> None:
        tokenizer = all_bytes()
        model = tiny(tokenizer, more=50)
        some = False
        for seed in range(6):
            free = generate(model, tokenizer, PROMPT, params(seed, max_new_tokens=30))
            some = some or max(free.token_ids) >= tokenizer.vocab_size
            result = generate(model, tokenizer, PROMPT, params(seed, **CONSTRAINTS["regex-2"][0]))
            assert max(result.token_ids) < tokenizer.vocab_size
            assert re.fullmatch(REGEXES[2], result.text)
        assert some

    def test_fewer_ids_than_the_tokenizer_has(self) -> None:
        model = make_tiny_model(vocab_size=150, eos_token_ids=(EOS,))
        result = generate(model, all_bytes(), PROMPT, params(regex="[0-9a]{3}"))
        assert re.fullmatch("[0-9a]{3}", result.text)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: Annotated[int, Field(ge=0, le=9)]
    color: Color


class Label(TypedDict):
    text: Annotated[str, Field(max_length=3)]


class Shape(BaseModel):
    name: Annotated[str, Field(max_length=3)]
    points: Annotated[list[Point], Field(max_length=2)]
    label: Label | None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    size: Literal[1, 2]


class Named(BaseModel):
    """Keys that look like those of a schema."""

    properties: bool
    additionalProperties: bool


class Unclear(BaseModel):
    when: Nowhere  # type: ignore[name-defined]  # noqa: F821


NAMED = '{"properties": true, "additionalProperties": true'
CLASSES: list[Any] = [Shape, Point, Label, Named, list[Point], Shape | None]


class TestClasses:
    @pytest.mark.parametrize("kind", CLASSES, ids=str)
    def test_every_text_is_an_instance(self, kind: Any) -> None:
        for seed in range(4):
            result = generate(tiny(all_bytes(), seed), all_bytes(), PROMPT, params(seed, json_schema=kind))
            assert result.finish_reason == "eos"
            assert TypeAdapter(kind).validate_json(result.text) == result.parsed

    def test_instances(self) -> None:
        settings = params(regex="x")  # the result of a text is read by its schema, however it was generated
        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, settings)
        shape = '{"name": "a", "points": [{"x": 1, "color": "red"}], "label": {"text": "b"}}'
        parsed = replace(result, text=shape, schema=Schema.of(Shape)).parsed
        assert parsed == Shape(name="a", points=[Point(1, Color.RED)], label={"text": "b"})
        assert isinstance(parsed.points[0], Point)
        assert replace(result, text=shape, schema=Schema.of({"type": "object"})).parsed == json.loads(shape)

    @pytest.mark.parametrize(
        ("kind", "text", "expected"),
        [
            (Label, '{"text": "a", "b": 1}', '{"text": "a"'),
            (Point, '{"x": 1, "color": "red", "y": 1}', '{"x": 1, "color": "red"'),
            (list[Shape | Label], '[{"text": "a"}, {"text": "a", "b": 1}]', '[{"text": "a"}, {"text": "a"'),
            (
                Named,
                '{"properties": true, "additionalProperties": false, "a": 1}',
                '{"properties": true, "additionalProperties": false',
            ),
            (Open, '{"size": 1, "b": [1]}', '{"size": 1, "b": [1]}'),
            (dict[str, int], '{"a": 1}', '{"a": 1}'),
            ({"type": "object", "properties": {"x": {}}}, '{"z": 1}', '{"z": 1}'),
        ],
        ids=str,
    )
    def test_no_other_keys_unless_the_class_allows_them(self, kind: Any, text: str, expected: str) -> None:
        assert taken(text, json_schema=kind) == expected

    @pytest.mark.parametrize(
        ("kind", "text", "expected"),
        [
            (int, "9007199254740991", "9007199254740991"),
            (int, "9007199254740992", "900719925474099"),
            (int, "-9" + "0" * 30, "-9" + "0" * 15),
            (Annotated[int, Field(ge=5)], "1" * 30, "1" * 16),
            (Annotated[int, Field(ge=2**53)], "9" * 30, "9" * 30),
            ({"type": "integer"}, "9" * 30, "9" * 30),
        ],
        ids=str,
    )
    def test_an_integer_without_limits_ends(self, kind: Any, text: str, expected: str) -> None:
        assert taken(text, json_schema=kind) == expected

    def test_settings_keep_the_class(self) -> None:
        kept = params(json_schema=Shape)
        assert json.loads(asdict(kept)["json_schema"]) == json.loads(str(kept.json_schema))
        copies = [replace(kept, seed=3), SamplingParams(json_schema=kept.schema), copy.deepcopy(kept)]
        assert [each.schema and each.schema.kind for each in copies] == [Shape] * 3
        assert SamplingParams(json_schema=str(kept.json_schema)).schema == kept.schema

    @pytest.mark.parametrize(
        ("kind", "message"), [(Unclear, "json_schema: .*Unclear.* not fully defined"), (Guide, "json_schema: .*Guide")]
    )
    def test_classes_without_a_schema(self, kind: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            SamplingParams(json_schema=kind)
        assert "\n" not in str(error.value)

    def test_without_pydantic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pydantic", None)
        with pytest.raises(ImportError, match=r"a class as json_schema needs pydantic.*infer-kv\[server\]"):
            SamplingParams(json_schema=Shape)
        assert SamplingParams(json_schema={"type": "object"}).schema == '{"type": "object"}'


class TestParsed:
    def test_everywhere(self) -> None:
        model, tokenizer, settings = tiny(all_bytes()), all_bytes(), params(3, json_schema=Point)
        expected = generate(model, tokenizer, PROMPT, settings).parsed
        assert isinstance(expected, Point)
        assert generate_batch(model, tokenizer, [PROMPT], settings)[0].parsed == expected
        with LLM(model, tokenizer, cache_memory=10**6) as llm:
            assert llm.generate(PROMPT, settings).parsed == expected
            handle = llm.stream(PROMPT, settings)
            assert "".join(token.text for token in handle) == handle.result().text
            assert handle.result().parsed == expected
            samples: Any = llm.generate(PROMPT, params(3, json_schema=Point, n=3))
            assert [type(sample.parsed) for sample in samples] == [Point] * 3
            session = llm.session(encode=lambda _: PROMPT)
            assert session.send("?", settings).parsed == expected

    def test_a_cut_text(self) -> None:
        settings = params(json_schema=Shape, max_new_tokens=5)
        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, settings)
        assert result.finish_reason == "length"
        with pytest.raises(ValueError, match=r"incomplete: it was cut at max_new_tokens=5 .* Raise max_new_tokens"):
            _ = result.parsed

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"finish_reason": "interrupted"}, "incomplete: the request was aborted"),
            ({"finish_reason": "stop", "text": '{"x": 1, '}, r"incomplete \(finish_reason 'stop'\): Expecting"),
            ({"text": '{"x": 10, "color": "red"}'}, "less than or equal to 9"),
            ({"schema": None}, "nothing to parse the text by: generate it with json_schema"),
        ],
    )
    def test_other_reasons(self, changes: dict[str, Any], message: str) -> None:
        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(3, json_schema=Point))
        with pytest.raises(ValueError, match=message):
            _ = replace(result, **changes).parsed


class TestEnds:
    def test_length(self) -> None:
        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(regex="[a-z]{40}", max_new_tokens=7))
        assert result.finish_reason == "length"
        assert re.fullmatch("[a-z]{7,21}", result.text)

    def test_stop_strings(self) -> None:
        result = generate(tiny(all_bytes()), all_bytes(), PROMPT, params(regex="(one|two), three", stop=", th"))
        assert (result.finish_reason, result.text in ("one", "two")) == ("stop", True)

    def test_nothing_that_could_follow(self) -> None:
        """The vocabulary has no `d`."""
        model = tiny(characters())
        with pytest.raises(NoToken, match="position 5: the vocabulary lacks what has to follow"):
            generate(model, characters(), PROMPT, params(regex="abd"))
        with LLM(model, characters(), cache_memory=10**6) as llm:
            failing, other = (llm.submit(PROMPT, params(regex=regex)) for regex in ("abd", "abc"))
            with pytest.raises(NoToken):
                failing.result()
            assert other.result().text == "abc"


def memory_of(model: Decoder, pages: int) -> CacheMemory:
    bytes_per_page = 4 * 2 * 2 * 2 * 8 * 4  # positions, k and v, layers, kv heads, head_dim, float32
    return CacheMemory(model, pages * bytes_per_page, page_size=4)


class TestAnyRun:
    @pytest.mark.parametrize("name", ["json_schema", "grammar", "regex-4"])
    def test_the_same_text(self, name: str) -> None:
        """Alone, without a cache, in chunks, in a batch, with others that are not constrained, and in an LLM."""
        settings, _ = CONSTRAINTS[name]
        model, tokenizer = tiny(all_bytes()), all_bytes()
        wanted = [params(seed, logprobs=1, **settings, max_new_tokens=60) for seed in range(4)] + [params(0)]
        wanted += [params(temperature=0.0, **settings, max_new_tokens=60)]
        alone = [outcome(generate(model, tokenizer, PROMPT, each)) for each in wanted]
        for options in ({"use_kv_cache": False}, {"prefill_chunk": 2}, {"cache_dtype": "auto"}):
            assert outcome(generate(model, tokenizer, PROMPT, wanted[1], **options)) == alone[1]
        batch = generate_batch(model, tokenizer, [PROMPT] * len(wanted), wanted, prefill_chunk=2)
        assert [outcome(result) for result in batch] == alone
        with LLM(model, tokenizer, cache_memory=10**6) as llm:
            assert [outcome(result) for result in llm.generate([PROMPT] * len(wanted), wanted)] == alone
            pieces = list(llm.stream(PROMPT, wanted[0]))
            assert "".join(piece.text for piece in pieces) == alone[0][1]

    def test_preempted(self) -> None:
        """Rows that lose their pages are computed again, and go on where they were."""
        model, tokenizer = tiny(all_bytes()), all_bytes()
        each = [params(seed, json_schema=PERSON, max_new_tokens=60, logprobs=0) for seed in range(5)]
        engine = Engine(model, memory_of(model, 40), max_rows=5, prefill_chunk=12)
        sequences = [Sequence(model.config, tokenizer, [1, 9, 30 + i], own) for i, own in enumerate(each)]
        for sequence in sequences:
            engine.check(sequence)
            engine.submit(sequence)
        while not engine.is_idle:
            engine.step()
        assert engine.stats().preemptions >= 2
        for i, (sequence, own) in enumerate(zip(sequences, each, strict=True)):
            assert outcome(sequence.result()) == outcome(generate(model, tokenizer, [1, 9, 30 + i], own))

    def test_samples(self) -> None:
        """Each goes its own way."""
        with LLM(tiny(all_bytes()), all_bytes(), cache_memory=10**6) as llm:
            results = llm.generate(PROMPT, params(5, json_schema=PERSON, n=4))
            assert len({result.text for result in results}) > 1  # type: ignore[attr-defined]
            assert all(is_person(result.text) for result in results)  # type: ignore[attr-defined]

    def test_sessions(self, tmp_path: Path) -> None:
        def encode(messages: list[dict[str, str]]) -> list[int]:
            return all_bytes().encode("".join(message["content"] for message in messages))

        with LLM(tiny(all_bytes()), all_bytes(), cache_memory=10**6) as llm:
            session = llm.session(params=params(regex="(yes|no){1,2}"), encode=encode)
            for _ in range(2):
                assert re.fullmatch("(yes|no){1,2}", session.send("And?").text)
            with pytest.raises(ValueError, match="the regex cannot be used: unclosed group"):
                session.stream("And?", params(regex="("))
            assert session.send("And?", regex="[ab]{90}", max_new_tokens=3).finish_reason == "length"
            with pytest.raises(ValueError, match="the regex of the last answer would begin again"):
                session.more()
            json_only = llm.session(params=params(json_schema=PERSON), encode=encode)
            json_only.save(tmp_path / "session")
            assert llm.load_session(tmp_path / "session", encode=encode).params == json_only.params

    def test_beyond_the_context(self) -> None:
        model = make_tiny_model(vocab_size=300, eos_token_ids=(EOS,), max_position_embeddings=16)
        settings = params(regex="([ab]c){20}", max_new_tokens=60)
        result = generate(model, all_bytes(), PROMPT, settings, on_full="recompute")
        assert re.fullmatch("([ab]c){20}", result.text)
        batch = generate_batch(model, all_bytes(), [PROMPT], settings, on_full="recompute")
        assert outcome(batch[0]) == outcome(result)

    def test_log_probabilities_are_the_models_own(self) -> None:
        """Those of a text are what they are when it is scored, whatever else was allowed."""
        model, tokenizer = tiny(all_bytes()), all_bytes()
        result = generate(model, tokenizer, PROMPT, params(3, json_schema=PERSON, logprobs=2))
        scored = SamplingParams(prompt_logprobs=2, max_new_tokens=0)
        expected = generate(model, tokenizer, PROMPT + result.token_ids, scored).prompt_logprobs
        assert expected is not None
        assert result.logprobs == expected[len(PROMPT) :]

    def test_not_in_captured_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The host chooses: a device does not know what is allowed."""

        class Captured:
            def supports(self, cache: Any) -> bool:
                return True

            def add(self, *_: Any) -> None:
                raise ZeroDivisionError

            def close(self) -> None: ...

        for backend in (TorchBackend, CpuBackend):
            monkeypatch.setattr(backend, "captured_decoder", lambda _: Captured())
        model, settings = tiny(all_bytes()), params(regex="(yes|no){3}")
        with pytest.raises(ZeroDivisionError):
            generate(model, all_bytes(), PROMPT, params())
        assert re.fullmatch("(yes|no){3}", generate(model, all_bytes(), PROMPT, settings).text)
        assert re.fullmatch("(yes|no){3}", generate_batch(model, all_bytes(), [PROMPT], settings)[0].text)


class TestVocabulary:
    @pytest.mark.parametrize("make", [all_bytes, sentencepiece, characters], ids=lambda make: make.__wrapped__.__name__)
    def test_bytes_add_up_to_the_text(self, make: Callable[[], Tokenizer]) -> None:
        """Of any tokens whose bytes are characters."""
        tokenizer = make()
        inside, first = tokenizer.token_bytes(tokenizer.vocab_size)
        chance, compared = np.random.default_rng(0), 0
        for _ in range(3000):
            ids = chance.integers(0, tokenizer.vocab_size, chance.integers(1, 5)).tolist()
            try:
                text = (first[ids[0]] + b"".join(inside[i] for i in ids[1:])).decode()
            except UnicodeDecodeError:
                continue
            if first[ids[0]]:  # else the next one is the first to be shown
                compared += 1
                assert tokenizer.decode(ids) == text
        assert compared > 500

    def test_special_tokens_have_none(self) -> None:
        inside, first = all_bytes().token_bytes(all_bytes().vocab_size + 3)
        assert inside[:3] == first[:3] == [b""] * 3
        assert inside[-4:] == [b"<tool>", b"", b"", b""]

    def test_made_once(self) -> None:
        config = tiny(all_bytes()).config
        assert vocabulary_of(all_bytes(), config) is vocabulary_of(all_bytes(), config)
        assert vocabulary_of(all_bytes(), config) is not vocabulary_of(all_bytes(), tiny(all_bytes(), eos=False).config)

    def test_guides_share_nothing(self) -> None:
        config = tiny(all_bytes()).config
        one, other = (guide_for(params(regex="ab"), all_bytes(), config) for _ in range(2))
        assert one is not None
        assert other is not None
        before = other.allowed().copy()
        one.append_token(int(np.flatnonzero(one.allowed())[0]))
        assert (other.allowed() == before).all()
        assert (one.allowed() != before).any()


SCHEMA_64: Any = {"type": "string"}
for _ in range(MAX_NESTING - 1):
    SCHEMA_64 = {"items": SCHEMA_64}


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"regex": "a", "grammar": "start: /a/"}, "regex and grammar were given"),
            ({"regex": "a", "ignore_eos": True}, "ignore_eos continues after the end, which regex does not allow"),
            ({"regex": 3}, "regex must be a string, not 3"),
            ({"grammar": b"start"}, "grammar must be a string, not b'start'"),
            ({"regex": "a" * (MAX_CONSTRAINT + 1)}, "regex has 65,537 bytes: at most 65,536 are allowed"),
            ({"regex": "é" * (MAX_CONSTRAINT // 2 + 1)}, "regex has 65,538 bytes"),
            ({"regex": "\ud800"}, "regex is not Unicode"),
            ({"grammar": "a: b\n" * (MAX_RULES + 1)}, "the grammar has 513 rules: at most 512 are allowed"),
            ({"json_schema": True}, "json_schema must be an object"),
            ({"json_schema": "[]"}, r"json_schema must be an object like .*, not \[\]"),
            ({"json_schema": "{"}, "json_schema is not JSON: Expecting property name"),
            ({"json_schema": {"enum": [{1}]}}, "json_schema is not JSON: Object of type set"),
            ({"json_schema": {"const": float("nan")}}, "Out of range float"),
            ({"json_schema": {"enum": ["x" * MAX_CONSTRAINT]}}, "json_schema has 65,5"),
            ({"json_schema": {"items": SCHEMA_64}}, "json_schema is nested more than 64 levels deep"),
            ({"json_schema": '{"a":' * 9000 + "1" + "}" * 9000}, "json_schema is n"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**settings)

    def test_the_deepest_schema(self) -> None:
        assert generate(tiny(all_bytes()), all_bytes(), PROMPT, params(json_schema=SCHEMA_64, max_new_tokens=9)).text

    def test_a_schema_is_kept_as_text(self) -> None:
        given = {"type": "object", "properties": {"b": {}, "a": {}}}
        kept = SamplingParams(json_schema=given)
        assert kept == SamplingParams(json_schema=json.dumps(given, indent=2))
        assert kept.constraint == ("json_schema", json.dumps(given))
        assert SamplingParams().constraint is None

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"json_schema": {"type": "strange"}}, "the json_schema cannot be used: Invalid type: strange"),
            ({"json_schema": {"not": {}}}, 'the json_schema cannot be used: Unimplemented keys: ["not"]'),
            ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "Unsatisfiable schema"),
            ({"json_schema": {"$ref": "https://example.com/a"}}, "Resource 'https://example.com/a' is not present"),
            ({"json_schema": {"type": "string", "pattern": "("}}, "the json_schema cannot be used: unclosed group"),
            ({"regex": "(a"}, "the regex cannot be used: unclosed group"),
            ({"regex": "a(?=b)"}, "the regex cannot be used: look-around"),
            ({"regex": r"(a)\1"}, "the regex cannot be used: backreferences are not supported"),
            ({"grammar": ""}, "the grammar cannot be used: no start rule found"),
            ({"grammar": "start: a"}, 'the grammar cannot be used: at 1(8): unknown name: "a"'),
            ({"grammar": "start: " + "(" * 9000}, "the grammar cannot be used: 1(37): lark grammar too deeply nested"),
        ],
    )
    def test_what_does_not_compile(self, settings: dict[str, Any], message: str) -> None:
        """Before anything is computed, in one line; and not only the first time."""
        model = tiny(all_bytes())
        for ask in (
            lambda: stream(model, all_bytes(), PROMPT, params(**settings)),
            lambda: Sequence(model.config, all_bytes(), PROMPT, params(**settings)),
        ):
            with pytest.raises(ValueError, match=re.escape(message)) as error:
                ask()
            assert "\n" not in str(error.value)

    def test_as_many_rules_as_there_may_be(self) -> None:
        """Each leads to the next."""
        names = [f"a{i}: a{i + 1}\n" for i in range(MAX_RULES - 2)]
        grammar = "start: a0\n" + "".join(names) + f'a{MAX_RULES - 2}: "x"'
        assert generate(tiny(all_bytes()), all_bytes(), PROMPT, params(grammar=grammar)).text == "x"

    def test_a_tokenizer_without_bytes(self) -> None:
        class Letters:
            def decode(self, token_ids: list[int]) -> str:
                return "a" * len(token_ids)

        with pytest.raises(TypeError, match="needs the bytes of each token, which Letters does not give"):
            generate(tiny(all_bytes()), Letters(), PROMPT, params(regex="a"))

    @pytest.fixture
    def missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(name: str, *args: Any, **more: Any) -> Any:
            if name.split(".")[0] == "llguidance":
                raise ImportError(name)
            return real(name, *args, **more)

        real = builtins.__import__
        monkeypatch.delitem(sys.modules, "llguidance", raising=False)
        monkeypatch.setattr(builtins, "__import__", refuse)
        monkeypatch.setattr(guides, "_vocabularies", type(guides._vocabularies)())

    @pytest.mark.usefixtures("missing")
    def test_without_llguidance(self, run: Run) -> None:
        with pytest.raises(ImportError, match=r"needs llguidance.*pip install 'infer-kv\[server\]'"):
            generate(tiny(all_bytes()), all_bytes(), PROMPT, params(regex="a"))
        assert generate(tiny(all_bytes()), all_bytes(), PROMPT, params(max_new_tokens=3)).text
        refused = run("generate", "hello", "--regex", "a", "--max-new-tokens", "9")
        assert_refused(refused, "pip install 'infer-kv[server]'")


class TestCommand:
    FEW = ("--max-new-tokens", "100", "--temperature", "1", "--seed", "1")

    def test_one_prompt(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "schema.json").write_text(json.dumps(PERSON))
        (tmp_path / "list.lark").write_text('start: "a" ("," "b")~2')
        done = run("generate", "hello", "--json-schema", tmp_path / "schema.json", *self.FEW)
        assert done.status == 0
        assert is_person(done.out)
        assert re.fullmatch("(yes|no)\n", run("generate", "hello", "--regex", "yes|no", *self.FEW).out)
        assert run("generate", "hello", "--grammar", tmp_path / "list.lark", *self.FEW).out == "a,b,b\n"

    def test_many_prompts(self, run: Run, tmp_path: Path) -> None:
        lines: list[Any] = ["hello", {"prompt": "you", "regex": None, "json_schema": PERSON}]
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
        done = run("generate", "--prompts", tmp_path / "prompts.jsonl", "--regex", "yes|no", *self.FEW)
        texts = {each["index"]: each["text"] for each in map(json.loads, done.out.splitlines())}
        assert texts[0] in ("yes", "no")
        assert is_person(texts[1])

    @pytest.mark.usefixtures("untouched")
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--regex", "("], "the regex cannot be used: unclosed group"),
            (["--regex", "a", "--ignore-eos"], "ignore_eos continues after the end"),
            (["--regex", "a", "--grammar", "FILE"], "regex and grammar were given"),
            (["--json-schema", "FILE"], "json_schema is not JSON"),
            (["--grammar", "FILE"], "the grammar cannot be used"),
            (["--grammar", "nowhere.lark"], "nowhere.lark"),
        ],
    )
    @pytest.mark.parametrize("many", [False, True])
    def test_refused(self, run: Run, tmp_path: Path, options: list[str], message: str, many: bool) -> None:
        (tmp_path / "file").write_text("nonsense")
        (tmp_path / "prompts.jsonl").write_text('"hello"\n"you"')
        given = [str(tmp_path / "file") if option == "FILE" else option for option in options]
        prompt = ["--prompts", str(tmp_path / "prompts.jsonl")] if many else ["hello"]
        assert_refused(run("generate", *prompt, *given, "--max-new-tokens", "9"), message)
