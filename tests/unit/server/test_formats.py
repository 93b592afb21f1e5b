"""What a model writes in a chat, cut anywhere, becomes reasoning, content and tool calls; nothing is lost."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import llguidance
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infer.loader.chat import TEMPLATES
from infer.server.chat_template import format_of, function_schemas, tool_grammar
from infer.server.parser import (
    HERMES,
    LLAMA,
    THINK,
    Content,
    Delta,
    Format,
    Parser,
    Reasoning,
    ToolCall,
    new_call_id,
)

# Excerpts of published templates, not whole ones: what they say of tools and reasoning, with quotes as they have them.
QWEN3 = r"""{%- if tools %}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- if '</think>' in message.content %}{%- endif %}
{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- '}\n</tool_call>' }}
"""  # noqa: E501
QWEN2_5 = QWEN3.replace("{%- if '</think>' in message.content %}{%- endif %}\n", "")
HERMES_2 = r"""{%- for tool in tools %}{%- endfor %}
{{- 'For each function call return a json object with function name and arguments within <tool_call></tool_call> XML tags as follows:\n' }}
{{- "<tool_call>\n" }}{{- '{"name": <function-name>, "arguments": <args-dict>}\n' }}{{- '</tool_call>' }}
{{- ', "parameters": ' }}
"""  # noqa: E501
SMOLLM3 = r"""{%- if xml_tools or python_tools or tools -%}
{%- set xml_tool_string = ns.xml_tool_string + "</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" -%}
{{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<think>\n\n</think>\n" }}
{%- endif -%}
"""  # noqa: E501
SMOLLM2 = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']}}{% endfor %}"
LLAMA3_2 = """{%- if tools_in_user_message and not tools is none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- endif %}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}
"""
LLAMA3_1 = LLAMA3_2 + """{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
DEEPSEEK_DISTILL = (
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{%- for tool in message['tool_calls'] %}{{'<｜tool▁calls▁begin｜>' + tool['type']}}{%- endfor %}"  # noqa: RUF001
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"  # noqa: RUF001
)
QWEN3_CODER = r"""{%- if tools %}{{- '<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>' }}
{%- for name, value in tool_call.arguments|items %}{%- endfor %}{%- endif %}"""
MISTRAL = """{%- if tools is defined %}{{ "[AVAILABLE_TOOLS]" }}{% endif %}
{{ '[TOOL_CALLS] [{"name": "x", "arguments": ' }}"""

QWEN = Format(HERMES, THINK)
LLAMA_FORMAT = Format(LLAMA, None)
BOTH = Format(LLAMA, THINK)
FORMATS = [QWEN, Format(HERMES, None), LLAMA_FORMAT, BOTH]


def ids() -> Iterator[str]:
    return (f"call_{i:024x}" for i in itertools.count())


def parse(format: Format, *pieces: str, tools: bool = True, thinking: bool = True, starts: bool = False) -> list[Delta]:
    """The parts of an answer that comes in these pieces, where neighbours of one kind are one."""
    parser = Parser(format, tools=tools, thinking=thinking, starts_thinking=starts, new_id=ids().__next__)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    parts: list[Delta] = []
    for kind, group in itertools.groupby(deltas, key=type):
        same = list(group)
        parts += same if kind is ToolCall else [kind("".join(delta.text for delta in same))]
    return parts


def call(index: int, name: str, arguments: str) -> list[Delta]:
    return [ToolCall(index, f"call_{index:024x}", name, ""), ToolCall(index, None, None, arguments)]


class TestFormat:
    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            (QWEN3, Format(HERMES, THINK)),
            (QWEN2_5, Format(HERMES, None)),
            (HERMES_2, Format(HERMES, None)),
            (SMOLLM3, Format(HERMES, THINK)),
            (SMOLLM2, Format(None, None)),
            (LLAMA3_1, Format(LLAMA, None)),
            (LLAMA3_2, Format(LLAMA, None)),
            (DEEPSEEK_DISTILL, Format(None, THINK)),
            (QWEN3_CODER, Format(None, None)),  # its calls are not JSON
            (MISTRAL, Format(None, None)),
            (TEMPLATES["llama"], Format(None, None)),
            (TEMPLATES["qwen3"], Format(None, THINK)),
            (TEMPLATES["gemma3"], Format(None, None)),
            ("", Format(None, None)),
            (None, Format(None, None)),
        ],
    )
    def test_found_from_a_template(self, template: str | None, expected: Format) -> None:
        assert format_of(template) == expected

    def test_starts_thinking(self) -> None:
        assert QWEN.starts_thinking("<|im_start|>assistant\n<think>\n")
        assert not QWEN.starts_thinking("<|im_start|>assistant\n")
        assert not QWEN.starts_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert not LLAMA_FORMAT.starts_thinking("<think>\n")


