"""Processes that torchrun has started, all with the same command: the first runs it, the others follow that one."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, NoReturn

import torch

from infer.parallel import follower
from infer.parallel.collectives import distributed, own_device
from infer.parallel.group import ProcessGroup

START = timedelta(minutes=5)  # for all processes to have come
OVER = "over"  # what the first one says at its end, instead of what the next group is
_numbers = count()  # of groups


def rank() -> int | None:
    """Of this process; None: torchrun has not started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


@cache
def _meet() -> tuple[Any, int]:
    """The store that all can reach, and how many there are."""
    store, own_rank, started = next(distributed.rendezvous("env://", timeout=START))
    if own_rank == 0:
        atexit.unregister(say_over)
        atexit.register(say_over)
    return store, started


def lead(processes: int, device: torch.device, collectives: str) -> ProcessGroup:
    store, started = _meet()
    if started != processes:
        raise ValueError(f"torchrun has started {started} processes, but {processes} were asked for")
    number = next(_numbers)
    store.set(f"group {number}", f"{device.type} {collectives}")
    return _group(number, device.type, collectives)


def say_over() -> None:
    with suppress(RuntimeError):  # they have ended
        _meet()[0].set(f"group {next(_numbers)}", OVER)


def follow() -> NoReturn:
    """Follow each model that the first process splits, until that one ends."""
    store, _ = _meet()
    while True:
        number = next(_numbers)
        while not store.check([f"group {number}"]):
            time.sleep(0.05)
        said = store.get(f"group {number}").decode()
        if said == OVER:
            sys.exit(0)
        group = _group(number, *said.split())
        follower.follow(group)
        group.close()


def _group(number: int, kind: str, collectives: str) -> ProcessGroup:
    store, started = _meet()
    own_rank = rank() or 0
    device = own_device(kind, int(os.environ.get("LOCAL_RANK", own_rank)), collectives)
    local = os.environ.get("LOCAL_WORLD_SIZE") == str(started)
    named = distributed.PrefixStore(f"group {number}", store)
    return ProcessGroup(named, own_rank, started, device, collectives=collectives, local=local)
