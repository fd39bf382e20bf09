"""gloo as the engine between machines."""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cputrain.distributed import failures
from cputrain.distributed.engines import Engine, Watch, take_apart
from cputrain.distributed.transport import Tensors
from cputrain.distributed.work import on_communication_cpus

# A wait looks around this often. gloo's own wait can't be ended from outside.
_SLICE = timedelta(milliseconds=200)
# gloo's own time limit would be over at the same moment as ours, and look like a broken connection.
_LONGER = timedelta(seconds=60)
# Engines of groups that failed: their threads still wait for peers that never answer, and ending gloo would wait too,
# for the whole timeout. So they are never freed, not even when the interpreter ends.
_abandoned: list[Any] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))


class GlooEngine(Engine):
    name = "gloo"

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, timeout: timedelta, watch: Watch) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._threads = 2
        options._timeout = timeout + _LONGER
        with on_communication_cpus():
            # By address, of the route to the master: a host's own name may mean another network, or nothing.
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self._rank, self._size, self._watch = rank, size, watch
        self._aborted = False
        self._pending: list[Any] = []

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> None:
        """gloo has no lists: parts lie behind one another."""
        sent, received = [t.numel() for t in inputs], [t.numel() for t in outputs]
        source, target = torch.cat(list(inputs)), torch.empty(sum(received), dtype=torch.uint8)
        self._finish(self._gloo.alltoall_base(target, source, received, sent), timeout, source, target)
        take_apart(target, outputs)

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> None:
        """gloo wants equal sizes: uneven ones are padded."""
        longest = max(output.numel() for output in outputs)
        if longest == 0:
            return
        source = torch.zeros(longest, dtype=torch.uint8)
        source[: tensor.numel()] = tensor
        targets = [torch.empty(longest, dtype=torch.uint8) for _ in outputs]
        self._finish(self._gloo.allgather([targets], [source]), timeout, source, targets)
        for output, target in zip(outputs, targets, strict=True):
            output.copy_(target[: output.numel()])

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        if tensor.numel():
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._finish(self._gloo.broadcast([tensor], options), timeout, tensor)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        size = torch.tensor([tensor.numel()])
        self._finish(_Patient(self._gloo.send([size], peer, 2 * tag)), timeout, size)
        if tensor.numel():
            self._finish(_Patient(self._gloo.send([tensor], peer, 2 * tag + 1)), timeout, tensor)

    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        size = torch.zeros(1, dtype=torch.int64)
        head = self._gloo.recv_anysource([size], 2 * tag) if peer is None else self._gloo.recv([size], peer, 2 * tag)
        self._finish(_Patient(head), timeout, size)
        sender = head._source_rank() if peer is None else peer
        if size.item() != tensor.numel():
            raise failures.different_message(sender, int(size.item()), tensor.numel())
        if tensor.numel():
            self._finish(_Patient(self._gloo.recv([tensor], sender, 2 * tag + 1)), timeout, tensor)
        return sender

    def abort(self) -> None:
        self._aborted = True

    def close(self, broken: bool) -> None:
        if broken or self._pending:
            _abandoned.append((self._gloo, self._pending))
        del self._gloo

    def _finish(self, work: Any, timeout: float, *tensors: Any) -> None:
        """Waits for gloo, looking around. The tensors live until gloo is done with them, whatever happens."""
        end = time.monotonic() + timeout
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                failed = work.is_completed() or "timed out" not in str(error).lower()
                if failed and work.is_completed() and getattr(work, "is_success", lambda: False)():
                    return  # it ended just after the slice
                self._look_around(failed, error, end, timeout, (work, tensors))

    def _look_around(self, failed: bool, error: RuntimeError, end: float, timeout: float, kept: Any) -> None:
        try:
            if self._aborted:
                raise failures.CollectiveError("the process group has been shut down.")
            if failed:
                time.sleep(0.5)  # which rank is gone is known a moment later than that a connection is
            self._watch()
            if failed:
                raise failures.PeerDied(f"a connection between the machines failed: {error}") from None
            if time.monotonic() > end:
                raise failures.late_elsewhere(timeout) from None
        except failures.CollectiveError:
            self._pending.append(kept)
            _abandoned.append((self._gloo, kept))
            raise


class _Patient:
    """A message's work, whose own wait with a time limit would break the connection when the time is over."""

    def __init__(self, work: Any) -> None:
        self._work, self._done = work, threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait, name="cputrain-message", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def wait(self, limit: timedelta) -> None:
        if not self._done.wait(limit.total_seconds()):
            raise RuntimeError("timed out")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()
