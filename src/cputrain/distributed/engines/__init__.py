"""What carries bytes between machines: an existing engine, behind one small interface. One file for each engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Engine(ABC):
    """Moves bytes among ranks that share no memory. Tensors are contiguous and of uint8; every rank calls alike.

    Reductions need not be an engine's: the ranks exchange parts and reduce them with the kernels of the shared memory,
    in fp32 where 16-bit floats are summed. So every dtype works on every engine.
    """

    name: str

    @abstractmethod
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float) -> None:
        """outputs[r] receives what rank r has for this one; any sizes."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> None:
        """Any sizes, known to all."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None: ...

    def all_reduce(self, tensor: Tensor, reduction: int, timeout: float) -> bool:
        """Reduces a tensor of any dtype in place, if the engine does that well by itself; else False, at once."""
        return False

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None: ...

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        """From one rank, or from any (None); returns who it was."""

    @abstractmethod
    def abort(self) -> None:
        """Ends whatever waits in other threads."""

    @abstractmethod
    def close(self, broken: bool) -> None:
        """Lets go of connections. After a failure (`broken`) others may never answer, and nothing waits for them."""


EVERYBODY, NOBODY = -1, -2


class Watch(Protocol):
    """Called now and then by a rank that waits."""

    def __call__(self, awaited: int = EVERYBODY) -> None:
        """Raises if a rank is known to be dead, or if one that is awaited has ended the group."""
