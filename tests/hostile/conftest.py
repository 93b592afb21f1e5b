from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
