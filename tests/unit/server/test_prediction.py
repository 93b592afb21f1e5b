"""`prediction` of a chat: a text whose tokens are drafted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from infer import LLM
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.server.app import make_app
from infer.server.service import Service, Settings

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def client(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[TestClient]:
    monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))  # as many as possible
    speculate = getattr(request, "param", "ngram")
    with (
        Service(lambda: LLM(folder, cache_memory=10**6, speculate=speculate), Settings("tiny")) as service,
        TestClient(make_app(service)) as client,
    ):
        yield client


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json=CHAT | fields).json()


def num_accepted(client: TestClient) -> int:
    line = next(
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("infer:spec_decode_num_accepted_tokens_total")
    )
    return int(float(line.split()[-1]))


@pytest.mark.parametrize("client", ["ngram", None], indirect=True)
def test_changes_no_answer(client: TestClient, request: pytest.FixtureRequest) -> None:
    """Without a drafter it has no effect."""
    plain = ask(client, logprobs=True)
    text = plain["choices"][0]["message"]["content"]
    half = len(text) // 2
    contents = [text, [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}], "other words"]
    for content in contents:
        before = num_accepted(client)
        answer = ask(client, prediction={"type": "content", "content": content}, logprobs=True)
        assert answer["choices"] == plain["choices"]
        is_drafted = request.node.callspec.params["client"] is not None and content is not contents[-1]
        assert (num_accepted(client) > before) == is_drafted


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"type": "content"},
        {"type": "content", "content": 7},
        {"type": "text", "content": "x"},
        {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
        {"type": "content", "content": "x " * 100_000},
    ],
    ids=lambda prediction: str(prediction)[:60],
)
def test_refused(client: TestClient, prediction: Any) -> None:
    error = ask(client, prediction=prediction)["error"]
    assert error["param"].startswith("prediction")
    assert error["type"] == "invalid_request_error"
