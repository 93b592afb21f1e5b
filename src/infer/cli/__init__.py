"""The `infer` command: what happens around every command of `commands.py`."""

import os
import sys
import traceback

from infer.cli.streams import close_streams, open_streams, say_error


def main(args: list[str] | None = None) -> None:
    """Run the command line, then exit.

    Status 2: something the user can mend, which one line names. 1: a check failed, the reader of the output went away,
    or something unexpected happened, which one line names too. 130: Ctrl-C. INFER_TRACEBACK=1 shows where.
    """
    try:
        open_streams()
        from infer.cli.commands import app  # here, so that Ctrl-C is caught

        app(args)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if status == 0:
            status = _flushed()
    except BaseException as error:  # also what is no Exception: a panic in Rust
        status = _report(error)
    close_streams()
    sys.exit(status)


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
    elif isinstance(error, ValueError | OSError | ImportError):
        say_error(str(error) or type(error).__name__)
    else:
        hint = "it does not fit into memory" if isinstance(error, MemoryError) else "INFER_TRACEBACK=1 shows where"
        say_error(f"{type(error).__name__}: {error} ({hint})" if str(error) else f"{type(error).__name__} ({hint})")
        return 1
    return 2
