"""Collectives among ranks that share memory."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cputrain import hardware
from cputrain.distributed import failures, native_calls
from cputrain.distributed.failures import Peer
from cputrain.distributed.rendezvous import Machine
from cputrain.distributed.transport import Tensors, Transport

_NativeCall = Callable[..., None]
# A look takes about 50 ns: 100 µs, a little more than a sleeper takes to wake. With more ranks than cores every look
# takes time from the rank that is waited for.
_SPIN = 2000
# An address to which nothing is written, of a rank that is waited for.
_ANYWHERE = 1


def _spin(machine: Machine) -> int:
    """How often to look before sleeping. What counts is where all ranks may run: each alone may have but one CPU."""
    quota = hardware.this_machine().cpu_quota.value
    return _SPIN if len(machine.ranks) <= min(len(machine.cpus), quota or math.inf) else 0


class SharedMemoryTransport(Transport):
    name = "shm"

    def __init__(self, machine: Machine, rank: int, group: list[Peer]) -> None:
        """`rank` counts within the machine."""
        assert machine.memory is not None
        self._machine, self._peers, self._group = machine, [group[r] for r in machine.ranks], group
        self.rank, self.size = rank, len(self._peers)
        self._buffer = ctypes.c_char.from_buffer(machine.memory)
        address = ctypes.addressof(self._buffer)
        self._memory = native_calls.SharedMemory(address, rank, self.size, machine.pidfds, _spin(machine))
        self._call_text = ""  # of the user's collective, if what runs here are its steps
        self._writing = [threading.Lock() for _ in self._peers]
        self._inboxes = [_Inbox(self, peer) for peer in range(self.size)]

    def all_reduce(self, tensor: Tensor, reduction: int, timeout: float) -> None:
        self._reduce("all_reduce", tensor, reduction, -1, timeout)

    def reduce(self, tensor: Tensor, reduction: int, root: int, timeout: float) -> None:
        self._reduce("reduce", tensor, reduction, root, timeout)

    def _reduce(self, name: str, tensor: Tensor, reduction: int, root: int, timeout: float) -> None:
        dtype = native_calls.dtype_number(tensor.dtype, reduction)
        what = (name, tensor.data_ptr(), tensor.nbytes, dtype, reduction, root)
        self._call(name, tensor, timeout, self._memory.reduce, *what, reduction=reduction)

    def reduce_scatter(self, output: Tensor, tensors: Tensors, reduction: int, timeout: float) -> None:
        dtype = native_calls.dtype_number(output.dtype, reduction)
        what = output.data_ptr(), _memory_of(tensors)[0], output.nbytes, dtype, reduction
        self._call("reduce_scatter", output, timeout, self._memory.reduce_scatter, *what, reduction=reduction)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        address = tensor.data_ptr()
        targets = [address if rank == root and root != self.rank else 0 for rank in range(self.size)]
        sizes = [tensor.nbytes if rank == root else 0 for rank in range(self.size)]
        self._publish("broadcast", tensor, sizes, targets, root, timeout)

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> None:
        targets = [output.data_ptr() or _ANYWHERE for output in outputs]
        self._publish("all_gather", tensor, [output.nbytes for output in outputs], targets, -1, timeout)
        _copy(outputs[self.rank], tensor)

    def gather(self, outputs: Tensors, tensor: Tensor, root: int, timeout: float) -> None:
        targets = [output.data_ptr() for output in outputs] or [0] * self.size
        sizes = [0 if rank == root else tensor.nbytes for rank in range(self.size)]
        self._publish("gather", tensor, sizes, targets, root, timeout)
        if outputs:
            _copy(outputs[self.rank], tensor)

    def gather_uneven(self, outputs: Tensors, tensor: Tensor, sizes: list[int], timeout: float) -> None:
        """To the machine's first rank, which alone has outputs."""
        targets = [output.data_ptr() for output in outputs] or [0] * self.size
        self._publish("all_gather", tensor, sizes, targets, -1, timeout)
        if outputs:
            _copy(outputs[self.rank], tensor)

    def barrier(self, timeout: float, name: str = "barrier") -> None:
        self._publish(name, torch.empty(0), [0] * self.size, [_ANYWHERE] * self.size, -1, timeout)

    def _publish(
        self, name: str, tensor: Tensor, sizes: list[int], targets: list[int], root: int, timeout: float
    ) -> None:
        self._call(name, tensor, timeout, self._memory.publish, name, tensor.data_ptr(), sizes, targets, root)

    def scatter(self, output: Tensor, tensors: Tensors, root: int, timeout: float) -> None:
        nothing = [output.new_empty(0)] * self.size
        sources = list(tensors) if self.rank == root else nothing
        targets = [output if rank == root else nothing[0] for rank in range(self.size)]
        self._exchange("scatter", targets, sources, root, timeout)

    def all_to_all(self, outputs: Tensors, tensors: Tensors, timeout: float) -> None:
        self._exchange("all_to_all", outputs, tensors, -1, timeout)

    def _exchange(self, name: str, outputs: Tensors, tensors: Tensors, root: int, timeout: float) -> None:
        what = name, _memory_of(tensors), _memory_of(outputs), root
        self._call(name, tensors[0], timeout, self._memory.exchange, *what)
        _copy(outputs[self.rank], tensors[self.rank])

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        head = torch.tensor([tag, tensor.nbytes])
        with self._writing[peer]:  # messages of several tags may be sent at once
            self.write_pipe(peer, head, timeout)
            self.write_pipe(peer, tensor, timeout)

    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        if peer is not None:
            self._inboxes[peer].take(tensor, tag, timeout)
            return peer
        deadline, pause = time.monotonic() + timeout, 20e-6
        others = [inbox for inbox in self._inboxes if inbox.peer != self.rank]
        while time.monotonic() < deadline:
            for inbox in others:
                if inbox.take_if_there(tensor, tag, timeout):
                    return inbox.peer
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        raise failures.PeerLate(f"no rank sent a message with tag {tag} within {timeout:g} s.")

    def write_pipe(self, peer: int, tensor: Tensor, timeout: float) -> None:
        self._call("send", tensor, timeout, self._memory.send, peer, tensor.data_ptr(), tensor.nbytes)

    def read_pipe(self, peer: int, tensor: Tensor, timeout: float) -> None:
        self._call("recv", tensor, timeout, self._memory.receive, peer, tensor.data_ptr(), tensor.nbytes)

    def is_readable(self, peer: int) -> bool:
        return self._memory.is_readable(peer)

    def begin_call(self, text: str, *what: Any) -> None:
        """The collectives that follow are steps of this one: if ranks differ, it is the one that is named."""
        self._call_text = text
        self._memory.begin_call(*what)

    def abort(self) -> None:
        self._memory.abort()

    def report(self, kind: int, culprit: int) -> None:
        """Ends the group on this machine because of a rank of another one."""
        self._memory.report(kind, culprit)

    def absent(self) -> list[Peer]:
        return [peer for peer, is_absent in zip(self._peers, self._memory.absent(), strict=True) if is_absent]

    def close(self) -> None:
        self._memory.leave()
        self._machine.close()

    def _call(
        self, name: str, tensor: Tensor, timeout: float, call: _NativeCall, *what: Any, reduction: int | None = None
    ) -> None:
        try:
            call(*what, int(timeout * 1e9))
        except native_calls.CallFailed as error:
            mine = self._call_text or failures.described(name, tensor.dtype, tensor.nbytes, reduction=reduction)
            raise failures.from_status(error.status, self._peers, self._group, mine, timeout) from None


