"""Requests drawn from the server's own description of itself: nothing fails, and every answer is one it describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from amount import ALL
from commands import folder  # noqa: F401
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from serving import WAIT, Running, running, until

from infer import LLM
from infer.server.openapi import GETS, POSTS

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.usefixtures("compiled")  # nothing waits for a compiler
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 400 if ALL else 25
# In place of what is drawn: a text stays short, and half of the requests get as far as the engine.
SHORT = {"max_tokens": 8, "max_completion_tokens": 8, "n": 2}
KNOWN = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:  # noqa: F811
    with running(lambda: LLM(folder, cache_memory=10**7)) as found:
        yield found
        until(found.idle)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(("POST", path, mode) for path in POSTS for mode in GenerationMode),
        *(("GET", path, GenerationMode.POSITIVE) for path in GETS),  # what takes nothing, cannot be given wrong things
    ],
    ids=str,
)
def test_as_described(method: str, path: str, mode: GenerationMode, server: Running) -> None:
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    @seed(0)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def ask(case: Any, known: bool) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            fixed = SHORT | (KNOWN if known else {})
            case.body |= {name: value for name, value in fixed.items() if name in case.body}
        case.call_and_validate(checks=CHECKS, timeout=WAIT)

    ask()
