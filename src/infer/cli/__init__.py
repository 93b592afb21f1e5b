"""The `infer` command: what happens around every command of `commands.py`."""

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

SOON = 1.0  # seconds after Ctrl-C within which an error is taken for its doing


def main(args: list[str] | None = None) -> None:
    """Run the command line, then exit.

    Status 2: something the user can mend, which one line names. 1: a check failed, the reader of the output went away,
    or something unexpected happened, which one line names too. 130: Ctrl-C. INFER_TRACEBACK=1 shows where.
    """
    try:
        open_streams()
        with _noting_interrupts(), status_line.shown(progress.FETCHING, progress.LOADING, progress.COMPILING):
            if "TORCHELASTIC_RUN_ID" in os.environ:
                _share_among_processes()
            from infer.cli.commands import app  # here, so that Ctrl-C is caught

            app(args)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if status == 0:
            status = _flushed()
    except BaseException as error:  # also what is no Exception: a panic in Rust
        status = 130 if time.monotonic() - _interrupted_at < SOON else _report(error)
    close_streams()
    sys.exit(status)


def _share_among_processes() -> None:
    """Of those that torchrun has started, the first runs the command. The others follow, and ask for nothing."""
    from infer.parallel import torchrun

    if torchrun.rank():
        torchrun.follow()
    atexit.register(torchrun.say_over)


_interrupted_at = -math.inf


@contextmanager
def _noting_interrupts() -> Iterator[None]:
    """Remember when Ctrl-C was pressed: C++ sometimes makes another error of a KeyboardInterrupt."""
    global _interrupted_at
    _interrupted_at = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _interrupted_at
        _interrupted_at = time.monotonic()
        signal.default_int_handler(number, frame)

    usual = threading.current_thread() is threading.main_thread()
    usual = usual and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _flushed() -> int:
    """The exit status, once the answer has been written."""
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
        say_error(f"this is not text in UTF-8: {error}")
    elif isinstance(error, FileNotFoundError) and error.filename is not None:
        say_error(f"there is no file {error.filename}")
    elif isinstance(error, ValueError | OSError | ImportError):
        say_error(str(error) or type(error).__name__)
    elif any(getattr(each, "says_all", False) for each in (error, error.__cause__)):
        say_error(str(error))
        return 1
    else:
        hint = "it does not fit into memory" if isinstance(error, MemoryError) else "INFER_TRACEBACK=1 shows where"
        say_error(f"{type(error).__name__}: {error} ({hint})" if str(error) else f"{type(error).__name__} ({hint})")
        return 1
    return 2
