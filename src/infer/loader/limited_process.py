"""Runs a script in a separate process, which bounds its own time and memory by the limits of the process."""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

WAIT = 10.0  # seconds for an answer, even on a busy machine


class ProcessEnded(Exception):
    """The process ended without an answer; the message says why."""


class LimitedProcess:
    """Sends requests to a script, one at a time; both are a length in 8 bytes, and as many bytes."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None  # started when needed
        self._exchange = threading.Lock()
        atexit.register(self._end)

    def answer(self, request: bytes) -> bytes:
        with self._exchange:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._process = self._start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            deadline = threading.Timer(WAIT, process.kill)
            deadline.start()
            size, reply = 0, b""
            try:
                process.stdin.write(len(request).to_bytes(8))
                process.stdin.write(request)
                process.stdin.flush()
                size = int.from_bytes(process.stdout.read(8))
                reply = process.stdout.read(size)
            except BrokenPipeError:
                pass
            except BaseException:  # else its reply would be read as that of the next request
                self._end()
                raise
            finally:
                deadline.cancel()
            if not reply or len(reply) < size:
                status = self._end()
                why = "it takes too long" if status == -signal.SIGPROF else f"its process ended with status {status}"
                raise ProcessEnded(why)
            return reply

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: no imports from the script's folder. A session of its own, so that Ctrl-C does not reach it.
        command = [sys.executable, "-P", "-W", "ignore", str(self._script)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def _end(self) -> int | None:
        """Kill the process, if there is one; returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with suppress(BrokenPipeError), process:  # closes its pipes
            pass
        return process.wait()
