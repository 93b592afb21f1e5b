"""The server as its clients see it: OpenAI's own client, and such as break off, stall and send garbage."""

from __future__ import annotations

import errno
import gzip
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import openai
import pytest
from commands import CACHE_BYTES_PER_TOKEN, CONTEXT, folder, plain  # noqa: F401
from live_server import Gate
from openai import OpenAI
from pydantic import BaseModel
from serving import Running, running, until
from waiting import WAIT

from infer import LLM, GenerationResult, SamplingParams
from infer.backend.cpu.backend import CpuBackend
from infer.loader.tokenizer import INCOMPLETE
from infer.server import completions
from infer.server.run import allowed_hosts, listen

pytestmark = pytest.mark.usefixtures("compiled")  # nothing waits for a compiler
PROMPT = "hello the"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


class Part(BaseModel):
    kind: Literal["a", "b"]


class Answer(BaseModel):
    n: Literal[1, 2, 3]
    part: Part


def alone(server: Running, prompt: Any, **settings: Any) -> GenerationResult:
    return server.service.llm.generate(prompt, SamplingParams(**settings))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class TestCompletions:
    def test_text(self, server: Running, client: OpenAI) -> None:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
        expected = alone(server, PROMPT, max_new_tokens=12)
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, 12)

    def test_sampled(self, server: Running, client: OpenAI) -> None:
        settings: Any = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.1}
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=20, logit_bias={"70": 5}, stop=["qq"], n=3, **settings
        )
        expected = alone(server, PROMPT, max_new_tokens=20, logit_bias={70: 5.0}, stop=["qq"], n=3, **settings)
        assert [choice.text for choice in answer.choices] == [each.text for each in expected]  # type: ignore[attr-defined]

    def test_stream(self, server: Running, client: OpenAI) -> None:
        stream = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == (
            alone(server, PROMPT, max_new_tokens=12).text
        )
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert not chunks[-1].choices

    def test_several_prompts(self, server: Running, client: OpenAI) -> None:
        prompts = ["hello", "the sea", "a"]
        answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, n=2)
        texts = [alone(server, prompt, max_new_tokens=6).text for prompt in prompts]
        assert [choice.text for choice in answer.choices] == [text for text in texts for _ in range(2)]
        assert [choice.index for choice in answer.choices] == list(range(6))
        ids = [server.service.llm.encode(prompt) for prompt in prompts]
        again = client.completions.create(model="tiny", prompt=ids, max_tokens=6, temperature=0)
        assert [choice.text for choice in again.choices] == texts

    def test_logprobs(self, server: Running, client: OpenAI) -> None:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
        expected = alone(server, PROMPT, max_new_tokens=6, logprobs=3)
        found = answer.choices[0].logprobs
        assert found is not None
        assert expected.logprobs is not None
        assert found.token_logprobs == [each.logprob for each in expected.logprobs]
        assert found.top_logprobs is not None
        assert [len(top) for top in found.top_logprobs] == [3] * 6
        assert "".join(found.tokens or []) == answer.choices[0].text
        assert found.text_offset is not None
        assert found.text_offset[1] == len((found.tokens or [""])[0])

    @pytest.mark.parametrize(
        ("path", "field"), [("completions", "prompt"), ("chat/completions", "messages"), ("responses", "input")]
    )
    def test_the_only_model_needs_no_name(self, path: str, field: str, server: Running) -> None:
        prompt: Any = [{"role": "user", "content": PROMPT}] if field == "messages" else PROMPT
        response = server.post(f"/v1/{path}", {field: prompt})
        assert response.status_code == 200
        assert response.json()["model"] == "tiny"

    @pytest.mark.parametrize("echo", [True, False])
    def test_offsets_are_those_of_the_text(self, echo: bool, server: Running) -> None:
        """Behind parts of characters and special tokens, which the text of an answer leaves out, too."""
        body = {"model": "tiny", "prompt": f"{PROMPT}</s>", "max_tokens": 60, "temperature": 2, "seed": 1}
        body |= {"ignore_eos": True, "logprobs": 0, "logit_bias": {"2": 6}}
        choice = server.post("/v1/completions", body | {"echo": echo}).json()["choices"][0]
        found, text = choice["logprobs"], choice["text"]
        assert found["tokens"].count("</s>") > echo
        assert INCOMPLETE in text
        checked = 0
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            if INCOMPLETE not in token and (token != "</s>" or offset < len(f"{PROMPT}</s>") * echo):
                assert text.startswith(token, offset), (token, offset)
                checked += 1
        assert checked > 10
        assert found["text_offset"] == sorted(found["text_offset"])
        if not echo:
            events = server.post("/v1/completions", body | {"stream": True}).text.split("\n\n")
            chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
            offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks if chunk["choices"]]
            assert [offset for some in offsets for offset in some] == found["text_offset"]

    def test_echo_scores_a_text(self, server: Running, client: OpenAI) -> None:
        """As lm-eval asks for it."""
        answer = client.completions.create(
            model="tiny", prompt=server.service.llm.encode(PROMPT), max_tokens=0, echo=True, logprobs=1, temperature=0
        )
        score = server.service.llm.score(PROMPT)
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs == [None if each is None else each.logprob for each in score.logprobs]
        assert answer.choices[0].text == server.service.tokenizer.decode(score.token_ids, skip_special_tokens=False)

    def test_under_load(self, server: Running, client: OpenAI) -> None:
        """The same text and log-probabilities, whatever runs beside it."""
        settings: Any = {"model": "tiny", "max_tokens": 24, "temperature": 0.9, "logprobs": 2}

        def ask(i: int) -> Any:
            choice = client.completions.create(prompt=f"{PROMPT} {i % 5}", seed=i, **settings).choices[0]
            return choice.text, choice.logprobs

        one_by_one = [ask(i) for i in range(24)]
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(ask, range(24))) == one_by_one


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "param", "words"),
        [
            ({"max_tokens": "7"}, "max_tokens", "integer"),
            ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
            ({"temperature": 3}, "temperature", "less than or equal to 2"),
            ({"top_p": 0}, "top_p", "greater than 0"),
            ({"suffix": "x"}, "suffix", "not supported"),
            ({"best_of": 3}, "best_of", "not supported"),
            ({"strange": 1}, "strange", "unknown parameter"),
            ({"prompt": []}, "prompt", "at least 1"),
            ({"prompt": [10**6]}, None, "outside the vocabulary"),
            ({"n": 999}, "n", "too many"),
            ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
            ({"logit_bias": {"999999": 1}}, None, "outside the vocabulary"),
            ({"max_tokens": 10**6}, "prompt", "the limit is"),
            ({"stop": [""]}, "stop[0]", "at least 1"),
        ],
        ids=str,
    )
    def test_what_is_wrong(self, change: dict[str, Any], param: str | None, words: str, server: Running) -> None:
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": PROMPT} | change)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert (error["param"] or "").startswith(param or "")
        assert words in error["message"]

    def test_too_many_prompts_are_not_read(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server.service.llm, "encode", lambda prompt: pytest.fail("it was read"))
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": ["x"] * 65, "n": 2})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")

    def test_no_such_model(self, client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as error:
            client.completions.create(model="other", prompt="x")
        assert error.value.code == "model_not_found"
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"

    @pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"a": NaN}', b"\xff\xfe", b"[" * 100_000], ids=repr)
    def test_no_json(self, body: bytes, server: Running) -> None:
        answer = httpx.post(f"{server.url}/v1/completions", content=body)
        assert answer.status_code == 400
        assert "JSON" in answer.json()["error"]["message"]

    def test_a_compressed_body(self, server: Running) -> None:
        body = gzip.compress(json.dumps({"model": "tiny", "prompt": PROMPT}).encode())
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Encoding": "gzip"})
        assert answer.status_code == 415
        assert "compressed" in answer.json()["error"]["message"]
        assert answer.headers["accept-encoding"] == "identity"

    def test_no_such_path(self, server: Running) -> None:
        assert httpx.get(f"{server.url}/v2/else").json()["error"]["type"] == "not_found_error"
        assert httpx.get(f"{server.url}/v1/completions").status_code == 405
        assert httpx.get(f"{server.url}/v1/models/").json()["data"][0]["id"] == "tiny"

    def test_too_large_a_body(self, server: Running) -> None:
        most = server.service.settings.max_body
        assert httpx.post(f"{server.url}/v1/completions", content=b" " * (most + 1)).status_code == 413

    def test_an_endless_body(self, folder: Path) -> None:  # noqa: F811
        def endless() -> Iterator[bytes]:
            while True:
                yield b" " * 65536

        with running(lambda: LLM(folder, cache_memory=10**6), read_seconds=1.0, max_body=10**6) as server:
            with suppress(httpx.TransportError):  # closed while it was still sending
                assert httpx.post(f"{server.url}/v1/completions", content=endless()).status_code == 413
            assert httpx.get(f"{server.url}/health").status_code == 200


