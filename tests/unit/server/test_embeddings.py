"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from infer import LLM
from infer.server.app import make_app
from infer.server.service import Service, Settings

TEXTS = ["hello", "a longer text to embed", "z"]


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    with Service(lambda: LLM(folder, cache_memory=10**6), Settings("tiny")) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service)) as client:
        yield client


def ask(client: TestClient, given: Any, **fields: Any) -> Any:
    return client.post("/v1/embeddings", json={"input": given} | fields).json()


def vectors(answer: Any) -> np.ndarray[Any, Any]:
    assert answer["object"] == "list"
    assert [(each["object"], each["index"]) for each in answer["data"]] == [
        ("embedding", i) for i in range(len(answer["data"]))
    ]
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


def test_of_texts_and_tokens(client: TestClient, service: Service) -> None:
    answer = ask(client, TEXTS, model="tiny", user="me")
    found = vectors(answer)
    expected = service.llm.embed(TEXTS).numpy()
    assert (found == expected).all()
    tokens = [service.llm.encode(text) for text in TEXTS]
    count = sum(map(len, tokens))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert answer["model"] == "tiny"
    assert (vectors(ask(client, tokens)) == expected).all()
    assert (vectors(ask(client, tokens[1])) == expected[1:2]).all()
    assert (vectors(ask(client, TEXTS[2])) == expected[2:]).all()


def test_formats(client: TestClient) -> None:
    """base64 as OpenAI's client asks for; the first dimensions, to length 1 again."""
    found = vectors(ask(client, TEXTS, encoding_format="float"))
    encoded = ask(client, TEXTS, encoding_format="base64")["data"]
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in encoded]
    assert (np.stack(decoded) == found).all()
    few = vectors(ask(client, TEXTS, dimensions=4))
    assert few == pytest.approx(found[:, :4] / np.linalg.norm(found[:, :4], axis=1, keepdims=True), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "x"]}, "input"),
        ({"input": [10**9]}, None),
        ({"input": "x" * 5000}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 10**6}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({"input": "x", "model": "other"}, "model"),
        ({}, "input"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused(client: TestClient, fields: dict[str, Any], param: str | None) -> None:
    answer = client.post("/v1/embeddings", json=fields)
    assert answer.status_code in (400, 404)
    assert str(answer.json()["error"]["param"]).startswith(str(param))
    assert vectors(ask(client, "x")).shape[0] == 1
