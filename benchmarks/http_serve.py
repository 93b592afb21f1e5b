"""`infer serve`, with one thing more: SIGUSR1 has it say on stderr how many tasks its event loop holds."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any


def tell_tasks(*_: Any) -> None:
    print(f"tasks: {len(asyncio.all_tasks())}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from infer.cli import main

    signal.signal(signal.SIGUSR1, tell_tasks)
    main(["serve", *sys.argv[1:]])
