"""The real oneCCL as the engine between machines."""

from __future__ import annotations

import ctypes
import queue
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cputrain.distributed import failures, native_calls
from cputrain.distributed.engines import Engine, Pace, Waiter, Watch, all_can, oneccl_library, take_apart
from cputrain.distributed.engines.gloo import GlooEngine
from cputrain.distributed.native_calls import array_of
from cputrain.distributed.transport import Tensors
from cputrain.distributed.work import move_to_communication_cpus
from cputrain.settings import ATL_TRANSPORT, value_of

# oneCCL's numbers.
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int16: 2,
    torch.int32: 4,
    torch.int64: 6,
    torch.float16: 8,
    torch.float32: 9,
    torch.float64: 10,
    torch.bfloat16: 11,
}
_SUM = 0
_GRACE = 5.0
# Nanoseconds at full speed before anything else is looked at.
_STRETCH = 500_000


class OneCclEngine(Engine):
    """Collectives are oneCCL's; messages are gloo's, because oneCCL's have no tags and can't come from any rank."""

    name = "oneccl"

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, timeout: timedelta, watch: Watch) -> None:
        self._size, self._waiter = size, Waiter(watch)
        self._messages = GlooEngine(dist.PrefixStore("messages", store), rank, size, address, timeout, watch)
        self._thread = _meet(store, rank, size, address, timeout)
        self._group = self._join(store, rank, timeout)

    def _join(self, store: dist.Store, rank: int, timeout: timedelta) -> int:
        address = ctypes.create_string_buffer(oneccl_library.ADDRESS_BYTES)
        if rank > 0:
            store.wait(["address"], timeout)
            address.raw = bytes.fromhex(store.get("address").decode())
        seconds = timeout.total_seconds()
        group = self._thread.call(seconds, "meet", address, int(rank == 0))
        if rank == 0:
            store.set("address", address.raw.hex())
        self._thread.call(seconds, "join", group, self._size, rank)
        return group

    def all_reduce(self, tensor: Tensor, reduction: int, timeout: float) -> bool:
        """Sums only: oneCCL's maximum forgets NaN. 16-bit floats only of two: of more it rounds every partial sum."""
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        number = _DTYPES.get(tensor.dtype)
        if reduction != native_calls.SUM or number is None or (half and self._size > 2):
            return False
        if tensor.numel():
            self._run(tensor.nbytes, timeout, tensor, "all_reduce", tensor.data_ptr(), tensor.numel(), number, _SUM)
        return True

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> None:
        sent, received = [t.numel() for t in inputs], [t.numel() for t in outputs]
        source, target = torch.cat([*inputs, _END]), torch.empty(sum(received) + 1, dtype=torch.uint8)
        counts = array_of(ctypes.c_int64, sent), array_of(ctypes.c_int64, received)
        where = source.data_ptr(), counts[0], target.data_ptr(), counts[1], self._size
        self._run(sum(sent) + sum(received), timeout, (source, target, counts), "all_to_all", *where)
        take_apart(target[:-1], outputs)

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> None:
        received = [output.numel() for output in outputs]
        if not sum(received):
            return
        target, counts = torch.empty(sum(received), dtype=torch.uint8), array_of(ctypes.c_int64, received)
        where = tensor.data_ptr(), tensor.numel(), target.data_ptr(), counts, self._size
        self._run(sum(received), timeout, (tensor, target, counts), "all_gather", *where)
        take_apart(target, outputs)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        if tensor.numel():
            self._run(tensor.numel(), timeout, tensor, "broadcast", tensor.data_ptr(), tensor.numel(), root)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        self._messages.send(tensor, peer, tag, timeout)

    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        return self._messages.receive(tensor, peer, tag, timeout)

    def abort(self) -> None:
        self._waiter.aborted = True
        self._messages.abort()

    def close(self, broken: bool) -> None:
        """Leaving waits for the others in some of oneCCL's transports: not longer than they need if they end, too.

        Under mpirun it waits until they come: mpirun kills them if this rank ends before it has left MPI.
        """
        self._messages.close(broken)
        is_sound = not broken and not self._waiter.pending
        seconds = None if value_of(ATL_TRANSPORT) == "mpi" else _GRACE
        if is_sound and self._thread.ask(seconds, "leave", self._group).finished.is_set():
            return
        _abandoned.append(self._waiter)
        self._thread.abandon()

    def _run(self, size: int, timeout: float, kept: Any, name: str, *arguments: Any) -> None:
        started = self._thread.start(size, name, self._group, *arguments)
        self._waiter.sleep(started.finished, timeout, (started, kept))
        if started.error:
            raise failures.PeerDied(f"oneCCL failed between the machines: {started.error}")