class TestReasoning:
    def test_before_content(self) -> None:
        text = "<think>\nIt is\n\nsimple.\n</think>\n\nFour.\n"
        assert parse(QWEN, text) == [Reasoning("It is\n\nsimple."), Content("Four.\n")]

    def test_opened_by_the_prompt(self) -> None:
        expected = [Reasoning("Hm."), Content("Four.")]
        assert parse(QWEN, "Hm.\n</think>\n\nFour.", starts=True) == expected
        assert parse(QWEN, "\nHm.\n</think>\n\nFour.", starts=True) == expected
        assert parse(QWEN, "<think>\nHm.\n</think>\n\nFour.", starts=True) == expected

    def test_empty(self) -> None:
        assert parse(QWEN, "<think>\n\n</think>\n\nFour.") == [Content("Four.")]
        assert parse(QWEN, "<think></think>") == []

    def test_unfinished(self) -> None:
        assert parse(QWEN, "<think>\nHm, </thi") == [Reasoning("Hm, </thi")]
        assert parse(QWEN, "Hm. \n", starts=True) == [Reasoning("Hm. \n")]
        assert parse(QWEN, "<thi", starts=True) == [Reasoning("<thi")]
        assert parse(QWEN, " <thi") == [Content(" <thi")]

    def test_only_at_the_beginning(self) -> None:
        text = "Use <think> and </think>."
        assert parse(QWEN, text) == [Content(text)]
        assert parse(QWEN, f"<think>a</think>{text}") == [Reasoning("a"), Content(text)]

    def test_off(self) -> None:
        text = "<think>\nHm.\n</think>\n\nFour."
        assert parse(QWEN, text, thinking=False) == [Content(text)]
        assert parse(LLAMA_FORMAT, text) == [Content(text)]

    def test_calls_in_it_are_thoughts(self) -> None:
        thought = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        assert parse(QWEN, f"<think>{thought}</think>{thought}") == [Reasoning(thought), *call(0, "f", "{}")]


class TestHermes:
    def test_call(self) -> None:
        text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 1.50}}\n</tool_call>'
        assert parse(QWEN, text) == call(0, "weather", '{"city": "Bern", "days": 1.50}')

    def test_text_and_several(self) -> None:
        one = '<tool_call>\n{"name": "a", "arguments": {"x": [1, {"y": "}"}]}}\n</tool_call>'
        other = '<tool_call>{"arguments": {}, "name": "b"}</tool_call>'
        text = f"<think>\nHm.\n</think>\n\nI look.\n\n{one}\n{other}\n"
        calls = [*call(0, "a", '{"x": [1, {"y": "}"}]}'), *call(1, "b", "{}")]
        assert parse(QWEN, text) == [Reasoning("Hm."), Content("I look."), *calls]
        assert parse(QWEN, f"{text}Done.") == [Reasoning("Hm."), Content("I look."), *calls, Content("\nDone.")]

    def test_list(self) -> None:
        text = '<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]</tool_call>'
        assert parse(QWEN, text) == [*call(0, "a", '{"x": 1}'), *call(1, "b", "{}")]

    def test_several_within_one_pair_of_markers(self) -> None:
        text = '<tool_call>\n{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}\n</tool_call>'
        assert parse(QWEN, text) == [*call(0, "a", "{}"), *call(1, "b", "{}")]

    def test_markers_within_an_argument(self) -> None:
        arguments = r'{"text": "</tool_call><tool_call>\"\\</think>"}'
        text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
        assert parse(QWEN, text) == call(0, "write", arguments)

    def test_closing_marker_may_be_missing_at_the_end(self) -> None:
        for end in ("", "\n", "\n</tool_", "</tool_call>"):
            assert parse(QWEN, '<tool_call>\n{"name": "f", "arguments": {}}' + end) == call(0, "f", "{}")

    @pytest.mark.parametrize(
        "text",
        [
            '<tool_call>\n{"name": "f", "arguments": {"x": \n</tool_call>',
            '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {},}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": "f"}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"x": "\n"}}</tool_call>',
            '<tool_call>[{"name": "f", "arguments": {}}, 1]</tool_call>',
            "<tool_call>[]</tool_call>",
            "<tool_call>[[]]</tool_call>",
            "<tool_call>f(x)</tool_call>",
            '<tool_call>"name"</tool_call>',
            "<tool_call>}</tool_call>",
            "<tool_call></tool_call>",
            '<tool_call>{"name": "f", "arguments": {}} and so on</tool_call>',
            '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>',
            '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",  # more than Python reads
            "Use <tool_call> for it.",
            "a </tool_call> b",
            "half a <tool_",
            "<tool_call>",
            " \n",
            "",
        ],
    )
    def test_what_is_no_call_is_content(self, text: str) -> None:
        assert parse(QWEN, text) == ([Content(text)] if text else [])
        assert parse(QWEN, *text) == ([Content(text)] if text else [])

    def test_call_behind_a_broken_one(self) -> None:
        good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        for broken in (
            '<tool_call>{"a": "b</tool_call>',
            "<tool_call>",
            '<tool_call>{"a": 1}</tool_call>',
            '<tool_call>{"name": "g", "arguments": {}} and',
        ):
            assert parse(QWEN, f"{broken}\n{good}") == [Content(broken), *call(0, "f", "{}")]

    def test_off(self) -> None:
        text = '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        assert parse(QWEN, text, tools=False) == [Content(text)]
        assert parse(Format(None, None), text) == [Content(text)]


