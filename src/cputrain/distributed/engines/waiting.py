"""Waiting for an engine that only says whether it is done: at full speed while data flows, asleep while others compute.

Libraries of MPI's kind burn a core while they wait, and know no timeout. So what they do is started without waiting,
and asked for. Before data flows, the ranks have met (they compare what they are about to do): a transfer takes as long
as its bytes take, and whoever waits longer than that waits for somebody who computes.
"""

from __future__ import annotations

import os
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
        began = time.monotonic()
        full_speed, next_look, pause = began + _BEGIN + size * _PER_BYTE, began + _LOOK, _SHORTEST
        while not done():
            now = time.monotonic()
            if now >= next_look:
                self._look_around(began, timeout, awaited)
                next_look = now + _LOOK
            if now < full_speed:
                os.sched_yield()  # to the peer, if there are more ranks than cores
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)

    def _look_around(self, began: float, timeout: float, awaited: int) -> None:
        if self.aborted:
            raise failures.CollectiveError("the process group has been shut down.")
        self.watch(awaited)
        if time.monotonic() - began > timeout:
            raise failures.late_elsewhere(timeout)