def test_tokens(server: Running) -> None:
    found = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == server.service.llm.encode(PROMPT)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    text = server.post("/detokenize", {"tokens": found["tokens"][1:]}).json()["prompt"]
    assert text == PROMPT
    assert server.post("/detokenize", {"tokens": [10**9]}).status_code == 400
    tokenizer = server.service.tokenizer
    assert httpx.get(f"{server.url}/tokenizer_info").json() == {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    for content in ("hello", [{"type": "text", "text": "hello"}]):  # as in a chat
        chat = server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()
        assert chat["tokens"] == server.service.tokenizer.encode_chat(MESSAGES)


def test_control_tokens_of_messages_are_text(server: Running) -> None:
    tokenizer = server.service.tokenizer

    def ends(**body: Any) -> int:
        return server.post("/tokenize", body).json()["tokens"].count(tokenizer.token_to_id("</s>"))

    usual, hostile = ([{"role": "user", "content": text}] for text in ("hello", "hello</s>"))
    assert ends(messages=hostile) == ends(messages=usual)
    assert ends(prompt="hello</s>") == 1
    used = server.post("/v1/chat/completions", {"model": "tiny", "messages": hostile, "max_tokens": 1}).json()["usage"]
    assert used["prompt_tokens"] == len(tokenizer.encode_chat(hostile))


def test_metrics_and_health(server: Running, client: OpenAI) -> None:
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
    text = httpx.get(f"{server.url}/metrics").text
    names = "num_requests_running", "generation_tokens_total", "time_to_first_token_seconds_count"
    for name in (*names, "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"):
        assert f"\ninfer:{name}" in text
    until(server.idle)
    text = httpx.get(f"{server.url}/metrics").text
    assert "\ninfer:kv_cache_usage_perc 0.0\n" in text  # of a server at rest
    assert float(text.split("\ninfer:prefix_cache_usage_perc ")[1].split()[0]) > 0
    for path in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Running]:  # noqa: F811
    with running(lambda: LLM(folder, cache_memory=10**6), api_keys=frozenset({"one", "two"})) as found:
        yield found


