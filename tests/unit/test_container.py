"""deploy/Dockerfile, where no container engine is at hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from infer.cli import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]
NAMES = [name for name, _ in STEPS]
ENVIRONMENT = dict(value.split("=", 1) for name, value in STEPS if name == "ENV")


def the(name: str) -> str:
    """The argument of an instruction that occurs once."""
    (value,) = (value for step, value in STEPS if step == name)
    return value


def test_the_base_is_one_image() -> None:
    assert re.fullmatch(r"python:3\.12\S*-slim@sha256:[0-9a-f]{64}", the("FROM"))


def test_the_user_owns_the_volume_before_it_is_declared() -> None:
    """Otherwise it belongs to root, and the server cannot write to it."""
    made = f"install --directory --owner {the('USER')} --group {the('USER')} {the('VOLUME')}"
    at = next(at for at, (name, value) in enumerate(STEPS) if name == "RUN" and made in value)
    assert at < min(NAMES.index("USER"), NAMES.index("VOLUME"))
    assert ENVIRONMENT["INFER_CACHE"] == the("VOLUME")


def test_torch_is_the_cpu_build() -> None:
    runs = [value for name, value in STEPS if name == "RUN" and "pip install" in value]
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in runs[0]
    assert "'.[server]'" in runs[1]


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    copied = {source for name, value in STEPS if name == "COPY" for source in value.split()[:-1]}
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_the_server_at_its_port(status: int, code: int) -> None:
    paths = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    program = json.loads(the("HEALTHCHECK").partition(" CMD ")[2])
    assert program[0] == "python"
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        environment = os.environ | {"INFER_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, *program[1:]], env=environment, capture_output=True, timeout=300)
    assert (done.returncode, paths) == (code, ["/health"])


def test_the_server_listens_where_the_health_check_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFER_PORT", "70000")
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "INFER_PORT" in capsys.readouterr().err
    assert ENVIRONMENT["INFER_PORT"] == the("EXPOSE")
    assert json.loads(the("ENTRYPOINT"))[:2] == ["infer", "serve"]
    assert not {"--port"} & {*json.loads(the("ENTRYPOINT")), *json.loads(the("CMD"))}
