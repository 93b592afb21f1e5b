"""Runs code in a process that has imported the package already: importing it takes longer than most tests.

The processes are forked from one that is started once, and that has not imported what reads its settings from the
environment when it is imported.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from waiting import WAIT

PRELOADED = ["gguf", "safetensors.torch", "tokenizers", "torch", "infer.loader.load", "infer.engine.generate"]


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_forked(code: str, environment: Mapping[str, str]) -> str:
    """What this code prints, with these variables and no others."""
    receiving, sending = _context().Pipe(duplex=False)
    process = _context().Process(target=_run, args=(code, dict(environment), sending))
    process.start()
    sending.close()
    try:
        assert receiving.poll(WAIT), "it does not end"
        out, error = receiving.recv()
    finally:
        process.kill()
        process.join()
        receiving.close()
    assert not error, error
    return str(out)


def _run(code: str, environment: dict[str, str], answer: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            exec(code, {"__name__": "__main__"})
        answer.send((out.getvalue(), ""))
    except BaseException:
        answer.send(("", traceback.format_exc()))
