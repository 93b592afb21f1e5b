"""Runs the command line on hostile input in a child with bounds of memory and time.

One process imports the package once and forks a child for each case: importing torch takes longer than most cases.
Kernels stay off in it: a forked process cannot run them.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

MB = 2**20
TIME = 20.0  # seconds of a processor that a case may take at most; most take a tenth of one
PATIENCE = 300.0  # seconds until one that waits counts as hanging, however busy the machine is
MEMORY = 200 * MB  # beyond what the process had before, and twice the file


class Outcome(NamedTuple):
    """How a command ended."""

    status: int | None  # None: it was killed, out of time
    out: bytes
    err: bytes
    seconds: float  # of a processor
    memory: int  # bytes at its peak, beyond what the process had before


def assert_refused(outcome: Outcome, file_bytes: int = 0, seconds: float = TIME) -> None:
    """One line that says what is wrong, exit status 2, and bounds kept."""
    assert_bounded(outcome, file_bytes, seconds)
    assert outcome.status == 2, outcome
    assert outcome.out == b"", outcome
    lines = outcome.err.decode().splitlines()
    assert len(lines) == 1, outcome
    assert lines[0].startswith("error: "), outcome


def assert_bounded(outcome: Outcome, file_bytes: int = 0, seconds: float = TIME) -> None:
    """It may have gone well or been refused, but without a traceback, a hang or too much memory."""
    assert outcome.status is not None, f"no end after {outcome.seconds:.1f} s: {outcome}"
    assert outcome.status in (0, 1, 2), outcome
    assert b"Traceback" not in outcome.err, outcome.err.decode(errors="replace")
    assert outcome.seconds <= seconds, f"{outcome.seconds:.1f} s: {outcome}"
    assert outcome.memory <= 2 * file_bytes + MEMORY, f"{outcome.memory / MB:.0f} MB: {outcome}"


class Server:
    """A process that has imported the package, and forks a child for each command."""

    def __init__(self) -> None:
        # It computes nothing itself: a process whose threads have run cannot be forked.
        environment = os.environ | {"INFER_KERNELS": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def run(self, *args: str | Path, stdin: bytes = b"", seconds: float = TIME, **surroundings: Any) -> Outcome:
        """`infer ARGS`. surroundings: those of `_surround`."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pickle.dump(([str(arg) for arg in args], stdin, seconds, surroundings), pipe_in)
        pipe_in.flush()
        return Outcome(*pickle.load(pipe_out))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve() -> None:
    """Answer until standard input ends."""
    import infer.cli.commands
    import infer.loader.load  # noqa: F401

    for module in ("gguf", "safetensors.torch", "tokenizers", "torch"):
        importlib.import_module(module)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(tuple(_run(*request)), answers)
        answers.flush()


def _run(args: list[str], stdin: bytes, seconds: float, surroundings: dict[str, Any]) -> Outcome:
    out, err, report = (os.pipe() for _ in range(3))
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), -1))
        _child(args, stdin, out[1], err[1], report[1], surroundings)
    for pipe in (out, err, report):
        os.close(pipe[1])
    texts, ended = _collect([out[0], err[0], report[0]], time.monotonic() + PATIENCE)
    if not ended:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    for pipe in (out, err, report):
        os.close(pipe[0])
    code = os.waitstatus_to_exitcode(status)
    if not ended or code == -signal.SIGXCPU:
        code = None
    return Outcome(code, texts[0], texts[1], used.ru_utime + used.ru_stime, int(texts[2] or 0))


def _child(args: list[str], stdin: bytes, out: int, err: int, report: int, surroundings: dict[str, Any]) -> None:
    """Never returns."""
    code = 70
    try:
        reading, writing = os.pipe()
        if os.fork() == 0:  # a pipe holds little: somebody has to write what is more
            for end in (reading, out, err, report):
                os.close(end)
            _write(writing, stdin)
            os._exit(0)
        os.close(writing)
        for source, target in ((reading, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        # What pytest has put in their place ends with it.
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        before = _reset_peak()
        _surround(**surroundings)
        code = _main(args)
        _write(report, str(max(0, _peak() - before)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _surround(
    closed: Sequence[int] = (),
    broken: Sequence[int] = (),
    interrupt_after: float | None = None,
    address_space: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Streams that are closed (`<&-`) or that nobody reads any more (`| head -1`), Ctrl-C, `ulimit -v`, variables."""
    for number in closed:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    for number in broken:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, number)
        os.close(writing)
    if interrupt_after is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: _interrupt())
        signal.setitimer(signal.ITIMER_REAL, interrupt_after)
    if address_space is not None:  # beyond what there is
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (address_space + pages * resource.getpagesize(), -1))
    os.environ.update(environment)


def _interrupt() -> None:
    """Ctrl-C, unless the command has ended: it has its own handler while it runs."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.raise_signal(signal.SIGINT)


def _main(args: list[str]) -> int:
    from infer.cli import main

    try:
        main(args)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def _write(target: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(target, data) :]
    except BrokenPipeError:
        pass


def _collect(pipes: list[int], deadline: float) -> tuple[list[bytes], bool]:
    """Everything that is written to these pipes; and whether all of them ended in time."""
    texts: dict[int, bytes] = dict.fromkeys(pipes, b"")
    unfinished = set(pipes)
    while unfinished:
        ready, _, _ = select.select(list(unfinished), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            piece = os.read(pipe, 1 << 16)
            texts[pipe] += piece
            if not piece:
                unfinished.discard(pipe)
    return [texts[pipe] for pipe in pipes], not unfinished


def _reset_peak() -> int:
    """Reset the peak of memory; returns the memory in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    serve()
