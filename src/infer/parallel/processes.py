"""A model in several processes: start them, or lead those that torchrun has started, and load a part in each."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import torch

from infer.backend import cpu
from infer.config import ModelConfig
from infer.loader.load import check_split_memory
from infer.machine import resolve_device, use_threads
from infer.models.common import Decoder
from infer.models.split import check_split
from infer.parallel import follower, torchrun
from infer.parallel.collectives import distributed, own_device
from infer.parallel.group import ProcessGroup, ProcessLost

BITS_KEPT = {"int4": {4, 8}, "int8": {8}}  # by `quantize`, that weights may have then
START = timedelta(minutes=5)  # for all processes to have come
READY = "ready "  # a key of the store, behind which comes a rank
_threads: list[int] = []  # that torch had before each model that is split now
COLLECTIVES = "INFER_COLLECTIVES"  # "gloo": through the hosts' memory, so that processes may share a GPU


def load_split(
    name_or_path: str | Path,
    count: int,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    quantize: str | None = None,
) -> tuple[Decoder, ModelConfig]:
    """As `load_model`, in `count` processes: this one, which leads, and others that it starts.

    The model is this process's part, and runs in all of them; `model.group.close()` ends the others. Under torchrun,
    which has started all of them, only the first returns: the others follow it, and then end.
    """
    config = ModelConfig.from_pretrained(str(name_or_path))
    check_split(config, count)
    if ":" in str(device):
        raise ValueError(f"each process takes a GPU of its own, from the first on: {device} cannot be chosen")
    device = resolve_device(device)
    collectives = _collectives(device, count)
    settings = {"name_or_path": str(name_or_path), "dtype": dtype, "quantize": quantize}
    if torchrun.rank():
        torchrun.follow()
    if collectives == "gloo":
        check_split_memory(name_or_path, dtype, device, quantize, count)
    if torchrun.rank() is not None:
        group = torchrun.lead(count, device, collectives)
    else:
        group = _start(count, device, collectives)
    try:
        if device.type == "cpu" and cpu.kernels() is not None:  # by one process, for all
            cpu.kernels().prepare(BITS_KEPT.get(quantize or "", set()), split=True)
        group.tell("load", settings, _share_threads(group))
        return follower.load_part(group, settings), config
    except BaseException:
        group.close()
        raise


def _collectives(device: torch.device, count: int) -> str:
    """How processes exchange what they compute."""
    if device.type != "cuda" or os.environ.get(COLLECTIVES) == "gloo":
        return "gloo"
    if torchrun.rank() is None and count > torch.cuda.device_count():
        raise ValueError(f"{count} processes need a GPU each, and this machine has {torch.cuda.device_count()}")
    return "nccl"


def _start(count: int, device: torch.device, collectives: str) -> ProcessGroup:
    listening = socket.create_server(("127.0.0.1", 0))  # torch's own would be open to all networks
    port = listening.getsockname()[1]
    store = distributed.TCPStore(
        "127.0.0.1",
        port,
        count,
        is_master=True,
        wait_for_workers=False,
        timeout=START,
        master_listen_fd=listening.detach(),
    )
    # -P: not what happens to lie in the current folder.
    command = [sys.executable, "-P", "-m", "infer.parallel.processes", str(port), str(count), device.type, collectives]
    where = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children: dict[int, Popen[bytes]] = {}
    try:
        for rank in range(1, count):
            # In a session of their own: Ctrl-C is for this process, which ends them. They end when their stdin does.
            children[rank] = Popen([*command, str(rank)], env=where, stdin=PIPE, stdout=DEVNULL, start_new_session=True)
        _await(children, store)
        own = own_device(device.type, 0, collectives)
        group = ProcessGroup(store, 0, count, own, collectives=collectives, local=True)
    except BaseException:
        for child in children.values():
            child.kill()
            child.communicate()
        raise
    group.adopt(children)
    return group


def _await(children: Mapping[int, Popen[bytes]], store: Any) -> None:
    """Until all processes have come, or one has ended without."""
    until = time.monotonic() + START.total_seconds()
    while not store.check([f"{READY}{rank}" for rank in children]):
        for rank, child in children.items():
            if child.poll() is not None:
                raise ProcessLost(f"process {rank} of {len(children) + 1} has ended before it was ready")
        if time.monotonic() > until:
            raise ProcessLost(f"the other processes have not come within {START}")
        time.sleep(0.01)


def _share_threads(group: ProcessGroup) -> int | None:
    """Each process computes on its share of the threads that this one would; None: on a device of its own."""
    if group.device.type != "cpu":
        return None
    use_threads()
    before = torch.get_num_threads()
    _threads.append(before)
    group.at_end.callback(_give_threads_back)
    threads = max(1, _threads[0] // int(os.environ.get("LOCAL_WORLD_SIZE", group.count)))
    use_threads(threads)
    return threads


def _give_threads_back() -> None:
    """When no model is left that is split."""
    before = _threads.pop()
    if not _threads:
        torch.set_num_threads(before)


def _end_with(pipe: int) -> None:
    """End this process when its parent has, in whatever way."""
    while os.read(pipe, 1):
        pass
    os._exit(1)


def main(port: str, count: str, kind: str, collectives: str, rank: str) -> int:
    """Of a process that was started to follow."""
    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        store = distributed.TCPStore("127.0.0.1", int(port), int(count), is_master=False, timeout=START)
        device = own_device(kind, int(rank), collectives)
        store.set(f"{READY}{rank}", "")
        group = ProcessGroup(store, int(rank), int(count), device, collectives=collectives, local=True)
        follower.follow(group)
        group.close()
    except ProcessLost:
        return 1  # the leader says why, or is gone
    except Exception as error:
        print(f"process {rank} of {count} has failed: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
