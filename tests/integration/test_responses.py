"""/v1/responses as OpenAI's own client sees it; everything that is sent is checked against the types of that client."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pydantic
import pytest
from commands import TEMPLATE, folder  # noqa: F401
from openai import AsyncOpenAI, OpenAI
from openai.types import responses as types
from serving import WAIT, Running, running, until

from infer import LLM, GenerationResult, SamplingParams
from infer.backend.cpu.backend import CpuBackend
from infer.engine.logprobs import TokenLogprobs
from infer.engine.result import GeneratedToken, collect

pytestmark = pytest.mark.usefixtures("compiled")  # nothing waits for a compiler
PATH = "/v1/responses"
CHAT: Any = [{"role": "user", "content": "hello"}]
ASK: Any = {"model": "tiny", "input": "hello"}
LOGPROBS: Any = ["message.output_text.logprobs"]
CONSTRAINED = "json_schema" in SamplingParams.__dataclass_fields__

# As Qwen writes it, in short.
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}<s>{{ tool.function.name }}{% endfor %}"
    "{% if tools %}" + '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    "{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.city }}){% endfor %}"
    "</s>{% endfor %}<s>assistant:{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "What it is like there.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}

EVENTS: dict[str, type[pydantic.BaseModel]] = {
    "error": types.ResponseErrorEvent,
    "response.created": types.ResponseCreatedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent,
    "response.failed": types.ResponseFailedEvent,
}
TEXT = ["response.output_item.added", "response.content_part.added", "response.output_text.delta"]
TEXT_END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
BEGIN = ["response.created", "response.in_progress"]


@pytest.fixture(scope="module")
def tool_user(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:  # noqa: F811
    """A model whose template knows tools and reasoning."""
    path = with_template(folder, tmp_path_factory.mktemp("templates") / "tool-user", TOOLS_TEMPLATE)
    with running(lambda: LLM(path, cache_memory=10**7)) as found:
        yield found
        until(found.idle)


def with_template(folder: Path, path: Path, template: str) -> Path:  # noqa: F811
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").write_text(template)
    return path


class Scripted:
    """In place of an engine's handle: a text in given pieces, each a token."""

    def __init__(self, prompt: list[int], pieces: Sequence[str], reason: str) -> None:
        self.prompt = prompt
        last = len(pieces) - 1
        self.pieces = [
            GeneratedToken(i, text, 0.01, reason if i == last else None, TokenLogprobs(i, -float(i), ()))
            for i, text in enumerate(pieces)
        ]

    def abort(self) -> None: ...

    async def finished(self) -> None: ...

    def __iter__(self) -> Iterator[GeneratedToken]:
        return iter(self.pieces)

    async def token_batches(self) -> AsyncIterator[list[GeneratedToken]]:
        for piece in self.pieces:
            yield [piece]

    def results(self) -> list[GenerationResult]:
        return [collect(self.prompt, self.pieces, 0)]


class Script:
    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: Sequence[str] = ()
        self.reason = "eos"
        self.prompt = ""
        self.params = SamplingParams()
        tokenizer = server.service.tokenizer

        async def submit(_: Any, prompts: Any, params: SamplingParams, __: Any) -> Any:
            self.prompt, self.params = tokenizer.decode(prompts[0], skip_special_tokens=False), params
            return Scripted(prompts[0], self.pieces, self.reason)

        monkeypatch.setattr(server.service, "submit", submit)