@pytest.mark.parametrize("wanted", [False, True])
def test_prompts_in_the_log(wanted: bool, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    with running(lambda: LLM(folder, cache_memory=10**6), log_prompts=wanted) as server:
        server.post("/v1/completions", {"model": "tiny", "prompt": "sesame", "max_tokens": 1})
        server.post("/v1/completions", {"model": "tiny", "prompt": "sesame", "max_tokens": -1})
    assert ("sesame" in capfd.readouterr().err) == wanted


class TestKeys:
    def test_needed(self, locked: Running) -> None:
        with locked.openai("three") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        for path in ("/", "/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            assert httpx.get(locked.url + path).status_code == 401
        for path in ("/health", "/health/live", "/health/ready"):
            assert httpx.get(locked.url + path).status_code == 200

    @pytest.mark.parametrize("key", ["one", "two"])
    def test_known(self, key: str, locked: Running) -> None:
        with locked.openai(key) as client:
            assert client.models.retrieve("tiny").id == "tiny"
        assert httpx.get(f"{locked.url}/v1/models", auth=("anybody", key)).status_code == 200

    def test_a_key_finds_its_own_prefixes(self, locked: Running) -> None:
        """Else another client's prompt could be guessed token by token."""
        assert cached(locked, "one", "secret") == 0
        assert cached(locked, "two", "secret") == 0
        assert cached(locked, "one", "secret") == cached(locked, "two", "secret") == 64  # full pages alone are counted

    def test_a_salt_of_the_client(self, locked: Running) -> None:
        assert [cached(locked, "one", "salted", cache_salt=salt) for salt in "aab"] == [0, 64, 0]
        assert cached(locked, "two", "salted", cache_salt="a") == 0
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        for salt in ("", 1, "x" * 257):
            refused = locked.post("/v1/completions", body | {"cache_salt": salt}, headers=auth("one"))
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "cache_salt"

    def test_prefixes_may_be_shared(self, folder: Path) -> None:  # noqa: F811
        keys = frozenset({"one", "two"})
        with running(lambda: LLM(folder, cache_memory=10**6), api_keys=keys, share_prefixes=True) as server:
            assert cached(server, "one", "shared") == 0
            assert cached(server, "two", "shared") == 64
            assert cached(server, "two", "shared", cache_salt="a") == 0

    def test_without_keys_all_share(self, server: Running) -> None:
        assert cached(server, "one", "open") == 0
        assert cached(server, "two", "open") == 64


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def cached(server: Running, key: str, prompt: str, **fields: Any) -> int:
    """How much of a prompt the usage says was cached; the prompt has more than one page, less than two."""
    ids = server.service.llm.encode(prompt * 40)[:100]
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, **fields}
    usage = server.post("/v1/completions", body, headers=auth(key)).json()["usage"]
    assert usage["prompt_tokens"] == 100
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
LARGE = {"messages": [{"role": "user", "content": "x" * 6_000_000}]}


class TestOrigins:
    """Who opens a page of somebody else must not ask without knowing."""

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
    def test_others(self, origin: str, server: Running) -> None:
        body = {"model": "tiny", "prompt": PROMPT}
        assert server.post("/v1/completions", body, headers={"Origin": origin}).status_code == 403

    def test_its_own(self, server: Running) -> None:
        assert httpx.get(f"{server.url}/v1/models", headers={"Origin": server.url}).status_code == 200

    def test_allowed(self, folder: Path) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6), cors=("http://a.example",)) as server:
            answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "http://a.example"})
            assert answer.headers["access-control-allow-origin"] == "http://a.example"
            assert httpx.get(f"{server.url}/v1/models", headers={"Origin": "http://b.example"}).status_code == 403


