"""How many modules of the server one streamed chat goes through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.testclient import TestClient

import infer.server
from infer import LLM
from infer.server.app import make_app
from infer.server.service import Service, Settings

PACKAGE = Path(infer.server.__file__).parent
MAX_MODULES, MAX_VISITED = 15, 9


@contextmanager
def visited() -> Iterator[set[str]]:
    """The modules of the package whose functions run, in any thread that starts meanwhile, and in this one."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        files.add(frame.f_code.co_filename)

    names: set[str] = set()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed has no None here
        names |= {Path(file).stem for file in files if Path(file).parent == PACKAGE}


def test_modules() -> None:
    names = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert len(names) <= MAX_MODULES, names


def test_a_streamed_chat(folder: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
    with Service(lambda: LLM(folder, cache_memory=10**6), Settings("tiny")) as service:
        app = make_app(service)
        with visited() as names, TestClient(app) as client:
            answer = client.post("/v1/chat/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert {"app", "bodies", "completions"} <= names
    assert len(names) <= MAX_VISITED, sorted(names)
