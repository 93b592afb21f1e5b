"""The processes that run one model, and their communication: torch.distributed, or shared memory.

Rank 0 is the driver: it sends commands (`command`). The other ranks are workers, which receive and execute them
(`receive`). Within a pass all ranks all-gather what each has computed. There is no all-reduce: the order in which it
adds depends on sizes.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from subprocess import Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
from torch import Tensor

from infer.backend import cpu
from infer.parallel.collectives import Collectives, distributed, gloo, nccl

if TYPE_CHECKING:
    from infer.parallel.shared_memory import SharedMemory

FOREVER = timedelta(days=3650)  # a worker waits for a command
PASS_TIMEOUT = timedelta(minutes=10)  # a rank waits for the others within a pass
EXIT_TIMEOUT = timedelta(seconds=5)  # a worker exits after the command to
EXIT_WAIT_S = 3.0  # for a failed process to exit, so that it can be named
HEARTBEAT_S = 1.0  # between two heartbeats of a worker
MISSED_HEARTBEATS = 10  # in a row: the worker is stopped, or its machine cannot be reached
MESSAGE_BYTES, OBJECT_BYTES = 1 << 14, 1 << 12  # of a broadcast, and of a gathered object


class ProcessLost(RuntimeError):
    """Another process of the group has exited, or this one has left the group: the model cannot run any more."""

    says_all = True  # a user needs no more than its text


class ProcessGroup:
    """This process in the group that runs one model."""

    def __init__(
        self, store: Any, rank: int, world_size: int, device: torch.device, *, collectives: str, local: bool
    ) -> None:
        """store: torch's, reachable from all ranks. collectives: "nccl" or "gloo". local: all are on this machine."""
        self.rank, self.world_size, self.device, self.collectives = rank, world_size, device, collectives
        self.failure: BaseException | None = None
        self.on_close = ExitStack()
        self.children: dict[int, Popen[bytes]] = {}  # by rank, if this process has started the workers
        self._turn = threading.RLock()  # held by the thread that sends a command, until all ranks have executed it
        self._idle = True  # whether the workers wait for a command
        self._failing = threading.Lock()
        self._deferred: deque[tuple[Any, ...]] = deque()
        self._watchers: list[Callable[[BaseException], None]] = []
        self._closed, self._process = False, os.getpid()
        self._heartbeats: threading.Thread | None = None
        self._control: Any = None  # carries commands
        self._data: Any = None  # carries activations
        atexit.register(_close, ref(self))
        self._control = gloo(distributed.PrefixStore("control", store), rank, world_size, FOREVER, local=local)
        data = distributed.PrefixStore("data", store)
        if collectives == "nccl":
            self._data = Collectives(nccl(data, rank, world_size, PASS_TIMEOUT))
        elif device.type == "cpu" and local and cpu.kernels() is not None:
            self._data = self._share_memory(data)
        else:
            self._data = Collectives(gloo(data, rank, world_size, PASS_TIMEOUT, local=local), on_host=True)
        self._ended = threading.Event()
        finalize(self, self._ended.set)
        beats = distributed.PrefixStore("heartbeats", store).clone()  # a connection of its own: others may block
        arguments = (ref(self), beats, world_size) if self.is_driver else (beats, rank)
        beat = _check_heartbeats if self.is_driver else _send_heartbeats
        self._heartbeats = threading.Thread(target=beat, args=(*arguments, self._ended), daemon=True)
        self._heartbeats.start()

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    @property
    def sharing(self) -> int:
        """How many processes allocate from the same memory as this one."""
        return self.world_size if self.device.type == "cpu" or self.collectives == "gloo" else 1

    @property
    def capturable(self) -> bool:
        return self.collectives == "nccl"

    # Collectives within a pass.

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [..., sizes[rank]] of each rank -> [..., sum(sizes)]"""
        with self._naming_lost_rank():
            gathered: Tensor = self._data.all_gather(x.flatten(0, -2), sizes)
        return gathered.view(*x.shape[:-1], gathered.shape[1])

    def combine(self, x: Tensor, own: Tensor) -> Tensor:
        """Each row of x [T, C] from the one rank where own [T] is true."""
        own_bytes = torch.where(own[:, None], x, 0).contiguous().view(torch.uint8)
        gathered = self.all_gather(own_bytes, [own_bytes.shape[1]] * self.world_size).view(len(x), self.world_size, -1)
        return gathered.sum(1, dtype=torch.uint8).view(x.dtype)  # integers, all but one of which are 0

    def synchronize(self) -> None:
        """Wait for the device: what it computed while a process was lost is invalid."""
        if self.collectives == "nccl":
            torch.cuda.synchronize(self.device)
            if self.failure is not None:
                raise self.failure

    # Commands of the driver, and replies.

    @contextmanager
    def command(self, *message: Any) -> Iterator[None]:
        """Send a command; within, this rank executes its own part of it. One thread at a time.

        Ctrl-C waits until the command has been executed, because the workers are in the middle of it. A second Ctrl-C
        ends them.
        """
        with self._turn, self._uninterrupted():
            self.send(*message)
            yield
            self._idle = True

    def send(self, *message: Any) -> None:
        """Send a command to the workers, after all that `send_later` has collected."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise ProcessLost("the other processes of this model have ended")
        self._idle = False
        deferred = [self._deferred.popleft() for _ in range(len(self._deferred))]
        self._send([*deferred, message])

    def send_later(self, *message: Any) -> None:
        """Send a command together with the next one. From any thread."""
        self._deferred.append(message)

    def receive(self) -> list[tuple[Any, ...]]:
        """Wait for the next commands of the driver."""
        buffer = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._broadcast(buffer)
        data = buffer.numpy().tobytes()
        size, data = int.from_bytes(data[:8], "little"), data[8:]
        if size > len(data):
            rest = torch.empty(size - len(data), dtype=torch.uint8)
            self._broadcast(rest)
            data += rest.numpy().tobytes()
        return pickle.loads(data[:size])  # type: ignore[no-any-return]

    def gather_objects(self, own: Any = None, error: BaseException | None = None) -> list[Any]:
        """The object of each rank. On the driver, raises if a rank passes an error."""
        reason = None if error is None else str(error).encode()[: OBJECT_BYTES // 2].decode(errors="ignore")
        data = pickle.dumps((own, reason))
        buffer = torch.zeros(OBJECT_BYTES, dtype=torch.uint8)
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffers = [torch.empty_like(buffer) for _ in range(self.world_size)]
        with self._naming_lost_rank():
            self._control.allgather([buffers], [buffer]).wait()
        self._idle = True
        gathered = [pickle.loads(each.numpy().tobytes()) for each in buffers]
        if self.is_driver and error is not None:
            raise error
        for rank, (_, reason) in enumerate(gathered):
            if self.is_driver and reason is not None:
                raise ValueError(f"process {rank} of {self.world_size}: {reason}")
        return [each for each, _ in gathered]

    # Failure and shutdown.

    def adopt(self, children: dict[int, Popen[bytes]]) -> None:
        """Watch the worker processes that were started for this group, and end them with it."""
        self.children = children
        finalize(self, _end, list(children.values()), self._process)
        for rank, child in children.items():
            threading.Thread(target=_watch, args=(ref(self), rank, child), daemon=True).start()

    def watch(self, watcher: Callable[[BaseException], None]) -> Callable[[], None]:
        """Call a function, from another thread, when a process is lost. Returns a function that stops this."""
        self._watchers.append(watcher)

        def end() -> None:
            with suppress(ValueError):
                self._watchers.remove(watcher)

        return end

    def fail(self, reason: str) -> BaseException:
        """Mark the group as failed, for the first reason given: waits are aborted, and no further pass runs."""
        with self._failing:
            if self.failure is not None:
                return self.failure
            self.failure = ProcessLost(reason)
        for each in (self._data, self._control):
            with suppress(AttributeError, RuntimeError):
                each.abort()
        _end(list(self.children.values()), self._process)
        if not self._closed:
            for watcher in list(self._watchers):
                watcher(self.failure)
        return self.failure

    def close(self) -> None:
        """Let the workers exit; kill a worker that is in the middle of a command."""
        if self._closed or os.getpid() != self._process:  # a forked process has no workers
            return
        self._closed, timeout = True, 0.0
        if self._heartbeats is not None:
            self._ended.set()
            if self._heartbeats is not threading.current_thread():
                self._heartbeats.join()  # at interpreter exit, a thread in torch's code would abort the process
        can_receive = self._control is not None and self.failure is None and self._idle
        if self.is_driver and can_receive and self._turn.acquire(timeout=EXIT_TIMEOUT.total_seconds()):
            try:
                with suppress(ProcessLost):
                    self._send([("exit",)], EXIT_TIMEOUT)
                    timeout = EXIT_TIMEOUT.total_seconds()
            finally:
                self._turn.release()
        _end(list(self.children.values()), self._process, timeout)
        self.on_close.close()
        self._control = self._data = None  # at interpreter exit, their threads can still be joined here

    def __del__(self) -> None:
        self.close()

    def _send(self, messages: list[tuple[Any, ...]], timeout: timedelta | None = None) -> None:
        data = pickle.dumps(messages)
        data = len(data).to_bytes(8, "little") + data
        first, rest = data[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"), data[MESSAGE_BYTES:]
        for part in (first, rest) if rest else (first,):
            self._broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), timeout)

    def _broadcast(self, buffer: Tensor, timeout: timedelta | None = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if timeout is not None:
            options.timeout = timeout
        with self._naming_lost_rank():
            self._control.broadcast([buffer], options).wait()

    def _share_memory(self, store: Any) -> SharedMemory:
        from infer.parallel.shared_memory import SharedMemory, make_file  # numba

        if self.is_driver:
            store.set("file", make_file(self.world_size))
        path = store.get("file").decode()
        memory, error = None, None
        try:
            memory = SharedMemory(path, self.rank, self.world_size, PASS_TIMEOUT)
        except OSError as reason:
            error = reason
        try:
            self.gather_objects(error=error)
        finally:
            if self.is_driver:
                os.unlink(path)
        if memory is None:
            raise ProcessLost(f"memory cannot be shared: {error}")
        return memory

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Defer Ctrl-C to the end of the block."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if main else None
        if not callable(before):
            yield
            return
        interrupts: list[Any] = []

        def defer(*given: Any) -> None:
            interrupts.append(given)
            if len(interrupts) > 1:
                self.fail("interrupted")

        signal.signal(signal.SIGINT, defer)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            if interrupts:
                before(*interrupts[0])

    @contextmanager
    def _naming_lost_rank(self) -> Iterator[None]:
        """Around a collective: it fails because a process was lost."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> BaseException:
        until = time.monotonic() + EXIT_WAIT_S
        while self.children and self.failure is None and time.monotonic() < until:
            for rank, child in self.children.items():
                if child.poll() is not None:
                    return self.fail(_exit_message(rank, self.world_size, child.returncode))
            time.sleep(0.05)
        reason = str(error).partition("\n")[0]
        return self.fail(f"another process of {self.world_size} has ended, or cannot be reached: {reason:.200}")


def _close(group_of: ref[ProcessGroup]) -> None:
    if (group := group_of()) is not None:
        group.close()


def _watch(group_of: ref[ProcessGroup], rank: int, child: Popen[bytes]) -> None:
    """Wait until a worker exits: unless the group was closed, it has failed."""
    status = child.wait()
    group = group_of()
    if group is not None and not group._closed:
        group.fail(_exit_message(rank, group.world_size, status))


def _send_heartbeats(store: Any, rank: int, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the driver has exited
        while not ended.wait(HEARTBEAT_S):
            store.add(str(rank), 1)


def _check_heartbeats(group_of: ref[ProcessGroup], store: Any, world_size: int, ended: threading.Event) -> None:
    """Fail the group if a worker has stopped: a pass would wait for it. It counts checks, for this process may stop."""
    counts, missed = [0] * world_size, [0] * world_size
    while not ended.wait(HEARTBEAT_S):
        for rank in range(1, world_size):
            before, counts[rank] = counts[rank], store.add(str(rank), 0)
            missed[rank] = missed[rank] + 1 if counts[rank] == before else 0
            if missed[rank] >= MISSED_HEARTBEATS and (group := group_of()) is not None:
                seconds = MISSED_HEARTBEATS * HEARTBEAT_S
                group.fail(f"process {rank} of {world_size} has not answered for {seconds:.0f} seconds")
                return


def _exit_message(rank: int, world_size: int, status: int) -> str:
    how = f"was ended by signal {-status}" if status < 0 else f"has exited with status {status}"
    return f"process {rank} of {world_size} {how}: the model cannot run any more"


def _end(children: Sequence[Popen[bytes]], parent: int, timeout: float = 0.0) -> None:
    """Wait `timeout` seconds for processes to exit, then kill them."""
    if os.getpid() != parent:
        return
    until = time.monotonic() + timeout
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()