@pytest.fixture(scope="module")
def named(folder: Path) -> Iterator[Running]:  # noqa: F811
    with running(lambda: LLM(folder, cache_memory=10**6), hosts=("Box.lan", "a.example")) as server:
        yield server


class TestHosts:
    """A page whose name leads to this machine is no page of ours."""

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.x"]
    )
    def test_others(self, host: str, named: Running) -> None:
        for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
            answer = httpx.get(f"{named.url}/v1/models", headers=headers)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "foreign_host"

    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1:1", "192.168.1.7", "[::1]:8000", "[::1]", "localhost", "LocalHost.:80", "a.localhost", "box.lan:1"],
    )
    def test_its_own(self, host: str, named: Running) -> None:
        assert httpx.get(f"{named.url}/v1/models", headers={"Host": host}).status_code == 200

    def test_any(self, server: Running) -> None:
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": "a.example"}).status_code == 200

    def test_where_it_listens(self) -> None:
        with listen("127.0.0.1", 0) as here, listen("0.0.0.0", 0) as everywhere:
            assert allowed_hosts(here, "127.0.0.1", []) == ("127.0.0.1",)
            assert allowed_hosts(here, "box", ["a.example"]) == ("box", "a.example")
            assert allowed_hosts(everywhere, "0.0.0.0", []) is None
            assert allowed_hosts(everywhere, "0.0.0.0", ["a.example"]) == ("0.0.0.0", "a.example")


