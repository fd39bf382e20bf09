"""What carries bytes between machines: an existing engine, behind one small interface. One file for each engine."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from cputrain.distributed import failures
from cputrain.distributed.rendezvous import all_answer
from cputrain.distributed.transport import Carrier, Tensors
from cputrain.settings import TRANSPORT


class Engine(Carrier):
    """Moves bytes among ranks that share no memory. Tensors are contiguous and of uint8; every rank calls alike.

    Reductions need not be an engine's: the ranks exchange parts and reduce them with the kernels of the shared memory,
    in fp32 where 16-bit floats are summed. So every dtype works on every engine.
    """

    def all_reduce(self, tensor: Tensor, reduction: int, timeout: float) -> bool:
        """Reduces a tensor of any dtype in place, if the engine does that well by itself; else False, at once."""
        return False

    @abstractmethod
    def close(self, broken: bool) -> None:
        """Lets go of connections. After a failure (`broken`) others may never answer, and nothing waits for them."""


ALL_RANKS, NO_RANK = -1, -2


class Watch(Protocol):
    """Called now and then by a rank that waits."""

    def __call__(self, awaited: int = ALL_RANKS) -> None:
        """Raises if a rank is known to be dead, or if one that is awaited has ended the group."""


def all_can(store: dist.Store, engine: str, rank: int, size: int, timeout: timedelta, said: str) -> list[str]:
    """What each rank says of itself: an answer that begins with "!" is why it can't, and raised on all ranks."""
    answers = all_answer(store, engine, rank, size, timeout, said)
    for other, answer in enumerate(answers):
        if answer.startswith("!"):
            raise ValueError(f"{TRANSPORT}={engine}, but on rank {other}: {answer[2:]}")
    return answers


def take_apart(joined: Tensor, outputs: Tensors) -> None:
    """Fills the outputs from a tensor in which they lie behind one another."""
    for output, part in zip(outputs, joined.split([output.numel() for output in outputs]), strict=True):
        output.copy_(part)


# --- Waiting -------------------------------------------------------------------------------------------------------
#
# Libraries of MPI's kind burn a core while they wait, and know no timeout. So what they do is started without waiting,
# and asked for: at full speed while data flows, asleep while others compute. Before data flows, the ranks have met
# (they compare what they are about to do): a transfer takes as long as its bytes take, and a rank that waits longer
# than that waits for one that computes.

# Looks at full speed: a little more than a message takes, and four times what the slowest memory takes for the bytes.
_BEGIN, _PER_BYTE = 200e-6, 4e-9
_SHORTEST, _LONGEST = 50e-6, 2e-3
# How often a rank that waits asks which peers are still there.
_LOOK = 0.2


class Pace:
    """How long to rest between two looks: not at all while so many bytes may be on their way, then ever longer."""

    def __init__(self, size: int) -> None:
        self._full_speed = time.monotonic() + _BEGIN + size * _PER_BYTE
        self._pause = _SHORTEST

    def is_fast(self) -> bool:
        return time.monotonic() < self._full_speed

    def rest(self) -> None:
        if self.is_fast():
            os.sched_yield()  # to the peer, if there are more ranks than cores
            return
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST)


@dataclass
class Waiter:
    """Waits for one engine's operations, and ends the wait if a peer is gone, late, or the group is shut down."""

    watch: Watch
    aborted: bool = False
    # What operations that never ended still read and write.
    pending: list[object] = field(default_factory=list)

    def wait(
        self, done: Callable[[], bool], size: int, timeout: float, kept: object = None, awaited: int = ALL_RANKS
    ) -> None:
        """Until done() says so; `kept` lives on if the wait ends otherwise."""
        began, pace = time.monotonic(), Pace(size)
        next_look = began + _LOOK
        try:
            while not done():
                if time.monotonic() >= next_look:
                    self._look_around(began, timeout, awaited)
                    next_look = time.monotonic() + _LOOK
                pace.rest()
        except BaseException:
            self.pending.append((done, kept))
            raise

    def sleep(self, finished: threading.Event, timeout: float, kept: object = None) -> None:
        """The same for what another thread does."""
        began = time.monotonic()
        try:
            while not finished.wait(_LOOK):
                self._look_around(began, timeout, ALL_RANKS)
        except BaseException:
            self.pending.append(kept)
            raise

    def _look_around(self, began: float, timeout: float, awaited: int) -> None:
        if self.aborted:
            raise failures.CollectiveError("the process group has been shut down.")
        self.watch(awaited)
        if time.monotonic() - began > timeout:
            raise failures.late_elsewhere(timeout)
