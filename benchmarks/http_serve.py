"""`infer serve`; on SIGUSR1 it prints the number of tasks of its event loop to stderr."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any


def print_tasks(*_: Any) -> None:
    print(f"tasks: {len(asyncio.all_tasks())}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from infer.cli import main

    signal.signal(signal.SIGUSR1, print_tasks)
    main(["serve", *sys.argv[1:]])