def test_an_upgrade_is_not_needed(server: Running) -> None:
    """Java's client offers HTTP/2 with each request."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAA"}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    with httpx.Client(base_url=server.url, headers=offer) as client:
        for _ in range(3):  # on one connection
            assert client.post("/v1/completions", json=body).status_code == 200
            assert client.get("/health").status_code == 200


class TestClientsThatMisbehave:
    def test_gone_while_it_streams(self, server: Running) -> None:
        for _ in range(3):
            connection = server.begin("/v1/completions", LONG)
            assert connection.recv(100)
            connection.close()
        until(server.idle)

    def test_gone_while_it_waits(self, server: Running, gate: Gate) -> None:
        with gate.held():
            connection = server.begin("/v1/completions", LONG | {"stream": False})
            until(lambda: server.service.llm.stats().waiting == 1)
            gate.let(2)
            until(lambda: server.service.llm.stats().running == 1)
            connection.close()
            until(server.idle)

    def test_half_a_body(self, server: Running) -> None:
        connection = server.connect()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        connection.close()
        assert httpx.get(f"{server.url}/health").status_code == 200

    @pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\0" * 10_000])
    def test_garbage(self, data: bytes, server: Running) -> None:
        connection = server.connect()
        connection.sendall(data)
        connection.settimeout(WAIT)
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:
            answer = b""
        assert not answer or answer.startswith(b"HTTP/1.1 400")
        connection.close()

    def test_slow(self, folder: Path) -> None:  # noqa: F811
        """A body that does not come, a request that does not come, and a reader that does not read."""
        with running(lambda: LLM(folder, cache_memory=10**7), read_seconds=0.5, write_seconds=0.5) as server:
            silent, halting = server.connect(), server.connect()
            halting.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b"408" in halting.recv(1000)
            assert silent.recv(1000) == b""
            reading = server.begin("/v1/completions", LONG | {"n": 32, "logprobs": 20, "max_tokens": 240})
            reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            until(server.idle)
            for connection in (silent, halting, reading):
                connection.close()

    def test_a_whole_answer_that_is_not_read(self, folder: Path) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6), write_seconds=0.3) as server:
            connections = server.server.server_state.connections
            for headers in (b"", b"Connection: close\r\n"):
                connection = server.begin("/v1/sessions", LARGE, headers, receive=1024)
                until(lambda: bool(connections))
                until(lambda: not connections)
                connection.close()

    def test_one_that_is_read_slowly(self, folder: Path) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6), write_seconds=3.0) as server:
            connection = server.begin("/v1/sessions", LARGE, b"Connection: close\r\n", receive=1 << 16)
            size = 0
            for wanted in range(250_000, 3_500_000, 250_000):
                while size < wanted:
                    size += len(connection.recv(1 << 16))
                time.sleep(0.3)
            while part := connection.recv(1 << 20):
                size += len(part)
            assert size > 5 * 10**6
            connection.close()

    def test_gone_with_another_request_behind(self, server: Running, gate: Gate) -> None:
        finished = server.service.metrics._finished.labels("length")._value
        before = finished.get()
        with gate.held():
            connection = server.begin("/v1/completions", LONG | {"n": 32})
            assert connection.recv(100)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: any(protocol.pipeline for protocol in server.server.server_state.connections))  # type: ignore[union-attr]
            connection.close()
            while not server.idle():  # noticed once tokens cannot be written: after far fewer passes than the text has
                gate.let(1)
                time.sleep(0.1)
        assert finished.get() == before

    def test_endless_headers(self, server: Running) -> None:
        connection = server.connect()
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            for i in range(1000):
                connection.sendall(b"X-%d: " % i + b"x" * 10_000 + b"\r\n")
            pytest.fail("it listens for ever")
        connection.close()
        with server.connect() as connection:  # and in pieces
            connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 60_000)
            time.sleep(0.1)
            connection.sendall(b"x" * 10_000)
            assert connection.recv(1000).startswith(b"HTTP/1.1 431")

    def test_too_many_connections(self, folder: Path) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6), max_connections=3) as server:
            few = [server.connect() for _ in range(3)]
            until(lambda: len(server.server.server_state.connections) == 3)
            more = server.connect()
            assert more.recv(1000).startswith(b"HTTP/1.1 503")
            for connection in (*few, more):
                connection.close()
            until(lambda: not server.server.server_state.connections)
            assert httpx.get(f"{server.url}/health").status_code == 200

    def test_a_repeated_error_is_logged_once(
        self,
        folder: Path,  # noqa: F811
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tried = threading.Semaphore(0)

        def accept(_: socket.socket) -> None:
            tried.release()
            raise OSError(errno.EMFILE, "too many open files")

        with running(lambda: LLM(folder, cache_memory=10**6)) as server:
            monkeypatch.setattr(socket.socket, "accept", accept)
            with server.connect():
                for _ in range(10):
                    assert tried.acquire(timeout=WAIT)
            monkeypatch.undo()
        assert [record.message for record in caplog.records if "socket.accept()" in record.message] == [
            "socket.accept() out of system resource"
        ]

    def test_the_limit_of_draining(self, folder: Path, gate: Gate) -> None:  # noqa: F811
        """A response that has not begun is the API's own error, and a stream ends with an event."""
        with running(lambda: LLM(folder, cache_memory=10**6), drain_seconds=1) as server, gate.held():
            waiting = server.begin("/v1/completions", LONG | {"stream": False})
            sending = server.connect()
            sending.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            streams = [
                server.begin("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "stream": True}),
                server.begin("/v1/responses", {"model": "tiny", "input": "x", "stream": True}),
            ]
            heads = [stream.recv(1 << 16) for stream in streams]
            until(lambda: server.service.num_sequences == 3)
            server.server.stop()
            for connection in (waiting, sending):
                answer = connection.makefile("rb").read()
                assert answer.startswith(b"HTTP/1.1 503 "), answer
                assert b'"code":"draining"' in answer
            for head, stream in zip(heads, streams, strict=True):
                answer = head + stream.makefile("rb").read()
                assert b'"code":"draining"' in answer
                assert answer.endswith(b"\r\n0\r\n\r\n")
            for connection in (waiting, sending, *streams):
                connection.close()

    def test_a_full_queue(self, folder: Path, gate: Gate) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6, max_rows=1), max_waiting=1) as server:
            with gate.held():
                two = [server.begin("/v1/completions", LONG) for _ in range(2)]
                until(lambda: server.service.num_sequences == 2)
                answer = server.post("/v1/completions", LONG)
                assert answer.status_code == 429
                assert answer.headers["retry-after"] == "1"
                for connection in two:
                    connection.close()
                until(server.idle)
            assert server.post("/v1/completions", LONG | {"max_tokens": 1, "stream": False}).status_code == 200

    @pytest.mark.parametrize(("name", "value", "status"), [("num_sequences", 10**6, 429), ("draining", True, 503)])
    @pytest.mark.parametrize(
        ("path", "asked"),
        [
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": MESSAGES}),
            ("responses", {"input": "x"}),
        ],
    )
    def test_no_prompt_is_read_where_there_is_no_room(
        self,
        path: str,
        asked: dict[str, Any],
        name: str,
        value: Any,
        status: int,
        server: Running,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for encode in ("encode", "encode_chat"):
            monkeypatch.setattr(server.service.tokenizer, encode, lambda *_, **__: pytest.fail("it was read"))
        monkeypatch.setattr(server.service, name, value)
        assert server.post(f"/v1/{path}", {"model": "tiny", **asked}).status_code == status


class TestUnderPressure:
    def test_gone_at_any_moment(self, folder: Path) -> None:  # noqa: F811
        """Whatever a client waits for when it goes, everything is given back."""
        bodies = [LONG, LONG | {"stream": False}, LONG | {"n": 3}, LONG | {"echo": True, "max_tokens": 20}]
        with running(lambda: LLM(folder, cache_memory=10**6, max_rows=8)) as server:

            def come_and_go(i: int) -> None:
                draw = random.Random(i)
                connection = server.begin("/v1/completions", bodies[i % len(bodies)] | {"seed": i})
                time.sleep(draw.random() * 0.2)
                if draw.random() < 0.5:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                connection.close()

            with ThreadPoolExecutor(16) as pool:
                list(pool.map(come_and_go, range(80)))
            until(server.idle)
            until(lambda: not server.server.server_state.connections and not server.server.server_state.tasks)
            llm = server.service.llm
            pages = llm.memory.pool
            llm.between_steps(lambda _: pages.ensure_free(pages.num_pages)).result()  # raises if one is in use
            expected = alone(server, PROMPT, max_new_tokens=12).text
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            assert server.post("/v1/completions", body).json()["choices"][0]["text"] == expected

    def test_too_little_memory_for_all(self, server: Running, folder: Path, gate: Gate) -> None:  # noqa: F811
        """Texts give up their pages to others and come back, and stay what they are alone."""
        asks = [{"prompt": f"{PROMPT} {i}", "seed": i, "max_tokens": 150} for i in range(8)]
        common = {"model": "tiny", "temperature": 0.9, "ignore_eos": True, "logprobs": 1}
        one_by_one = [server.post("/v1/completions", ask | common).json()["choices"] for ask in asks]
        few = CONTEXT * CACHE_BYTES_PER_TOKEN * 2
        with running(lambda: LLM(folder, cache_memory=few)) as small, ThreadPoolExecutor(len(asks)) as pool:
            with gate.held():
                answers = pool.map(lambda ask: small.post("/v1/completions", ask | common).json()["choices"], asks)
                until(lambda: small.service.llm.stats().waiting == len(asks))
            assert list(answers) == one_by_one
            assert small.service.llm.stats().preemptions > 0

    def test_an_error_in_the_middle_of_a_batch(
        self,
        folder: Path,  # noqa: F811
        gate: Gate,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """All who wait hear of it, in whatever way is left; and the next engine answers."""
        run, calls = CpuBackend.run, iter(range(30))

        def breaking(*args: Any) -> Any:
            if next(calls, None) is None and len(args[1]) == 6:
                monkeypatch.setattr(CpuBackend, "run", run)
                raise RuntimeError("a device, at /secret/path")
            return run(*args)

        with running(lambda: LLM(folder, cache_memory=10**7), restarts=True) as server:
            monkeypatch.setattr(CpuBackend, "run", breaking)
            with ThreadPoolExecutor(6) as pool:
                bodies = [LONG | {"stream": i % 2 == 0, "seed": i} for i in range(6)]
                with gate.held():
                    posted = pool.map(lambda body: server.post("/v1/completions", body), bodies)
                    until(lambda: server.service.llm.stats().waiting == 6)
                answers = list(posted)
            assert [answer.status_code for answer in answers] == [200, 503] * 3
            for answer in answers:
                assert "engine_failed" in answer.text
                assert "secret" not in answer.text
                assert "[DONE]" not in answer.text
            until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            text = server.post("/v1/completions", body).json()["choices"][0]["text"]
            assert text == alone(server, PROMPT, max_new_tokens=12).text
            until(server.idle)


class TestItsEnd:
    def test_what_runs_is_finished(self, folder: Path) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6)) as server:
            connection = server.begin("/v1/completions", LONG)
            connection.recv(10)
            server.server.stop()
            data = b""
            while part := connection.recv(65536):
                data += part
            assert b"data: [DONE]" in data
            connection.close()
        assert server.status == 0

    def test_an_engine_that_fails(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6)) as server:
            self.break_once(server, monkeypatch)
            until(lambda: server.status is not None)
        assert server.status == 1

    def test_another_engine(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        with running(lambda: LLM(folder, cache_memory=10**6), restarts=True) as server:
            self.break_once(server, monkeypatch)
            until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
            assert server.post("/v1/completions", {"model": "tiny", "prompt": PROMPT}).status_code == 200
        assert server.status == 0

    def break_once(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        run = CpuBackend.run

        def broken(*_: Any) -> Any:
            monkeypatch.setattr(CpuBackend, "run", run)
            raise RuntimeError("a device, at /secret/path")

        monkeypatch.setattr(CpuBackend, "run", broken)
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": PROMPT})
        assert answer.status_code == 503
        assert "secret" not in answer.text

    def test_a_process(self, folder: Path) -> None:  # noqa: F811
        """As a user would: started, asked, and ended by SIGTERM in the middle of a text."""
        command = [sys.executable, "-c", "from infer.cli import main; main()", "serve", str(folder), "--port", "0"]
        with subprocess.Popen([*command, "--cache-memory", "1MB"], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            url = line.split(" at ")[1].split("/v1")[0]
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
            foreign = httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"})
            assert foreign.json()["error"]["code"] == "foreign_host"
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert list(lines)[-2:] == ["data: [DONE]", ""]
            assert process.wait(600) == 0
            assert process.stderr.read() == ""


class TestChat:
    def test_text(self, server: Running, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0
        )
        expected = alone(server, MESSAGES, max_new_tokens=12)
        [choice] = answer.choices
        assert choice.message.content == expected.text
        assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
        assert answer.usage is not None
        assert answer.usage.total_tokens == expected.prompt_tokens + 12

    def test_stream(self, server: Running, client: OpenAI) -> None:
        settings: Any = {"temperature": 0.8, "seed": 3}
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=16,
                n=2,
                stream=True,
                logprobs=True,
                top_logprobs=2,
                stream_options={"include_usage": True},
                **settings,
            )
        )
        expected: Any = alone(server, MESSAGES, max_new_tokens=16, n=2, logprobs=2, **settings)
        for index, result in enumerate(expected):
            own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            assert own[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in own) == result.text
            found = [each for choice in own if choice.logprobs for each in choice.logprobs.content or []]
            assert [each.logprob for each in found] == [each.logprob for each in result.logprobs]
            assert [len(each.top_logprobs) for each in found] == [2] * len(found)
            assert own[-1].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 32

    def test_others_go_on_while_a_large_answer_is_made(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        made_in, make = [], completions.chat_logprobs

        def noted(*args: Any) -> Any:
            made_in.append(threading.current_thread().name)
            return make(*args)

        monkeypatch.setattr(completions, "chat_logprobs", noted)
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "logprobs": True}
        assert server.post("/v1/chat/completions", body).status_code == 200
        assert [name.startswith("asyncio_") for name in made_in] == [True]

    def test_what_asks_for_nothing(self, server: Running) -> None:
        """Clients send it unasked, as guidellm does the statistics."""
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "reasoning_effort": "none", "stream": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = server.post("/v1/chat/completions", body | {"stream_options": options})
        assert answer.status_code == 200
        assert answer.text.count('"usage":{') == 1

    def test_a_beginning_that_is_known(self, server: Running, client: OpenAI) -> None:
        chat: Any = [{"role": "user", "content": "a long beginning " * 8}]
        ask: Any = {"model": "tiny", "messages": chat, "max_tokens": 4, "temperature": 0}
        client.chat.completions.create(**ask)
        usage = client.chat.completions.create(**ask).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= 64

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"messages": []}, "at least 1"),
            ({"messages": [{"role": "user"}]}, "messages[0]"),
            ({"messages": [{"role": "user", "content": "forbidden"}]}, "not that"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image"),
            ({"top_logprobs": 2}, "needs logprobs"),
            ({"functions": [{}]}, "functions is not supported: use tools"),
            ({"store": True}, "store is not supported: nothing is stored here"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "does not support tools"),
            ({"tool_choice": "required"}, "tool_choice needs tools"),
            ({"reasoning_effort": "low"}, "does not reason"),
            ({"chat_template_kwargs": {"messages": []}}, "is reserved"),
            ({"chat_template_kwargs": {"tokenizer": 1}}, "is reserved"),
            ({"chat_template_kwargs": {"self": 1}}, "is reserved"),
            ({"response_format": {"type": "json_schema"}}, "needs a schema"),
            ({"max_completion_tokens": 10**6}, "the limit is"),
        ],
        ids=str,
    )
    def test_what_is_wrong(self, change: dict[str, Any], words: str, server: Running) -> None:
        answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES} | change)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]

    def test_no_template(self, plain: Path) -> None:  # noqa: F811
        with running(lambda: LLM(plain, cache_memory=10**6)) as server:
            answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES})
            assert answer.status_code == 400
            assert "no chat template" in answer.json()["error"]["message"]


