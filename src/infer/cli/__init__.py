"""The `infer` command: exit status, errors and interrupts of all commands in `commands.py`."""

import atexit
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from infer import progress
from infer.cli import status as status_line
from infer.cli.streams import close_streams, open_streams, say_error

INTERRUPT_GRACE_S = 1.0  # an error so soon after Ctrl-C is attributed to it


def main(args: list[str] | None = None) -> None:
    """Run the command line, then exit.

    Status 2: an error that the user can fix, in one line. 1: a failed check, a closed pipe, or an unexpected error, in
    one line. 130: Ctrl-C. INFER_TRACEBACK=1 prints the traceback.
    """
    with _handling_interrupts():
        sys.exit(_run(args))


def _run(args: list[str] | None) -> int:
    """Run the command line; returns the exit status."""
    global _is_ending
    try:
        try:
            open_streams()
            kinds = (progress.IMPORTING, progress.FETCHING, progress.LOADING, progress.COMPILING)
            with status_line.shown(*kinds), status_line.reporting_import("torch"):
                if "TORCHELASTIC_RUN_ID" in os.environ:
                    _join_torchrun()
                from infer.cli.commands import app  # inside `try`: Ctrl-C may come during the import

                app(args)
        finally:
            _is_ending = True
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if status == 0:
            status = _flush_stdout()
    except BaseException as error:  # a panic in Rust is not an Exception
        status = 130 if time.monotonic() - _interrupted_at < INTERRUPT_GRACE_S else _report(error)
    close_streams()
    return status


def _join_torchrun() -> None:
    """Of the processes that torchrun has started, rank 0 runs the command; the others are its workers."""
    from infer.parallel import launch

    if launch.torchrun_rank():
        launch.run_torchrun_worker()
    atexit.register(launch.end_torchrun_workers)


_interrupted_at = -math.inf
_is_ending = False


@contextmanager
def _handling_interrupts() -> Iterator[None]:
    """Record the time of Ctrl-C: C++ code may turn a KeyboardInterrupt into another error. Ignore it at the end."""
    global _interrupted_at, _is_ending
    _interrupted_at, _is_ending = -math.inf, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _interrupted_at
        if not _is_ending:
            _interrupted_at = time.monotonic()
            signal.default_int_handler(number, frame)

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _flush_stdout() -> int:
    """Flush stdout and return the exit status."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return 1
    except OSError as error:
        return _report(error)
    return 0


def _report(error: BaseException) -> int:
    if os.environ.get("INFER_TRACEBACK") == "1":
        traceback.print_exception(error)
    if isinstance(error, UnicodeError):
        say_error(f"this is not UTF-8 text: {error}")
    elif isinstance(error, FileNotFoundError) and error.filename is not None:
        say_error(f"there is no file {error.filename}")
    elif isinstance(error, ValueError | OSError | ImportError):
        say_error(str(error) or type(error).__name__)
    elif any(getattr(each, "says_all", False) for each in (error, error.__cause__)):
        say_error(str(error))
        return 1
    else:
        hint = "out of memory" if isinstance(error, MemoryError) else "INFER_TRACEBACK=1 shows where"
        say_error(f"{type(error).__name__}: {error} ({hint})" if str(error) else f"{type(error).__name__} ({hint})")
        return 1
    return 2
