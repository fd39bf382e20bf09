"""What a process group needs of a way to move data: the collectives, on contiguous CPU tensors, one at a time.

`AloneTransport` is that of a group of one rank; shared_memory.py and two_level.py have those of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cputrain.distributed import native_calls
from cputrain.distributed.failures import Peer

Tensors = Sequence[Tensor]


class Carrier(ABC):
    """What a transport and an engine both do. Timeouts are seconds; a call returns when this rank's part is done."""

    name: str

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None: ...

    @abstractmethod
    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> None:
        """Sizes may differ between ranks, and are known to all."""

    @abstractmethod
    def all_to_all(self, outputs: Tensors, tensors: Tensors, timeout: float) -> None:
        """outputs[r] receives what rank r has for this one; any sizes."""

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None: ...

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        """From one rank, or from any (None); returns which rank it was."""

    @abstractmethod
    def abort(self) -> None:
        """Ends whatever waits in other threads; nothing works afterwards."""


class Transport(Carrier):
    """Ranks are those of the group."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, reduction: int, timeout: float) -> None:
        """In place; `reduction` is a number of native_calls."""

    @abstractmethod
    def reduce(self, tensor: Tensor, reduction: int, root: int, timeout: float) -> None:
        """In place at the root; elsewhere the tensor stays as it is."""

    @abstractmethod
    def gather(self, outputs: Tensors, tensor: Tensor, root: int, timeout: float) -> None:
        """All of one size; `outputs` is empty but at the root."""

    @abstractmethod
    def scatter(self, output: Tensor, tensors: Tensors, root: int, timeout: float) -> None:
        """`tensors` is empty but at the root."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensors: Tensors, reduction: int, timeout: float) -> None: ...

    @abstractmethod
    def barrier(self, timeout: float, name: str = "barrier") -> None: ...

    def absent(self) -> list[Peer]:
        """After a collective that timed out: which ranks had not come to it, as far as is known."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Tells the others that this rank ends, and lets go of everything. Nothing waits any more."""


class AloneTransport(Transport):
    """The transport of a group of one rank, which copies."""

    name = "alone"

    def all_reduce(self, tensor: Tensor, reduction: int, *_: Any, **__: Any) -> None:
        native_calls.dtype_number(tensor.dtype, reduction)  # refuses what several ranks would refuse

    def reduce_scatter(self, output: Tensor, tensors: Tensors, reduction: int, timeout: float) -> None:
        native_calls.dtype_number(output.dtype, reduction)
        output.copy_(tensors[0])

    def all_gather(self, outputs: Tensors, tensor: Tensor, *_: Any, **__: Any) -> None:
        outputs[0].copy_(tensor)

    def scatter(self, output: Tensor, tensors: Tensors, root: int, timeout: float) -> None:
        output.copy_(tensors[0])

    def all_to_all(self, outputs: Tensors, tensors: Tensors, timeout: float) -> None:
        outputs[0].copy_(tensors[0])

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        raise ValueError("a group of one rank has no other rank to send to.")

    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        raise ValueError("a group of one rank has no other rank to receive from.")

    def _nothing(self, *_: Any, **__: Any) -> None:
        """There is no other rank to wait for, or to tell."""

    reduce, gather, gather_uneven = all_reduce, all_gather, all_gather
    broadcast = barrier = begin_call = report = abort = close = _nothing