class _Inbox:
    """What one rank sent to this one. One thread at a time reads; messages for others are kept until they ask."""

    def __init__(self, transport: SharedMemoryTransport, peer: int) -> None:
        self._transport, self.peer = transport, peer
        self._changed = threading.Condition()
        self._reading = False
        self._kept: list[tuple[int, Tensor]] = []

    def take(self, tensor: Tensor, tag: int, timeout: float) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_kept(tag) or not self._reading)
                if self._take_kept(tensor, tag):
                    return
                self._reading = True
            if self._read_next(tensor, tag, timeout):
                return

    def take_if_there(self, tensor: Tensor, tag: int, timeout: float) -> bool:
        with self._changed:
            if self._take_kept(tensor, tag):
                return True
            if self._reading or not self._transport.is_readable(self.peer):
                return False
            self._reading = True
        return self._read_next(tensor, tag, timeout)

    def _is_kept(self, tag: int) -> bool:
        return any(kept == tag for kept, _ in self._kept)

    def _take_kept(self, tensor: Tensor, tag: int) -> bool:
        for index, (kept_tag, content) in enumerate(self._kept):
            if kept_tag == tag:
                del self._kept[index]
                if content.nbytes != tensor.nbytes:
                    raise failures.different_message(self.peer, content.nbytes, tensor.nbytes)
                _copy(tensor, content)
                return True
        return False

    def _read_next(self, tensor: Tensor, tag: int, timeout: float) -> bool:
        """Whether the next message was the one; `_reading` is this thread's, and given back."""
        try:
            head = torch.empty(2, dtype=torch.int64)
            self._transport.read_pipe(self.peer, head, timeout)
            found_tag, size = head.tolist()
            fits = found_tag == tag and size == tensor.nbytes
            content = tensor if fits else torch.empty(size, dtype=torch.uint8)
            self._transport.read_pipe(self.peer, content, timeout)
            if not fits:
                self._kept.append((found_tag, content))
            return fits
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()


def _memory_of(tensors: Tensors) -> tuple[list[int], list[int]]:
    """Addresses and sizes."""
    return [tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors]


def _copy(target: Tensor, source: Tensor) -> None:
    """The bytes of a contiguous tensor, unless they are there already."""
    if target.data_ptr() != source.data_ptr() and source.nbytes:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