class TestSessions:
    def test_goes_on(self, server: Running, client: OpenAI) -> None:
        """OpenAI's client talks to a session as to the whole server."""
        made = server.post("/v1/sessions", {"messages": [{"role": "system", "content": "be brief"}]})
        assert made.status_code == 201
        session = made.json()["id"]
        with OpenAI(base_url=f"{server.url}/v1/sessions/{session}", api_key="none") as talking:
            ask: Any = {"model": "tiny", "max_tokens": 5, "temperature": 0}
            first = talking.chat.completions.create(messages=MESSAGES, **ask).choices[0].message.content
            stream = talking.chat.completions.create(messages=[{"role": "user", "content": "and?"}], stream=True, **ask)
            second = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        chat: Any = [
            {"role": "system", "content": "be brief"},
            *MESSAGES,
            {"role": "assistant", "content": first},
            {"role": "user", "content": "and?"},
        ]
        assert second == alone(server, chat, max_new_tokens=5).text
        found = httpx.get(f"{server.url}/v1/sessions/{session}").json()
        assert found["messages"] == [*chat, {"role": "assistant", "content": second}]
        assert found["turns"] == 2

        twin = server.post(f"/v1/sessions/{session}/fork", {}).json()
        assert twin["messages"] == found["messages"]
        back = server.post(f"/v1/sessions/{session}/rewind", {"turns": 1}).json()
        assert back["messages"] == chat[:-1]
        assert httpx.get(f"{server.url}/v1/sessions/{twin['id']}").json()["turns"] == 2
        again = server.post("/v1/sessions", {"messages": found["messages"]}).json()  # as it was saved
        assert again["messages"] == found["messages"]
        assert {each["id"] for each in httpx.get(f"{server.url}/v1/sessions").json()["data"]} >= {session, twin["id"]}
        assert httpx.delete(f"{server.url}/v1/sessions/{session}").status_code == 200
        assert httpx.get(f"{server.url}/v1/sessions/{session}").status_code == 404

    def test_what_is_wrong(self, server: Running, gate: Gate) -> None:
        session = server.post("/v1/sessions", {}).json()["id"]
        path = f"/v1/sessions/{session}"
        body = {"model": "tiny", "messages": MESSAGES}
        assert server.post(f"{path}/rewind", {"turns": 1}).status_code == 400
        assert server.post(f"{path}/chat/completions", body | {"n": 2}).status_code == 400
        assert server.post("/v1/sessions", {"messages": [{"role": "nobody", "content": ""}]}).status_code == 400
        assert server.post("/v1/sessions/none/chat/completions", body).status_code == 404
        # An answer that is broken off is not remembered, and leaves the session free.
        long = body | {"stream": True, "ignore_eos": True}
        with gate.held():
            connection = server.begin(f"{path}/chat/completions", long)
            connection.recv(10)
            assert server.post(f"{path}/chat/completions", body).status_code == 409
            connection.close()
            until(server.idle)
        until(lambda: server.post(f"{path}/chat/completions", body | {"max_tokens": 1}).status_code == 200)
        assert len(httpx.get(server.url + path).json()["messages"]) == 2