class TestLlama:
    @pytest.mark.parametrize("before", ["", "\n", "<|python_tag|>", "<|python_tag|>\n"])
    def test_call(self, before: str) -> None:
        text = before + '{"name": "weather", "parameters": {"city": "Bern"}}'
        assert parse(LLAMA_FORMAT, text) == call(0, "weather", '{"city": "Bern"}')

    @pytest.mark.parametrize("between", [";", "; ", "\n", "\n\n", " ;\n"])
    def test_several(self, between: str) -> None:
        text = '{"name": "a", "parameters": {}}' + between + '{"name": "b", "parameters": {"x": 1}}\n'
        assert parse(LLAMA_FORMAT, text) == [*call(0, "a", "{}"), *call(1, "b", '{"x": 1}')]

    def test_behind_reasoning(self) -> None:
        text = '<think>Hm.</think>\n{"type": "function", "name": "a", "parameters": {}}'
        assert parse(BOTH, text) == [Reasoning("Hm."), *call(0, "a", "{}")]

    @pytest.mark.parametrize(
        "text",
        [
            'Here: {"name": "a", "parameters": {}}',
            '{"name": "a", "parameters": {}} is how.',
            '{"name": "a", "parameters": {}}; {"x": 1}',
            '{"answer": 4}',
            '{"answer": 4}<|python_tag|>{"name": "a", "parameters": {}}',
            "{x} is a set",
            '{"name": "a", "parameters": {',
            '\n<|python_tag|>brave_search.call(query="Bern")',
            " <|python",
            "<|python_tag|>",
            "\n",
        ],
    )
    def test_what_is_no_call_is_content(self, text: str) -> None:
        assert parse(LLAMA_FORMAT, text) == [Content(text)]
        assert parse(LLAMA_FORMAT, *text) == [Content(text)]

    def test_off(self) -> None:
        text = '<|python_tag|>{"name": "a", "parameters": {}}'
        assert parse(LLAMA_FORMAT, text, tools=False) == [Content(text)]


class TestStreaming:
    def test_parts_come_as_soon_as_they_are_certain(self) -> None:
        parser = Parser(QWEN, tools=True, thinking=True, new_id=ids().__next__)
        assert parser.feed("<thi") == []
        assert parser.feed("nk>\nHm") == [Reasoning("Hm")]
        assert parser.feed(".\n") == [Reasoning(".")]
        assert parser.feed("</think>\n\nI <") == [Content("I")]
        assert parser.feed("b> <tool") == [Content(" <b>")]
        assert parser.feed('_call>\n{"name": "f", "argu') == []
        assert parser.feed('ments": {}}\n') == []
        assert parser.feed("</tool_call>") == call(0, "f", "{}")
        assert parser.finish() == []

    def test_text_that_is_no_call_does_not_wait_for_the_end(self) -> None:
        parser = Parser(QWEN, tools=True, thinking=True)
        assert parser.feed("Use <tool_call> for it") == [Content("Use <tool_call> for it")]
        parser = Parser(LLAMA_FORMAT, tools=True, thinking=True)
        assert parser.feed("{x} is") == [Content("{x} is")]

    def test_ids(self) -> None:
        assert re.fullmatch(r"call_[0-9a-f]{24}", new_call_id())
        assert new_call_id() != new_call_id()


