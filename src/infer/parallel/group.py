"""The processes that run one model, and how they talk: through torch.distributed, or memory that they share.

Rank 0 leads: it says what is done next (`doing`), and the others follow (`hear`). While a pass runs, all gather what
each has computed. Nothing is summed by a collective: in which order that adds depends on sizes.
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
    from infer.parallel.shared import SharedMemory

FOREVER = timedelta(days=3650)  # that a follower waits for something to do
PASS = timedelta(minutes=10)  # that a process waits for the others within a pass
END = timedelta(seconds=5)  # for a process to end once it is told to
EXIT_WAIT_S = 3.0  # for a process that has failed to end, so that it can be named
MESSAGE, ANSWER = 1 << 14, 1 << 12  # bytes of what is told at once, and of an answer


class ProcessLost(RuntimeError):
    """Another process of the group has ended, or this one has left it: the model cannot be run any more."""

    says_all = True  # a user needs no more than its text


class ProcessGroup:
    """This process among those that run one model: an `nn.split.Group`."""

    def __init__(
        self, store: Any, rank: int, count: int, device: torch.device, *, collectives: str, local: bool
    ) -> None:
        """store: torch's, which all can reach. collectives: "nccl" or "gloo". local: all are on this machine."""
        self.rank, self.count, self.device, self.collectives = rank, count, device, collectives
        self.failure: BaseException | None = None
        self.at_end = ExitStack()  # what is undone when it is closed
        self.children: dict[int, Popen[bytes]] = {}  # by rank, where this process has started the others
        self._turn = threading.RLock()  # of a thread that says something, until all have done it
        self._in_step = True  # whether the others wait to be told something
        self._failing = threading.Lock()
        self._later: deque[tuple[Any, ...]] = deque()
        self._watchers: list[Callable[[BaseException], None]] = []
        self._ended, self._process = False, os.getpid()
        self._talk: Any = None
        self._data: Any = None  # through which passes exchange what they compute
        atexit.register(_close, ref(self))
        self._talk = gloo(distributed.PrefixStore("talk", store), rank, count, FOREVER, local=local)
        data = distributed.PrefixStore("data", store)
        if collectives == "nccl":
            self._data = Collectives(nccl(data, rank, count, PASS))
        elif device.type == "cpu" and local and cpu.kernels() is not None:
            self._data = self._share_memory(data)
        else:
            self._data = Collectives(gloo(data, rank, count, PASS, local=local), on_host=True)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def sharing(self) -> int:
        """How many processes take memory where this one does."""
        return self.count if self.device.type == "cpu" or self.collectives == "gloo" else 1

    @property
    def capturable(self) -> bool:
        return self.collectives == "nccl"

    # What a pass needs.

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [..., sizes[rank]] of each process -> [..., sum(sizes)], in the order of ranks."""
        with self._naming_who_is_lost():
            joined: Tensor = self._data.gather(x.reshape(-1, x.shape[-1]), sizes)
        return joined.view(*x.shape[:-1], joined.shape[1])

    def combine(self, x: Tensor, own: Tensor) -> Tensor:
        """Of each row of x [T, C], what the one process has where own [T] is true."""
        own_bytes = torch.where(own[:, None], x, 0).contiguous().view(torch.uint8)
        everything = self.gather(own_bytes, [own_bytes.shape[1]] * self.count).view(len(x), self.count, -1)
        return everything.sum(1, dtype=torch.uint8).view(x.dtype)  # whole numbers, all but one of which are 0

    def finish(self) -> None:
        """Wait for what a device has been given to do: what it computed while a process was lost is worth nothing."""
        if self.collectives == "nccl":
            torch.cuda.synchronize(self.device)
            if self.failure is not None:
                raise self.failure

    def led(self, model: Any, backend: Any) -> Any:
        from infer.parallel.lead import LedBackend

        return LedBackend(self, model, backend) if self.leads else backend

    # What the leader says, and what it is answered.

    @contextmanager
    def doing(self, *message: Any) -> Iterator[None]:
        """Have the others do something, and this process its own part of it within. One thread at a time.

        Ctrl-C waits for the end of it: the others are in the middle. Pressed again, it ends them.
        """
        with self._turn, self._uninterrupted():
            self.tell(*message)
            yield
            self._in_step = True

    def tell(self, *message: Any) -> None:
        """Say what is to be done next, behind what `later` was given."""
        if self.failure is not None:
            raise self.failure
        if self._ended:
            raise ProcessLost("the other processes of this model have ended")
        self._in_step = False
        later = [self._later.popleft() for _ in range(len(self._later))]
        self._say([*later, message])

    def later(self, *message: Any) -> None:
        """Have something done before what is told next. From any thread."""
        self._later.append(message)

    def hear(self) -> list[tuple[Any, ...]]:
        """What the leader says, however long that takes."""
        buffer = torch.empty(MESSAGE, dtype=torch.uint8)
        self._broadcast(buffer)
        said = buffer.numpy().tobytes()
        size, said = int.from_bytes(said[:8], "little"), said[8:]
        if size > len(said):
            rest = torch.empty(size - len(said), dtype=torch.uint8)
            self._broadcast(rest)
            said += rest.numpy().tobytes()
        return pickle.loads(said[:size])  # type: ignore[no-any-return]

    def agree(self, own: Any = None, error: BaseException | None = None) -> list[Any]:
        """What each process has to say; for the leader an error, where one has."""
        problem = None if error is None else str(error).encode()[: ANSWER // 2].decode(errors="ignore")
        said = pickle.dumps((own, problem))
        mine = torch.zeros(ANSWER, dtype=torch.uint8)
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        pieces = [torch.empty_like(mine) for _ in range(self.count)]
        with self._naming_who_is_lost():
            self._talk.allgather([pieces], [mine]).wait()
        self._in_step = True
        found = [pickle.loads(piece.numpy().tobytes()) for piece in pieces]
        if self.leads and error is not None:
            raise error
        for rank, (_, problem) in enumerate(found):
            if self.leads and problem is not None:
                raise ValueError(f"process {rank} of {self.count}: {problem}")
        return [answer for answer, _ in found]

    # Its end.

    def adopt(self, children: dict[int, Popen[bytes]]) -> None:
        """Watch over processes that were started for this group, and end them with it."""
        self.children = children
        finalize(self, _end, list(children.values()), self._process)
        for rank, child in children.items():
            threading.Thread(target=_watch, args=(ref(self), rank, child), daemon=True).start()

    def watch(self, watcher: Callable[[BaseException], None]) -> Callable[[], None]:
        """Have a function called when a process is lost, from a thread of its own; returns what ends that."""
        self._watchers.append(watcher)

        def end() -> None:
            with suppress(ValueError):
                self._watchers.remove(watcher)

        return end

    def fail(self, reason: str) -> BaseException:
        """The first reason is what counts: no pass can be run any more, and who waits for one stops waiting."""
        with self._failing:
            if self.failure is not None:
                return self.failure
            self.failure = ProcessLost(reason)
        for each in (self._data, self._talk):
            with suppress(AttributeError, RuntimeError):
                each.abort()
        _end(list(self.children.values()), self._process)
        if not self._ended:
            for watcher in list(self._watchers):
                watcher(self.failure)
        return self.failure

    def close(self) -> None:
        """Let the others go; end those that are in the middle of something."""
        if self._ended or os.getpid() != self._process:  # a forked process has none of this
            return
        self._ended, patience = True, 0.0
        can_hear = self._talk is not None and self.failure is None and self._in_step
        if self.leads and can_hear and self._turn.acquire(timeout=END.total_seconds()):
            try:
                with suppress(ProcessLost):
                    self._say([("end",)], END)
                    patience = END.total_seconds()
            finally:
                self._turn.release()
        _end(list(self.children.values()), self._process, patience)
        self.at_end.close()
        self._talk = self._data = None  # while there are threads that their own can be joined with

    def __del__(self) -> None:
        self.close()

    def _say(self, messages: list[tuple[Any, ...]], patience: timedelta | None = None) -> None:
        said = pickle.dumps(messages)
        buffer = torch.zeros(MESSAGE, dtype=torch.uint8)
        buffer[:8] = torch.frombuffer(bytearray(len(said).to_bytes(8, "little")), dtype=torch.uint8)
        first = said[: MESSAGE - 8]
        buffer[8 : 8 + len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        self._broadcast(buffer, patience)
        if rest := said[len(first) :]:
            self._broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), patience)

    def _broadcast(self, buffer: Tensor, patience: timedelta | None = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if patience is not None:
            options.timeout = patience
        with self._naming_who_is_lost():
            self._talk.broadcast([buffer], options).wait()

    def _share_memory(self, store: Any) -> SharedMemory:
        from infer.parallel.shared import SharedMemory, make_file

        if self.leads:
            store.set("file", make_file(self.count))
        path = store.get("file").decode()
        memory, error = None, None
        try:
            memory = SharedMemory(path, self.rank, self.count, PASS)
        except OSError as problem:
            error = problem
        try:
            self.agree(error=error)
        finally:
            if self.leads:
                os.unlink(path)
        if memory is None:
            raise ProcessLost(f"memory cannot be shared: {error}")
        return memory

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Let Ctrl-C wait."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if main else None
        if not callable(before):
            yield
            return
        asked: list[Any] = []

        def ask(*given: Any) -> None:
            asked.append(given)
            if len(asked) > 1:
                self.fail("interrupted")

        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            if asked:
                before(*asked[0])

    @contextmanager
    def _naming_who_is_lost(self) -> Iterator[None]:
        """Around what all processes do together: a failure there is that of one of them."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> BaseException:
        until = time.monotonic() + EXIT_WAIT_S
        while self.children and self.failure is None and time.monotonic() < until:
            for rank, child in self.children.items():
                if child.poll() is not None:
                    return self.fail(_exit_message(rank, self.count, child.returncode))
            time.sleep(0.05)
        reason = str(error).partition("\n")[0]
        return self.fail(f"another process of {self.count} has ended, or cannot be reached: {reason:.200}")


def _close(group_of: ref[ProcessGroup]) -> None:
    if (group := group_of()) is not None:
        group.close()


def _watch(group_of: ref[ProcessGroup], rank: int, child: Popen[bytes]) -> None:
    """Until a process ends: if nobody has let it go, the group has failed."""
    status = child.wait()
    group = group_of()
    if group is not None and not group._ended:
        group.fail(_exit_message(rank, group.count, status))


def _exit_message(rank: int, count: int, status: int) -> str:
    how = f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"
    return f"process {rank} of {count} {how}: the model cannot be run any more"


def _end(children: Sequence[Popen[bytes]], parent: int, patience: float = 0.0) -> None:
    """End processes, once those that were told to have had so many seconds for it."""
    if os.getpid() != parent:
        return
    until = time.monotonic() + patience
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()
