"""Collectives of several machines: within each over shared memory, between them through an engine.

A reduction is made on each machine first, the machines' first ranks exchange the results, and each machine spreads
them: what crosses the network doesn't grow with the ranks of a machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from cputrain.distributed import failures, native_calls
from cputrain.distributed.engines import ALL_RANKS, Engine
from cputrain.distributed.failures import CollectiveError, CollectivesDiffer, Peer, PeerDied, PeerLate
from cputrain.distributed.monitor import DIFFERS, LATE, Monitor
from cputrain.distributed.shared_memory import SharedMemoryTransport
from cputrain.distributed.transport import AloneTransport, Tensors, Transport

_Result = TypeVar("_Result")


@dataclass
class Levels:
    """What a rank has of each level."""

    local: SharedMemoryTransport | AloneTransport
    between: Engine | None  # among the machines' first ranks; None on all others
    flat: Engine  # among all ranks, for what has no second level
    monitor: Monitor


def _named(collective: Callable[..., _Result]) -> Callable[..., _Result]:
    """A rank that its own machine told of a failure looks up which rank it was, or tells the other machines.

    Others may be in the middle of what failed here: engines must not be ended properly any more.
    """

    @functools.wraps(collective)
    def run(self: TwoLevelTransport, *arguments: Any, **named: Any) -> _Result:
        try:
            return collective(self, *arguments, **named)
        except CollectivesDiffer as error:
            self._broken = True
            self._monitor.tell_found(DIFFERS, self._rank_in_group(error.culprit))
            raise
        except PeerDied as error:
            self._broken = True
            self.check_peers()
            if error.culprit is None:  # an engine lost a connection, and doesn't know whose
                for rank in self._monitor.left:
                    raise failures.left_elsewhere(self._peers[rank], self._last, self._mine) from None
            raise
        except PeerLate as error:
            self._broken = True
            self._name_late(error)
            raise

    return run


class TwoLevelTransport(Transport):
    def __init__(self, levels: Levels, machines: list[list[int]], rank: int, peers: list[Peer]) -> None:
        self._local, self._between, self._flat = levels.local, levels.between, levels.flat
        self._monitor, self._peers = levels.monitor, peers
        self._count, self._mine, self._last = 0, "no collective", "none in this group"
        self._timeout = 0.0
        self._machines, self.rank = machines, rank
        self.size = sum(len(machine) for machine in machines)
        self._here = next(number for number, machine in enumerate(machines) if rank in machine)
        self._place = {r: (m, machine.index(r)) for m, machine in enumerate(machines) for r in machine}
        self.name = f"shm+{self._flat.name}" if self.size > len(machines) else self._flat.name
        self._broken = False

    @_named
    def all_reduce(self, tensor: Tensor, reduction: int, timeout: float) -> None:
        self._enter("all_reduce", tensor.dtype, tensor.nbytes, timeout, reduction=reduction)
        self._reduce_everywhere(tensor, reduction, timeout)

    def _reduce_everywhere(self, tensor: Tensor, reduction: int, timeout: float) -> None:
        native_calls.dtype_number(tensor.dtype, reduction)
        # Sums of a machine's ranks are kept in fp32 where they are of 16-bit floats; the same on every machine.
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        wide = tensor.float() if half and self.size > len(self._machines) else tensor
        # A mean is divided once, by all ranks, where the machines' sums are added.
        locally = native_calls.PART_OF_MEAN if reduction == native_calls.MEAN else reduction
        self._local.reduce(wide, locally, 0, timeout)
        if self._between is not None:
            self._reduce_between(wide, reduction, tensor.dtype, timeout)
        if wide is not tensor:
            tensor.copy_(wide)
        self._local.broadcast(tensor, 0, timeout)

    def _reduce_between(self, tensor: Tensor, reduction: int, dtype: torch.dtype, timeout: float) -> None:
        """Each machine reduces a part, in the order of the machines, and sends it to all others."""
        assert self._between is not None, "only a machine's first rank speaks to other machines"
        if self._through(self._between.all_reduce, tensor, reduction, timeout):
            return
        count, flat = len(self._machines), tensor.reshape(-1)
        sizes = [flat.numel() // count + (part < flat.numel() % count) for part in range(count)]
        received = [torch.empty(sizes[self._here], dtype=flat.dtype) for _ in range(count)]
        parts = list(flat.split(sizes))
        self._through(self._between.all_to_all, _bytes(received), _bytes(parts), timeout)
        reduced = torch.empty(sizes[self._here], dtype=flat.dtype)
        if reduced.numel():
            native_calls.reduce_tensors(reduced, received, reduction, self.size)
        # Sums of 16-bit floats travel in fp32, what comes of them is rounded once and travels in 16 bits.
        results = list(torch.empty(flat.numel(), dtype=dtype).split(sizes))
        own = _bytes([reduced.to(dtype)])[0]
        self._through(self._between.all_gather, _bytes(results), own, timeout)
        flat.copy_(torch.cat(results))

    @_named
    def reduce(self, tensor: Tensor, reduction: int, root: int, timeout: float) -> None:
        self._enter("reduce", tensor.dtype, tensor.nbytes, timeout, root, reduction)
        everywhere = tensor.clone()
        self._reduce_everywhere(everywhere, reduction, timeout)
        if self.rank == root:
            tensor.copy_(everywhere)

    @_named
    def reduce_scatter(self, output: Tensor, tensors: Tensors, reduction: int, timeout: float) -> None:
        self._enter("reduce_scatter", output.dtype, output.nbytes, timeout, reduction=reduction)
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._reduce_everywhere(joined, reduction, timeout)
        output.copy_(joined[self.rank * output.numel() :][: output.numel()].reshape(output.shape))

    @_named
    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        self._enter("broadcast", tensor.dtype, tensor.nbytes, timeout, root)
        machine, place = self._place[root]
        if machine == self._here:
            self._local.broadcast(tensor, place, timeout)
        if self._between is not None:
            self._through(self._between.broadcast, _bytes([tensor])[0], machine, timeout)
        if machine != self._here:
            self._local.broadcast(tensor, 0, timeout)

    @_named
    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> None:
        """A machine's tensors lie behind one another on their way."""
        sizes = [output.nbytes for output in outputs]
        self._enter("all_gather", tensor.dtype, sum(sizes), timeout)
        joined = [torch.empty(sum(sizes[r] for r in machine), dtype=torch.uint8) for machine in self._machines]
        mine = self._machines[self._here]
        parts = list(joined[self._here].split([sizes[r] for r in mine]))
        is_first = self.rank == mine[0]
        own = _bytes([tensor])[0]
        self._local.gather_uneven(parts if is_first else [], own, [sizes[r] for r in mine], timeout)
        if self._between is not None:
            self._through(self._between.all_gather, joined, joined[self._here].clone(), timeout)
        everything = torch.cat(joined)
        self._local.broadcast(everything, 0, timeout)
        order = [r for machine in self._machines for r in machine]
        for r, part in zip(order, everything.split([sizes[r] for r in order]), strict=True):
            _bytes([outputs[r]])[0].copy_(part)

    @_named
    def gather(self, outputs: Tensors, tensor: Tensor, root: int, timeout: float) -> None:
        self._enter("gather", tensor.dtype, tensor.nbytes, timeout, root)
        own = _bytes([tensor])[0]
        received = _bytes(outputs) if self.rank == root else [_NOTHING] * self.size
        sent = [own if r == root else _NOTHING for r in range(self.size)]
        self._exchange(received, sent, timeout)

    @_named
    def scatter(self, output: Tensor, tensors: Tensors, root: int, timeout: float) -> None:
        self._enter("scatter", output.dtype, output.nbytes, timeout, root)
        received = [_bytes([output])[0] if r == root else _NOTHING for r in range(self.size)]
        sent = _bytes(tensors) if self.rank == root else [_NOTHING] * self.size
        self._exchange(received, sent, timeout)

    @_named
    def all_to_all(self, outputs: Tensors, tensors: Tensors, timeout: float) -> None:
        self._enter("all_to_all", outputs[0].dtype, 0, timeout)
        self._exchange(_bytes(outputs), _bytes(tensors), timeout)

    def _exchange(self, outputs: Tensors, inputs: Tensors, timeout: float) -> None:
        """Every rank compares all sizes first: engines wait for ever for bytes that no rank sends."""
        mine = torch.tensor([[t.numel() for t in inputs], [t.numel() for t in outputs]])
        sizes = torch.empty(self.size, 2, self.size, dtype=torch.int64)
        self._through(self._flat.all_gather, _bytes(list(sizes)), _bytes([mine])[0], timeout)
        sent, awaited = sizes[:, 0], sizes[:, 1].T
        for source, target in (sent != awaited).nonzero().tolist():
            self._broken = True
            text = (
                f"the ranks called different collectives: in {self._mine}, {self._peers[source]} sends "
                f"{sent[source, target]:,} bytes to {self._peers[target]}, which awaits {awaited[source, target]:,}."
            )
            raise CollectivesDiffer(text, self._peers[source])
        self._through(self._flat.all_to_all, outputs, inputs, timeout)

    @_named
    def barrier(self, timeout: float, name: str = "barrier") -> None:
        self._enter(name, "nothing", 0, timeout)
        self._reduce_everywhere(torch.ones(1, dtype=torch.uint8), native_calls.SUM, timeout)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        self._through(self._flat.send, _bytes([tensor])[0], peer, tag, timeout)

    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        return self._through(self._flat.receive, _bytes([tensor])[0], peer, tag, timeout)

    def abort(self) -> None:
        self._local.abort()
        self._flat.abort()
        if self._between is not None:
            self._between.abort()

    def close(self) -> None:
        self._monitor.close()
        self._local.close()
        for engine in (self._between, self._flat):
            if engine is not None:
                engine.close(self._broken)

    def check_peers(self, awaited: int = ALL_RANKS) -> None:
        """Raises if ranks are known to differ, if one is dead, or if an awaited one has ended the group."""
        found, last, mine = self._monitor.found, self._last, self._mine
        if DIFFERS in found and found[DIFFERS][0] != self.rank:
            pair = [self._peers[r] for r in dict.fromkeys(found[DIFFERS])]
            raise failures.differ_elsewhere(" and ".join(map(str, pair)), mine, pair[-1]) from None
        if LATE in found and found[LATE][0] != self.rank:
            raise self._given_up(*found[LATE]) from None
        if self._monitor.dead >= 0:
            raise failures.died_elsewhere(self._peers[self._monitor.dead], last, mine) from None
        for rank, since in list(self._monitor.left.items()):  # once what it sent is here
            if awaited in (ALL_RANKS, rank) and time.monotonic() - since > _LAST_BYTES:
                raise failures.left_elsewhere(self._peers[rank], last, mine) from None

    def _given_up(self, waiting: int, late: int) -> PeerLate:
        """Another rank has waited in vain, for a third one or for this one."""
        if late != self.rank:
            return failures.late(self._peers[late], self._timeout, self._last, self._mine)
        return failures.came_late(self._peers[waiting], self._timeout, self._mine)

    def _rank_in_group(self, global_rank: int | None) -> int:
        """This rank's own, if it isn't known which rank differs."""
        return next((peer.rank for peer in self._peers if peer.global_rank == global_rank), self.rank)

    def absent(self) -> list[Peer]:
        return [self._peers[rank] for rank in self._monitor.all_absent()]

    def _name_late(self, error: PeerLate) -> None:
        """Tells the other machines, and raises if it is known who has not come to this collective, of any machine."""
        found = self._monitor.absent() if error.culprit is None else self._rank_in_group(error.culprit)
        if found is not None:
            self._monitor.tell_found(LATE, found)
        absent = self._monitor.absent()
        if absent is not None:
            raise failures.late(self._peers[absent], self._timeout, self._last, self._mine) from None

    def _enter(
        self, name: str, dtype: object, size: int, timeout: float, root: int = -1, reduction: int | None = None
    ) -> None:
        """Every collective begins here: the machines' first ranks compare what they are about to do."""
        if self._broken:  # what was queued behind a collective that failed, fails without waiting
            self.check_peers()
        self._count += 1
        self._timeout = timeout
        self._monitor.enter(self._count)
        mine = failures.described(f"{name} number {self._count}", dtype, size, root, reduction)
        self._last, self._mine = self._mine, mine
        self._local.begin_call(mine, name, self._count, dtype, size, root, reduction)
        if self._between is None:
            return
        text = mine.encode()[:_TITLE].ljust(_TITLE)
        title = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        titles = [torch.empty_like(title) for _ in self._machines]
        self._through(self._between.all_gather, titles, title, timeout)
        for machine, other in zip(self._machines, titles, strict=True):
            if not torch.equal(other, title):
                theirs = bytes(other.tolist()).decode(errors="replace").strip()
                self._broken = True
                self._local.report(native_calls.MISMATCH, machine[0])
                raise failures.differ(self._peers[machine[0]], theirs, self._mine)

    def _through(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """An engine's call. One that failed is never used again, and the rest of this machine hears of it."""
        try:
            return call(*arguments)
        except CollectiveError as error:
            self._broken = True
            kind, culprit = self._cause(error)
            self._local.report(kind, failures.unknown_culprit(self._peers) if culprit is None else culprit)
            raise

    def _cause(self, error: CollectiveError) -> tuple[int, int | None]:
        """What happened, and which rank is known to be the cause."""
        if isinstance(error, PeerLate):
            return native_calls.TIMEOUT, self._monitor.absent()
        if isinstance(error, CollectivesDiffer):
            return native_calls.MISMATCH, self._monitor.found.get(DIFFERS, (None,))[0]
        return native_calls.DIED, self._monitor.culprit()


# A rank may end the group while its last bytes are still on their way.
_LAST_BYTES = 4.0
# Room for what a collective is called in messages.
_TITLE = 96


def _bytes(tensors: Tensors) -> list[Tensor]:
    """The memory of contiguous tensors as it is."""
    return [tensor.reshape(-1).view(torch.uint8) if tensor.numel() else _NOTHING for tensor in tensors]


_NOTHING = torch.empty(0, dtype=torch.uint8)
