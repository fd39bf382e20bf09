"""Waiting for an engine that only says whether it is done: at full speed while data flows, asleep while others compute.

Libraries of MPI's kind burn a core while they wait, and know no timeout. So what they do is started without waiting,
and asked for. Before data flows, the ranks have met (they compare what they are about to do): a transfer takes as long
as its bytes take, and a rank that waits longer than that waits for one that computes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cputrain.distributed import failures
from cputrain.distributed.engines import EVERYBODY, Watch

# Looks at full speed: a little more than a message takes, and four times what the slowest memory takes for the bytes.
_BEGIN, _PER_BYTE = 200e-6, 4e-9
_SHORTEST, _LONGEST = 50e-6, 2e-3
# How often it is looked who is still there.
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
        self, done: Callable[[], bool], size: int, timeout: float, kept: object = None, awaited: int = EVERYBODY
    ) -> None:
        """Until done() says so; `kept` lives on if the wait ends otherwise."""
        try:
            self._wait(done, size, timeout, awaited)
        except BaseException:
            self.pending.append((done, kept))
            raise

    def _wait(self, done: Callable[[], bool], size: int, timeout: float, awaited: int) -> None:
        began, pace = time.monotonic(), Pace(size)
        next_look = began + _LOOK
        while not done():
            if time.monotonic() >= next_look:
                self._look_around(began, timeout, awaited)
                next_look = time.monotonic() + _LOOK
            pace.rest()

    def sleep(self, finished: threading.Event, timeout: float, kept: object = None) -> None:
        """The same for what another thread does."""
        began = time.monotonic()
        try:
            while not finished.wait(_LOOK):
                self._look_around(began, timeout, EVERYBODY)
        except BaseException:
            self.pending.append(kept)
            raise

    def _look_around(self, began: float, timeout: float, awaited: int) -> None:
        if self.aborted:
            raise failures.CollectiveError("the process group has been shut down.")
        self.watch(awaited)
        if time.monotonic() - began > timeout:
            raise failures.late_elsewhere(timeout)