# Pieces of which hostile answers are made; cuts within them are part of what is tried.
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "</", "<tool_"),
    *("{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "a", "é", "\ud800", "1", "null"),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {"x": "y"}}'),
    '<tool_call>\n{"name": "g", "arguments": {"x": "</tool_call>"}}\n</tool_call>',
]
answers = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12).map("".join)


def around(parts: list[Delta]) -> str:
    """A pattern of all texts that have these parts: them, and nothing but markers, and white space at markers."""
    pattern = r"(\s*<think>)?\s*"
    if parts and isinstance(parts[0], Reasoning):
        pattern += re.escape(parts[0].text)
        parts = parts[1:]
    pattern += r"(\s*</think>\s*)?"
    for part in parts:
        if isinstance(part, Content):
            pattern += re.escape(part.text)
        elif isinstance(part, ToolCall) and part.name is not None:
            pattern += (
                rf'\s*(<tool_call>|<\|python_tag\|>)?[\s;,\[]*{{"name": "{part.name}", "(arguments|parameters)":\s*'
            )
        elif isinstance(part, ToolCall):
            pattern += re.escape(part.arguments) + r"[^<{]*}[\s;\]]*(</tool_call>\s*)?"
    if parts and isinstance(parts[-1], ToolCall):
        pattern += r"(</?\w*)?"  # the end of the text has cut a closing marker off
    return pattern


class TestAnyCut:
    @settings(max_examples=150, deadline=None)
    @given(answers, st.data(), st.sampled_from(FORMATS), st.booleans(), st.booleans())
    def test_same_parts(self, text: str, data: st.DataObject, format: Format, tools: bool, starts: bool) -> None:
        whole = parse(format, text, tools=tools, starts=starts)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert parse(format, *pieces, tools=tools, starts=starts) == whole
        assert parse(format, *text, tools=tools, starts=starts) == whole

    @settings(max_examples=150, deadline=None)
    @given(answers, st.sampled_from(FORMATS), st.booleans())
    @example('<tool_call>{"name": "f", "arguments": {}}</tool', QWEN, False)
    def test_nothing_is_lost(self, text: str, format: Format, starts: bool) -> None:
        parts = parse(format, text, starts=starts)
        assert re.fullmatch(around(parts), text), parts

    @settings(max_examples=150, deadline=None)
    @given(answers, st.sampled_from(FORMATS))
    @example('<think>\n{"name": "f", "arguments": {}}', QWEN)
    def test_content_is_unchanged(self, text: str, format: Format) -> None:
        """Without tools and reasoning to look for, an answer is itself."""
        expected = [Content(text)] if text else []
        assert parse(format, text, tools=False, thinking=False) == expected
        parts = parse(format, text, thinking=False)
        if not any(isinstance(part, ToolCall) for part in parts):
            assert parts == expected

    @settings(max_examples=150, deadline=None)
    @given(
        st.text("ab<\n ", max_size=8),
        st.lists(
            st.tuples(
                st.text("ab<> \n", max_size=6),
                st.dictionaries(st.text(max_size=3), st.one_of(st.text(), st.sampled_from(PIECES)), max_size=2),
            ),
            max_size=4,
        ),
        st.integers(1, 9),
    )
    def test_what_was_written_is_read(self, thought: str, calls: list[tuple[str, dict[str, str]]], step: int) -> None:
        """An answer made of known parts: every character is in the part it belongs to."""
        text, expected = f"<think>\n{thought}\n</think>\n\n", ""
        for i, (before, arguments) in enumerate(calls):
            text += f'{before}\n<tool_call>\n{{"name": "f{i}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            expected += before.rstrip() if i else before.strip()
        parts = parse(QWEN, *(text[at : at + step] for at in range(0, len(text), step)))
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == thought.strip()
        assert "".join(part.text for part in parts if isinstance(part, Content)) == expected
        written = [part.arguments for part in parts if isinstance(part, ToolCall) and part.name is None]
        assert written == [json.dumps(arguments) for _, arguments in calls]


