"""A model in several processes: start workers, or use the processes that torchrun has started, and load the shards."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NoReturn

import torch

from infer.backend import cpu
from infer.config import ModelConfig
from infer.loader.load import check_shard_memory
from infer.machine import resolve_device, use_threads
from infer.models.common import Decoder
from infer.models.sharding import check_world_size
from infer.nn.schemes import Scheme
from infer.parallel.collectives import distributed
from infer.parallel.group import ProcessGroup, ProcessLost
from infer.parallel.tensor_parallel import TensorParallelGroup, load_shard, run_worker

START_TIMEOUT = timedelta(minutes=5)  # for all processes to connect
READY = "ready "  # a key of the store, followed by a rank
NO_MORE_GROUPS = "over"  # in the store, instead of the settings of the next group: the driver has exited
COLLECTIVES = "INFER_COLLECTIVES"  # "gloo": through the hosts' memory, so that processes may share a GPU
_threads: list[int] = []  # torch's number of threads before each sharded model that is loaded
_group_ids = count()  # under torchrun


def load_sharded(
    name_or_path: str | Path,
    world_size: int,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    quantize: str | None = None,
    context: int | None = None,
) -> tuple[Decoder, ModelConfig]:
    """Like `load_model`, in `world_size` processes: this one is the driver, and it starts the workers.

    The model is the driver's shard, and runs on all ranks; `model.group.close()` ends the workers. Under torchrun,
    which has started all processes, only rank 0 returns: the others run as workers, and then exit.
    """
    config = ModelConfig.from_pretrained(str(name_or_path), context)
    check_world_size(config, world_size)
    if ":" in str(device):
        raise ValueError(f"each process uses a GPU of its own, starting from the first: {device} cannot be chosen")
    device = resolve_device(device)
    collectives = _choose_collectives(device, world_size)
    settings = {"name_or_path": str(name_or_path), "dtype": dtype, "quantize": quantize, "context": context}
    if torchrun_rank():
        run_torchrun_worker()
    schemes: set[Scheme] = set()
    if collectives == "gloo":
        schemes = check_shard_memory(name_or_path, dtype, device, quantize, world_size).schemes
    start = _start_workers if torchrun_rank() is None else _join_torchrun
    group = start(world_size, device, collectives)
    try:
        if device.type == "cpu" and cpu.kernels() is not None:  # compiled by one process, for all
            cpu.kernels().prepare(schemes, split=True, experts=config.num_experts > 0)
        group.send("load", settings, _share_threads(group))
        return load_shard(group, settings), config
    except BaseException:
        group.close()
        raise


def _choose_collectives(device: torch.device, world_size: int) -> str:
    if device.type != "cuda" or os.environ.get(COLLECTIVES) == "gloo":
        return "gloo"
    if torchrun_rank() is None and world_size > torch.cuda.device_count():
        raise ValueError(f"{world_size} processes need a GPU each, and this machine has {torch.cuda.device_count()}")
    return "nccl"


def _local_device(kind: str, local_rank: int, collectives: str) -> torch.device:
    """The device of a rank on its machine."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", local_rank % torch.cuda.device_count() if collectives == "gloo" else local_rank)
    torch.cuda.set_device(device)
    return device