@pytest.fixture
def script(tool_user: Running, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(tool_user, monkeypatch)


def events_of(server: Running, body: Any) -> list[dict[str, Any]]:
    """The events of a stream, as they are on the wire, checked one by one."""
    answer = server.post(PATH, body | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for i, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == i
        EVENTS[event["type"]].model_validate(event, strict=True)
        events.append(event)
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """Their names, without repetitions of deltas."""
    names = [event["type"] for event in events]
    return [name for i, name in enumerate(names) if not (name.endswith(".delta") and names[i - 1] == name)]


def response_of(server: Running, body: Any) -> dict[str, Any]:
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    types.Response.model_validate(found, strict=True)
    return found


def without_ids(value: Any) -> Any:
    """Without what differs each time."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        times = ("id", "call_id", "created_at", "completed_at")
        return {key: without_ids(each) for key, each in value.items() if key not in times}
    return value


def alone(server: Running, prompt: Any, **settings: Any) -> GenerationResult:
    return server.service.llm.generate(prompt, SamplingParams(**settings))


class TestText:
    def test_whole(self, server: Running, client: OpenAI) -> None:
        answer = client.responses.create(**ASK, max_output_tokens=12, temperature=0)
        expected = alone(server, CHAT, max_new_tokens=12)
        assert answer.output_text == expected.text
        assert (answer.object, answer.status, answer.error) == ("response", "incomplete", None)
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (expected.prompt_tokens, 12)
        assert answer.usage.total_tokens == expected.prompt_tokens + 12
        [item] = answer.output
        assert (item.type, item.status) == ("message", "incomplete")  # type: ignore[union-attr]

    def test_instructions_and_items(self, server: Running, client: OpenAI) -> None:
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "you"}]},
            {"role": "user", "content": "the"},
        ]
        answer = client.responses.create(
            model="tiny",
            instructions="be kind",
            input=items,
            max_output_tokens=8,
            temperature=0.7,
            extra_body={"seed": 5, "top_k": 20, "ignore_eos": True},
        )
        chat = [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "you"},
            {"role": "user", "content": "the"},
        ]
        settings: Any = {"temperature": 0.7, "seed": 5, "top_k": 20, "ignore_eos": True}
        assert answer.output_text == alone(server, chat, max_new_tokens=8, **settings).text

    def test_what_is_echoed(self, server: Running) -> None:
        hints = {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
        given = {"instructions": "x", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 3}
        nothing = {"store": False, "background": False, "previous_response_id": None, "truncation": "disabled"}
        answer = response_of(server, ASK | hints | given | nothing)
        assert {name: answer[name] for name in (hints | given | nothing)} == hints | given | nothing
        plain = response_of(server, ASK | {"max_output_tokens": 1})
        assert plain["id"].startswith("resp_")
        assert plain["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
        assert (plain["tools"], plain["tool_choice"], plain["parallel_tool_calls"]) == ([], "auto", True)
        assert (plain["temperature"], plain["top_p"], plain["metadata"]) == (1.0, 1.0, {})

    def test_encrypted_reasoning_is_not_needed(self, server: Running) -> None:
        """LiteLLM asks for it with each message that it translates."""
        answer = response_of(server, ASK | {"max_output_tokens": 1, "include": ["reasoning.encrypted_content"]})
        assert answer["output"][0]["content"][0]["logprobs"] == []

    def test_stream(self, server: Running) -> None:
        body = ASK | {"max_output_tokens": 12, "temperature": 0.8, "seed": 3}
        body |= {"include": LOGPROBS, "top_logprobs": 2, "stream_options": {"include_obfuscation": False}}
        events, whole = events_of(server, body), response_of(server, body)
        assert kinds(events) == [*BEGIN, *TEXT, *TEXT_END, "response.incomplete"]
        expected = alone(server, CHAT, max_new_tokens=12, temperature=0.8, seed=3, logprobs=2)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in deltas) == expected.text
        found = [each for event in deltas for each in event["logprobs"]]
        assert expected.logprobs is not None
        assert [each["logprob"] for each in found] == [each.logprob for each in expected.logprobs]
        assert [len(each["top_logprobs"]) for each in found] == [2] * 12
        [item] = whole["output"]
        assert item["content"] == [{"type": "output_text", "text": expected.text, "annotations": [], "logprobs": found}]
        assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
        assert events[0]["response"]["output"] == []
        assert without_ids(events[-1]["response"]) == without_ids(whole) | {
            "usage": events[-1]["response"]["usage"]  # the beginning is known the second time
        }

    def test_streams_of_the_client(self, server: Running, client: OpenAI) -> None:
        settings: Any = {"max_output_tokens": 10, "temperature": 0}
        expected = alone(server, CHAT, max_new_tokens=10).text
        raw = list(client.responses.create(**ASK, **settings, stream=True))
        assert "".join(event.delta for event in raw if event.type == "response.output_text.delta") == expected
        with client.responses.stream(**ASK, **settings) as stream:
            last = list(stream)[-1]
        assert last.type == "response.incomplete"
        assert last.response.output_text == expected

    def test_async(self, server: Running) -> None:
        settings: Any = {"max_output_tokens": 10, "temperature": 0}

        async def ask() -> tuple[str, str]:
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT) as client:
                whole = await client.responses.create(**ASK, **settings)
                async with client.responses.stream(**ASK, **settings) as stream:
                    text = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                return whole.output_text, "".join(text)

        expected = alone(server, CHAT, max_new_tokens=10).text
        assert asyncio.run(ask()) == (expected, expected)

    def test_a_beginning_that_is_known(self, client: OpenAI) -> None:
        ask: Any = {"model": "tiny", "input": "a long beginning " * 8, "max_output_tokens": 2}
        client.responses.create(**ask)
        usage = client.responses.create(**ask).usage
        assert usage is not None
        assert usage.input_tokens_details.cached_tokens >= 64


CALLING = ["<think>\n", "so", " it", "\n</think>", "\n\n", "Wait", " now.", "\n<tool_call>\n", '{"name": "weather", ',
           '"arguments": {"city": "Rome"}}', "\n</tool_call>", "\n<tool_call>\n",
           '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', ""]  # fmt: skip


class TestTools:
    def test_whole(self, tool_user: Running, script: Script) -> None:
        script.pieces = CALLING
        answer = response_of(tool_user, ASK | {"tools": [TOOL], "include": LOGPROBS, "reasoning": {"effort": "low"}})
        thought, message, *calls = answer["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "so it"}]
        [part] = message["content"]
        assert part["text"] == "Wait now."
        assert [each["logprob"] for each in part["logprobs"]] == [-5.0, -6.0]  # not those of markers
        assert [(call["name"], call["arguments"]) for call in calls] == [
            ("weather", '{"city": "Rome"}'),
            ("weather", '{"city": "Oslo"}'),
        ]
        assert len({call["call_id"] for call in calls}) == 2
        assert {item["status"] for item in answer["output"]} == {answer["status"]} == {"completed"}
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
        assert (answer["tools"], answer["reasoning"]["effort"]) == ([TOOL], "low")

    def test_stream(self, tool_user: Running, script: Script) -> None:
        script.pieces = CALLING
        body = ASK | {"tools": [TOOL], "include": LOGPROBS}
        events = events_of(tool_user, body)
        thought = [name.replace("output_text", "reasoning_text") for name in TEXT + TEXT_END]
        arguments = "response.function_call_arguments"
        call = ["response.output_item.added", f"{arguments}.delta", f"{arguments}.done", "response.output_item.done"]
        assert kinds(events) == [*BEGIN, *thought, *TEXT, *TEXT_END, *call, *call, "response.completed"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == done
        assert without_ids(events[-1]["response"]) == without_ids(response_of(tool_user, body))
        with tool_user.openai() as client, client.responses.stream(**ASK, tools=[TOOL]) as stream:
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        assert final.output[-1].parsed_arguments == {"city": "Oslo"}  # type: ignore[union-attr]

    def test_what_was_answered_is_asked_with(self, tool_user: Running, script: Script) -> None:
        """The items of an answer, and what a tool gave, are the input of the next one."""
        script.pieces = CALLING[:11]
        with tool_user.openai() as client:
            items: list[Any] = [{"role": "user", "content": "hello"}]
            answer = client.responses.create(model="tiny", input=items, tools=[TOOL])
            items += answer.output
            call = answer.output[-1]
            assert call.type == "function_call"
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
            client.responses.create(model="tiny", input=items, tools=[TOOL], reasoning={"effort": "none"})
        assert script.prompt.startswith("<s>weather<tool_call>")
        assert script.prompt.endswith(
            "<s>user:hello</s><s>assistant:<think>so it</think>Wait now.(weather Rome)</s>"
            "<s>tool:rain</s><s>assistant:quick"
        )

    def test_none_are_to_be_called(self, tool_user: Running, script: Script) -> None:
        script.pieces = CALLING[7:]
        answer = response_of(tool_user, ASK | {"tools": [TOOL], "tool_choice": "none"})
        assert [item["type"] for item in answer["output"]] == ["message"]
        assert "weather" not in script.prompt

    @pytest.mark.parametrize("reason", ["eos", "length"])
    def test_nothing_said(self, reason: str, tool_user: Running, script: Script) -> None:
        script.pieces, script.reason = [""], reason
        events = events_of(tool_user, ASK)
        status = "completed" if reason == "eos" else "incomplete"
        assert kinds(events) == [*BEGIN, *TEXT[:2], *TEXT_END, f"response.{status}"]
        [item] = events[-1]["response"]["output"]
        assert (item["status"], item["content"][0]["text"]) == (status, "")

    def test_cut_off_while_it_thinks(self, tool_user: Running, script: Script) -> None:
        script.pieces, script.reason = ["<think>", "so", " it goes"], "length"
        [item] = response_of(tool_user, ASK)["output"]
        assert (item["type"], item["status"]) == ("reasoning", "incomplete")

    def test_tokens_that_are_parts_of_characters(self, tool_user: Running, script: Script) -> None:
        script.pieces = ["<think>x", "</think>", "", "", "\N{SNOWMAN}", "!", ""]
        answer = response_of(tool_user, ASK | {"include": LOGPROBS})
        [part] = answer["output"][1]["content"]
        assert part["text"] == "\N{SNOWMAN}!"
        assert [each["logprob"] for each in part["logprobs"]] == [-2.0, -3.0, -4.0, -5.0]

    @pytest.mark.skipif(not CONSTRAINED, reason="the engine knows no constraints")
    def test_required(self, folder: Path, tmp_path: Path) -> None:  # noqa: F811
        # As Llama writes it: this model has no token for the line breaks around Qwen's calls.
        template = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}<s>' + TEMPLATE
        path = with_template(folder, tmp_path / "llama-tools", template)
        body = ASK | {"tools": [TOOL, TOOL | {"name": "tides"}], "parallel_tool_calls": False}
        named = [({"type": "function", "name": name}, [name]) for name in ("weather", "tides")]
        with running(lambda: LLM(path, cache_memory=10**7)) as server:
            for choice, names in [("required", ["weather", "tides"]), *named]:
                answer = response_of(server, body | {"tool_choice": choice})
                assert answer["tool_choice"] == choice
                [call] = answer["output"]
                assert call["type"] == "function_call"
                assert call["name"] in names
                assert list(json.loads(call["arguments"])) == ["city"]


def test_reasoning_of_a_chat(tool_user: Running, script: Script) -> None:
    """As many tokens are counted in a stream as in a whole answer."""
    script.pieces = ["<think>", "so", " ", "", "it is", "</think>", "Wait", " now.", ""]
    body = {"model": "tiny", "messages": CHAT}
    whole = tool_user.post("/v1/chat/completions", body).json()
    streamed = tool_user.post(
        "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    ).text.split("data: ")
    usage = json.loads(streamed[-2])["usage"]
    assert whole["choices"][0]["message"]["reasoning"] == "so it is"
    assert whole["usage"] == usage
    assert usage["completion_tokens_details"]["reasoning_tokens"] == min(
        len(tool_user.service.tokenizer.encode("so it is", add_special_tokens=False)), len(script.pieces)
    )


def test_a_call_of_no_tool(tool_user: Running, script: Script) -> None:
    """It is for the client to say that there is none of this name."""
    script.pieces = ['<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', ""]
    tool = {"type": "function", "function": {"name": "weather"}}
    body = {"model": "tiny", "messages": CHAT, "tools": [tool]}
    [choice] = tool_user.post("/v1/chat/completions", body).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("other", "tool_calls")


class Flag(pydantic.BaseModel):
    on: bool


@pytest.mark.skipif(not CONSTRAINED, reason="the engine knows no constraints")
class TestFormats:
    def test_parse(self, client: OpenAI) -> None:
        answer = client.responses.parse(**ASK, text_format=Flag, temperature=0)
        assert isinstance(answer.output_parsed, Flag)
        with client.responses.stream(**ASK, text_format=Flag, temperature=0) as stream:
            assert stream.get_final_response().output_parsed == answer.output_parsed

    def test_what_is_echoed(self, server: Running) -> None:
        wanted = {"type": "json_schema", "name": "flag", "schema": {"type": "boolean"}, "strict": True}
        answer = response_of(server, ASK | {"text": {"format": wanted}})
        assert answer["text"]["format"] == wanted
        assert answer["output"][0]["content"][0]["text"] in ("true", "false")

    @pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
    def test_beside_tools(self, choice: Any, tool_user: Running, script: Script) -> None:
        """As agents ask: the answer has a schema, but until it comes tools may be called."""
        flag = {"type": "json_schema", "name": "flag", "schema": {"type": "boolean"}}
        script.pieces = CALLING[7:11]
        body = ASK | {"tools": [TOOL], "tool_choice": choice, "text": {"format": flag}}
        answer = response_of(tool_user, body)
        assert [item["type"] for item in answer["output"]] == ["function_call"]
        assert answer["text"]["format"] == flag
        assert script.params.json_schema is None
        assert script.params.grammar is not None
        assert ("boolean" in script.params.grammar) == (choice == "auto")  # a call that is forced is no answer

    def test_beside_tools_too_deep(self, tool_user: Running) -> None:
        schema: Any = {}
        for _ in range(70):
            schema = {"properties": {"a": schema}}
        wanted = {"type": "json_schema", "name": "deep", "schema": schema}
        error = tool_user.post(PATH, ASK | {"tools": [TOOL], "text": {"format": wanted}}).json()["error"]
        assert "nested" in error["message"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "param", "words"),
        [
            ({"store": True}, "store", "nothing is stored"),
            ({"previous_response_id": "resp_1"}, "previous_response_id", "send the conversation"),
            ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
            ({"background": True}, "background", "not supported"),
            ({"prompt": {"id": "x"}}, "prompt", "not supported"),
            ({"truncation": "auto"}, "truncation", "never truncated"),
            ({"max_tool_calls": 3}, "max_tool_calls", "not supported"),
            ({"include": ["file_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
            ({"top_logprobs": 2}, "top_logprobs", "needs include"),
            ({"include": ["reasoning.encrypted_content"], "top_logprobs": 2}, "top_logprobs", "needs include"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
            ({"tools": [TOOL]}, "tools", "does not support tools"),
            ({"tool_choice": "required"}, "tool_choice", "needs tools"),
            ({"tool_choice": {"type": "file_search"}}, "tool_choice", "should be"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort", "does not reason"),
            ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "None"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "a schema"),
            ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
            ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "unknown"),
            ({"metadata": {"a": 1}}, "metadata.a", "string"),
            ({"input": []}, "input", "at least 1"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: nothing is stored"),
            ({"input": "forbidden"}, "input", "not that"),
            ({"max_output_tokens": 10**6}, "input", "the limit is"),
            ({"n": 2}, "n", "unknown parameter"),
            ({"strange": 2}, "strange", "unknown parameter"),
        ],
        ids=str,
    )
    def test_what_is_wrong(self, change: dict[str, Any], param: str, words: str, server: Running) -> None:
        answer = server.post(PATH, ASK | change)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"]

    def test_by_the_client(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="nothing is stored"):
            client.responses.create(**ASK, store=True)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="other", input="x")

    def test_no_such_tool(self, tool_user: Running) -> None:
        choice = {"type": "function", "name": "other"}
        error = tool_user.post(PATH, ASK | {"tools": [TOOL], "tool_choice": choice}).json()["error"]
        assert error["param"] == "tool_choice"
        assert "there is no tool 'other'" in error["message"]

    def test_two_constraints(self, tool_user: Running) -> None:
        tool = {"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters")}}
        body = {"model": "tiny", "messages": CHAT, "tools": [tool], "tool_choice": "required", "regex": "x"}
        assert "one constraint" in tool_user.post("/v1/chat/completions", body).json()["error"]["message"]


def test_an_error_on_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def broken(*_: Any) -> Any:
        raise RuntimeError("a device, at /secret/path")

    with running(lambda: LLM(folder, cache_memory=10**6)) as server:
        monkeypatch.setattr(CpuBackend, "run", broken)
        events = events_of(server, ASK)
    assert kinds(events) == [*BEGIN, "error", "response.failed"]
    assert events[-2]["code"] == "engine_failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(events)


def test_gone_while_it_streams(server: Running) -> None:
    connection = server.begin(PATH, ASK | {"stream": True, "ignore_eos": True, "max_output_tokens": 200})
    assert connection.recv(100)
    connection.close()
    until(server.idle)


def test_described(server: Running) -> None:
    found = httpx.get(f"{server.url}/openapi.json").json()
    assert found["paths"][PATH]["post"]["requestBody"]["content"]
    assert "previous_response_id" not in found["components"]["schemas"]["CreateResponse"]["properties"]
