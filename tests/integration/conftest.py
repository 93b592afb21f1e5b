"""A server for the tests that ask one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infer import LLM

if TYPE_CHECKING:
    from openai import OpenAI
    from serving import Running


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    from serving import running, until  # its packages may be missing where the other tests run

    with running(lambda: LLM(folder, cache_memory=10**7)) as found:
        yield found
        until(found.idle)


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client