def _share_threads(group: ProcessGroup) -> int | None:
    """Each rank's share of this process's threads; None on GPUs."""
    if group.device.type != "cpu":
        return None
    use_threads()
    _threads.append(torch.get_num_threads())
    group.on_close.callback(_restore_threads)
    threads = max(1, _threads[0] // int(os.environ.get("LOCAL_WORLD_SIZE", group.world_size)))
    use_threads(threads)
    return threads


def _restore_threads() -> None:
    """When the last sharded model is closed."""
    before = _threads.pop()
    if not _threads:
        torch.set_num_threads(before)


# Workers that the driver starts.


def _start_workers(world_size: int, device: torch.device, collectives: str) -> TensorParallelGroup:
    listening = socket.create_server(("127.0.0.1", 0))  # torch's own would listen on all networks
    port = listening.getsockname()[1]
    options = {"timeout": START_TIMEOUT, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    store = distributed.TCPStore("127.0.0.1", port, world_size, is_master=True, **options)
    arguments = [str(port), str(world_size), device.type, collectives]
    command = [sys.executable, "-P", "-m", "infer.parallel.launch", *arguments]  # -P: import nothing from this folder
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children: dict[int, Popen[bytes]] = {}
    try:
        for rank in range(1, world_size):
            # In a session of their own: Ctrl-C reaches the driver alone, which ends them. They exit when stdin closes.
            children[rank] = Popen(
                [*command, str(rank)], env=environment, stdin=PIPE, stdout=DEVNULL, start_new_session=True
            )
        _await_workers(children, store)
        own = _local_device(device.type, 0, collectives)
        group = TensorParallelGroup(store, 0, world_size, own, collectives=collectives, local=True)
    except BaseException:
        for child in children.values():
            child.kill()
            child.communicate()
        raise
    group.adopt(children)
    return group


def _await_workers(children: Mapping[int, Popen[bytes]], store: Any) -> None:
    """Until all are ready. Raises if one exits before."""
    until = time.monotonic() + START_TIMEOUT.total_seconds()
    while not store.check([f"{READY}{rank}" for rank in children]):
        for rank, child in children.items():
            if child.poll() is not None:
                raise ProcessLost(f"process {rank} of {len(children) + 1} has ended before it was ready")
        if time.monotonic() > until:
            raise ProcessLost(f"the other processes were not ready within {START_TIMEOUT}")
        time.sleep(0.01)


def _exit_with_parent(pipe: int) -> None:
    """Exit when the parent has, however it ended: stdin is a pipe from it."""
    while os.read(pipe, 1):
        pass
    os._exit(1)


def main(port: str, world_size: str, kind: str, collectives: str, rank: str) -> int:
    """The program of a worker that `_start_workers` has started."""
    threading.Thread(target=_exit_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        store = distributed.TCPStore("127.0.0.1", int(port), int(world_size), is_master=False, timeout=START_TIMEOUT)
        device = _local_device(kind, int(rank), collectives)
        store.set(f"{READY}{rank}", "")
        group = TensorParallelGroup(store, int(rank), int(world_size), device, collectives=collectives, local=True)
        run_worker(group)
        group.close()
    except ProcessLost:
        return 1  # the driver reports why, or is gone
    except Exception as error:
        print(f"process {rank} of {world_size} has failed: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


# Processes that torchrun starts, all with the same command: rank 0 runs it as the driver, the others are workers.


def torchrun_rank() -> int | None:
    """The rank of this process; None: torchrun has not started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


@cache
def _rendezvous() -> tuple[Any, int]:
    """The store that all ranks share, and the world size."""
    store, rank, world_size = next(distributed.rendezvous("env://", timeout=START_TIMEOUT))
    if rank == 0:
        atexit.unregister(end_torchrun_workers)
        atexit.register(end_torchrun_workers)
    return store, world_size


def _join_torchrun(world_size: int, device: torch.device, collectives: str) -> TensorParallelGroup:
    store, started = _rendezvous()
    if started != world_size:
        raise ValueError(f"torchrun has started {started} processes, but tensor_parallel is {world_size}")
    group_id = next(_group_ids)
    store.set(f"group {group_id}", f"{device.type} {collectives}")
    return _torchrun_group(group_id, device.type, collectives)


def end_torchrun_workers() -> None:
    with suppress(RuntimeError):  # they have exited
        _rendezvous()[0].set(f"group {next(_group_ids)}", NO_MORE_GROUPS)


def run_torchrun_worker() -> NoReturn:
    """Be a worker of each model that the driver shards, until the driver exits."""
    store, _ = _rendezvous()
    while True:
        group_id = next(_group_ids)
        while not store.check([f"group {group_id}"]):
            time.sleep(0.05)
        settings = store.get(f"group {group_id}").decode()
        if settings == NO_MORE_GROUPS:
            sys.exit(0)
        group = _torchrun_group(group_id, *settings.split())
        run_worker(group)
        group.close()


def _torchrun_group(group_id: int, kind: str, collectives: str) -> TensorParallelGroup:
    store, world_size = _rendezvous()
    rank = torchrun_rank() or 0
    device = _local_device(kind, int(os.environ.get("LOCAL_RANK", rank)), collectives)
    local = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    prefixed = distributed.PrefixStore(f"group {group_id}", store)
    return TensorParallelGroup(prefixed, rank, world_size, device, collectives=collectives, local=local)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