_END = torch.zeros(1, dtype=torch.uint8)  # an empty tensor has no address
# What oneCCL may still write to, of groups that failed.
_abandoned: list[Any] = []


class _Started:
    """A collective that the thread was given."""

    def __init__(self, size: int, name: str, arguments: tuple[Any, ...]) -> None:
        self.size, self.name, self.arguments = size, name, arguments
        self.finished, self.answer, self.error = threading.Event(), 0, ""


class _EngineThread:
    """The one thread of this process that calls oneCCL: it starts what it is given, and asks until it is done."""

    _only: _EngineThread | None = None

    @classmethod
    def of_this_process(cls, address: str) -> _EngineThread:
        if cls._only is None:
            cls._only = cls(address)
        if cls._only.is_stuck():
            raise ValueError("it still waits for a rank of a group that failed: start the processes anew.")
        return cls._only

    def __init__(self, address: str) -> None:
        self._queue: queue.SimpleQueue[_Started] = queue.SimpleQueue()
        self._running: list[_Started] = []
        self._address, self._ready, self._failure = address, threading.Event(), ""
        self._last_call: _Started | None = None
        threading.Thread(target=self._serve, name="cputrain-oneccl", daemon=True).start()
        self._ready.wait()
        if self._failure:
            raise ValueError(self._failure)

    def call(self, seconds: float, name: str, *arguments: Any) -> int:
        """What ends when all ranks have come: its answer."""
        asked = self.ask(seconds, name, *arguments)
        if not asked.finished.is_set():
            raise ValueError(f"oneCCL made no group within {seconds:g} s: a rank is missing, or oneCCL is stuck.")
        if asked.error:
            raise ValueError(f"oneCCL failed: {asked.error}")
        return asked.answer

    def ask(self, seconds: float | None, name: str, *arguments: Any) -> _Started:
        """For what waits for other ranks within oneCCL: if it doesn't end, nothing else can be done there."""
        self._last_call = asked = self.start(0, name, *arguments)
        asked.finished.wait(seconds)
        return asked

    def is_stuck(self) -> bool:
        return self._last_call is not None and not self._last_call.finished.is_set()

    def start(self, size: int, name: str, *arguments: Any) -> _Started:
        started = _Started(size, name, arguments)
        self._queue.put(started)
        return started

    def abandon(self) -> None:
        """Called by any thread: the one of its own may wait for ever."""
        self._library.abandon()

    def _serve(self) -> None:
        move_to_communication_cpus()
        try:
            self._library: Any = oneccl_library.Library(self._address)
        except (ValueError, OSError) as error:
            self._failure = str(error)
            return
        finally:
            self._ready.set()
        while True:
            self._begin(self._queue.get())
            self._until_done()

    def _begin(self, item: _Started) -> None:
        item.answer = getattr(self._library, item.name)(*item.arguments) or 0
        failed = item.answer in (0, -1) if item.name not in ("join", "leave") else item.answer < 0
        if failed:
            item.error = self._reason()
        if failed or item.name in ("meet", "join", "leave"):
            item.finished.set()
        else:
            self._running.append(item)

    def _until_done(self) -> None:
        pace = self._pace()
        while self._running:
            count = len(self._running)
            stretch = _STRETCH if pace.is_fast() else _STRETCH // 10
            self._running = [item for item in self._running if not self._is_done(item, stretch)]
            changed = len(self._running) < count or not self._queue.empty()
            while not self._queue.empty():
                self._begin(self._queue.get())
            if changed:
                pace = self._pace()
            elif self._running:
                pace.rest()

    def _pace(self) -> Pace:
        return Pace(sum(item.size for item in self._running))

    def _is_done(self, item: _Started, stretch: int) -> bool:
        answer = self._library.done(item.answer, stretch)
        if answer < 0:
            item.error = self._reason()
        if answer:
            item.finished.set()
        return bool(answer)

    def _reason(self) -> str:
        return self._library.error().decode(errors="replace") or "no reason given"


def _meet(store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> _EngineThread:
    """The thread, if every rank has one; else all say why."""
    thread: _EngineThread | None = None
    said = "here"
    try:
        thread = _EngineThread.of_this_process(address)
    except ValueError as error:
        said = f"! {error}"
    all_can(store, "oneccl", rank, size, timeout, said)
    assert thread is not None
    return thread
