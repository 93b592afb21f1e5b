"""`benchmarks/exactness.py` against servers that answer as they are told."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import exactness


@contextmanager
def answering(alone: list[str], together: list[str], *, as_chats: bool = False) -> Iterator[str]:
    """A server that gives each request the first answer, and request 2 the second one when it comes again."""
    seen: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = together if body["seed"] == 2 and 2 in seen else alone
            seen.append(body["seed"])
            logprobs = {"content": [{"token": token} for token in tokens]} if as_chats else {"tokens": tokens}
            answer = json.dumps({"choices": [{"logprobs": logprobs}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_differing_tokens_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "exactness.png"
    with (
        answering(["a", "b", "c"], ["a", "b", "c"]) as same,
        answering(["a", "b"], ["a", "x", "c"], as_chats=True) as other,
    ):
        servers = ["--server", f"one={same}", "--server", f"two={other}"]
        found = exactness.main([*servers, "--requests", "4", "--at-once", "2", "--plot", str(picture)])
    assert capsys.readouterr().out.splitlines() == [
        "one: 0 of 4 texts and 0 of 12 tokens differ",
        "two: 1 of 4 texts and 2 of 9 tokens differ",
    ]
    assert found[1].differing[2] == [False, True, True]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_requests_differ() -> None:
    bodies = [exactness.body_of(i, 8, 0.0) for i in range(64)]
    assert len({body["prompt"] for body in bodies}) == 64
    assert [body["seed"] for body in bodies] == list(range(64))


@pytest.mark.parametrize(
    "options", [["--server", "url"], ["--server", "a=u", "--server", "a=v"], ["--server", "a=u", "--at-once", "0"]]
)
def test_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        exactness.main(options)