MEGABYTE, LONG = 1_000_000, 400_000
HOSTILE = {
    "<": "<" * MEGABYTE,
    "space behind text": "a" + " " * LONG + "b",
    "space first": " " * LONG,
    "space in a call": "<tool_call>" + " " * LONG,
    "space behind a call": '<tool_call>{"name": "f", "arguments": {}}' + "\n" * LONG + "x",
    "openings": "<tool_call>" * (LONG // 11),
    "pairs": "<tool_call></tool_call>" * (LONG // 23),
    "openings in strings": '<tool_call>["' * (LONG // 13),
    "openings in a list of strings": "<tool_call>[" + '"<tool_call>[",' * (LONG // 15),
    "calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' * (LONG // 54),
    "calls without an end": "<tool_call>" + '{"name": "f", "arguments": {}}\n' * (LONG // 31) + "x",
    "half a string": '<tool_call>{"name": "' + "a" * LONG,
    "escapes": '<tool_call>{"name": "' + "\\" * LONG,
    "brackets": "<tool_call>" + "[" * LONG,
    "objects": '{"name":' * (LONG // 8),
    "digits": '<tool_call>{"name": "f", "arguments": {"x": ' + "1" * LONG + "}}</tool_call>",
    "surrogates": "\ud800<tool_call>\udfff" * (MEGABYTE // 13),
}


class TestHostile:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_time(self, name: str) -> None:
        """At once: a second or less. What copies or reads the rest again at each marker takes minutes."""
        text = HOSTILE[name]
        start = time.process_time()
        parts = parse(LLAMA_FORMAT if text.startswith("{") else QWEN, text)
        assert time.process_time() - start < 4.0
        length = sum(len(part.arguments if isinstance(part, ToolCall) else part.text) for part in parts)
        assert length == len(text) or name == "calls"

    @pytest.mark.parametrize("name", ["space in a call", "half a string", "openings in a list of strings", "<"])
    def test_single_characters(self, name: str) -> None:
        text = HOSTILE[name][:40_000]
        start = time.process_time()
        assert parse(QWEN, *text) == [Content(text)]
        assert time.process_time() - start < 4.0

    def test_deep(self) -> None:
        for depth, is_call in ((90, True), (200, False), (100_000, False)):
            arguments = '{"x": ' + "[" * depth + "]" * depth + "}"
            text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
            assert parse(QWEN, text) == (call(0, "f", arguments) if is_call else [Content(text)])

    def test_nested_markers(self) -> None:
        inner = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        text = f"<tool_call><tool_call>{inner}</tool_call>"
        expected = [Content("<tool_call><tool_call>"), *call(0, "f", "{}"), Content("</tool_call>")]
        assert parse(QWEN, text) == expected

    def test_lone_surrogates(self) -> None:
        arguments = '{"x": "\ud800 \\ud800"}'
        text = f'\udfff<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert parse(QWEN, text) == [Content("\udfff"), *call(0, "f", arguments)]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}


TOOLS = [
    tool(
        "weather",
        type="object",
        properties={"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
        required=["city"],
        additionalProperties=False,
        **{"$defs": {"city": {"type": "string"}}},
    ),
    {"type": "function", "function": {"name": "now"}},
]


class Tokens:
    """A vocabulary of bytes, and of the tokens that Qwen 3 has for markers, by their text."""

    bos_token_id = None
    eos_token_id = 0
    special_token_ids = (0,)
    tokens = (b"eos", *(bytes([byte]) for byte in range(256)), b"<tool_call>", b"</tool_call>", b"<think>", b"</think>")

    def __call__(self, text: Any) -> list[int]:
        raise NotImplementedError


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()), eos_token=0)


def matches(grammar: str, text: str, markers: bool) -> bool:
    """Whether the grammar takes the whole text, whose markers are tokens or spelled out."""
    assert llguidance.LLMatcher.validate_grammar(grammar, TOKENIZER) == ""
    pattern = re.compile(b"</?tool_call>|</?think>|.", re.DOTALL) if markers else re.compile(b".", re.DOTALL)
    ids = [Tokens.tokens.index(token) for token in pattern.findall(text.encode())]
    matcher = llguidance.LLMatcher(TOKENIZER, f'{grammar}\n%llguidance {{"no_forcing": true}}', log_level=0)
    return matcher.validate_tokens(ids) == len(ids) and bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern </tool_call>", "days": 3}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Bern"}}'
THOUGHT = '<think>\nHm, "x" </b>\n</think>\n\n'
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("markers", [True, False], ids=["tokens", "spelled out"])
class TestGrammar:
    def test_required(self, markers: bool) -> None:
        result = tool_grammar(QWEN, TOOLS, "required")
        assert result is not None
        grammar = result["grammar"]
        for text in (HERMES_CALL, HERMES_NOW, f"{HERMES_CALL}\n{HERMES_NOW}"):
            assert matches(grammar, text, markers)
            assert {type(part) for part in parse(QWEN, text)} == {ToolCall}
        for text in ("", "Hello", LLAMA_CALL, f"{THOUGHT}{HERMES_NOW}", HERMES_CALL.replace("city", "town")):
            assert not matches(grammar, text, markers)

    def test_one_call(self, markers: bool) -> None:
        result = tool_grammar(QWEN, TOOLS, "required", parallel=False)
        assert result is not None
        assert matches(result["grammar"], HERMES_NOW, markers)
        assert not matches(result["grammar"], f"{HERMES_CALL}\n{HERMES_NOW}", markers)

    def test_named(self, markers: bool) -> None:
        result = tool_grammar(QWEN, TOOLS, NAMED)
        assert result is not None
        assert matches(result["grammar"], HERMES_CALL, markers)
        assert not matches(result["grammar"], HERMES_NOW, markers)
        assert not matches(result["grammar"], f"{HERMES_CALL}\n{HERMES_CALL}", markers)

    def test_llama(self, markers: bool) -> None:
        result = tool_grammar(LLAMA_FORMAT, TOOLS, "required", thinking=True)
        assert result is not None
        assert matches(result["grammar"], LLAMA_CALL, markers)
        assert {type(part) for part in parse(LLAMA_FORMAT, LLAMA_CALL)} == {ToolCall}
        assert not matches(result["grammar"], f"{LLAMA_CALL}\n{LLAMA_CALL}", markers)
        assert not matches(result["grammar"], HERMES_CALL, markers)

    def test_thinking(self, markers: bool) -> None:
        result = tool_grammar(QWEN, TOOLS, "required", thinking=True)
        assert result is not None
        for text in (f"{THOUGHT}{HERMES_CALL}", HERMES_CALL, f"<think></think>{HERMES_CALL}\n{HERMES_NOW}"):
            assert matches(result["grammar"], text, markers)
        assert not matches(result["grammar"], f"{THOUGHT}Hello", markers)

    def test_thinking_that_the_prompt_has_opened(self, markers: bool) -> None:
        result = tool_grammar(QWEN, TOOLS, "required", thinking=True, starts_thinking=True)
        assert result is not None
        assert matches(result["grammar"], f"Hm.\n</think>\n\n{HERMES_CALL}", markers)
        assert not matches(result["grammar"], HERMES_CALL, markers)  # all of it would be a thought

    @pytest.mark.parametrize("choice", [None, "auto"])
    def test_calls_or_an_answer(self, choice: str | None, markers: bool) -> None:
        answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        result = tool_grammar(QWEN, TOOLS, choice, answer=answer)
        assert result is not None
        for text in (HERMES_CALL, f"{HERMES_CALL}\n{HERMES_NOW}", '{"ok": true}', '{"ok":false}'):
            assert matches(result["grammar"], text, markers)
        for text in ("", "Hello", "{}", '{"ok":\ntrue}', f'{HERMES_CALL}\n{{"ok": true}}', f"{THOUGHT}{HERMES_CALL}"):
            assert not matches(result["grammar"], text, markers)
        one = tool_grammar(QWEN, TOOLS, choice, parallel=False, answer=answer)
        assert one is not None
        assert not matches(one["grammar"], f"{HERMES_CALL}\n{HERMES_NOW}", markers)
        assert tool_grammar(QWEN, TOOLS, "none", answer=answer) is None


class TestTools:
    @pytest.mark.parametrize("choice", [None, "auto", "none"])
    def test_nothing_is_forced(self, choice: str | None) -> None:
        assert tool_grammar(QWEN, TOOLS, choice) is None

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            ({"type": "function", "function": {"name": "x"}}, "there is no tool 'x', only weather, now"),
        ],
    )
    def test_choices_that_are_refused(self, choice: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            tool_grammar(QWEN, TOOLS, choice)

    def test_calls_that_look_like_an_answer(self) -> None:
        with pytest.raises(ValueError, match="writes calls as plain JSON, like the answer"):
            tool_grammar(LLAMA_FORMAT, TOOLS, "auto", answer={"type": "object"})

    def test_schemas(self) -> None:
        schemas = function_schemas(TOOLS)
        assert list(schemas) == ["weather", "now"]
        assert schemas["now"] == {"type": "object"}

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (tool("now"), r"tools\[1\]: now is defined twice"),
            (tool("f", type="array"), r"tools\[1\]: the parameters of f must be a JSON schema of an object"),
        ],
    )
    def test_tools_that_are_refused(self, wrong: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            function_schemas([TOOLS[1], wrong])