class TestConstraints:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema(self, stream: bool, server: Running, client: OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"n": {"enum": [1, 2, 3]}},
            "required": ["n"],
            "additionalProperties": False,
        }
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        ask: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100, "response_format": wanted, "seed": 4}
        if stream:
            chunks = client.chat.completions.create(stream=True, **ask)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = client.chat.completions.create(**ask).choices[0].message.content or ""
        assert json.loads(text)["n"] in (1, 2, 3)
        params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=100, json_schema=schema)
        assert text == server.service.llm.generate(MESSAGES, params).text

    def test_integers_of_a_strict_schema_have_limits(self, server: Running, client: OpenAI) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        limits = {"n": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}}
        for seed in range(3):
            ask: Any = {"model": "tiny", "messages": MESSAGES, "response_format": wanted, "seed": seed}
            text = client.chat.completions.create(max_tokens=60, **ask).choices[0].message.content
            limited = schema | {"properties": limits}
            params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=60, json_schema=limited)
            assert text == server.service.llm.generate(MESSAGES, params).text

    def test_a_class(self, client: OpenAI) -> None:
        """The client makes the schema, reads the text, and raises the error of one that was cut."""
        for seed in range(3):
            ask: Any = {"model": "tiny", "messages": MESSAGES, "response_format": Answer, "seed": seed}
            parsed = client.chat.completions.parse(max_tokens=100, **ask).choices[0].message.parsed
            assert isinstance(parsed, Answer)
            assert isinstance(parsed.part, Part)
            with pytest.raises(openai.LengthFinishReasonError):
                client.chat.completions.parse(max_tokens=3, **ask)
            with client.chat.completions.stream(max_tokens=100, **ask) as stream:
                assert stream.get_final_completion().choices[0].message.parsed == parsed
        made = client.responses.parse(model="tiny", input="hello", text_format=Answer, max_output_tokens=100)
        assert isinstance(made.output_parsed, Answer)

    def test_a_regex(self, client: OpenAI) -> None:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=50, extra_body={"regex": "(he|she) [a-c]{3}"}
        )
        assert re.fullmatch("(he|she) [a-c]{3}", answer.choices[0].text)

    def test_one_that_takes_too_much(self, server: Running) -> None:
        """It is found out on the way, and is the client's, not the model's."""
        body = {"model": "tiny", "prompt": PROMPT, "regex": "a?" * 3000 + "a" * 3000}
        answer = server.post("/v1/completions", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "constraint_failed")
        assert "by the regex" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        "change",
        [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
            {"regex": "("},
            {"grammar": "start: nothing"},
            {"regex": "a", "grammar": "start: /a/"},
            {"regex": "a", "ignore_eos": True},
        ],
        ids=str,
    )
    def test_what_is_wrong(self, change: dict[str, Any], server: Running) -> None:
        answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES} | change)
        assert answer.status_code == 400
