"""Whether ranks that have failed are started anew, and how soon: a failure that comes again at the same step stays."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import NamedTuple

from cputrain import blame

# What a program does to itself; SIGKILL and SIGTERM come from outside.
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
OUT_OF_MEMORY = "out of memory"
_MOST_SECONDS = 30.0


class Own(NamedTuple):
    """A failure from inside: an exception, a signal of one's own, or more memory than there is; and at which step."""

    what: str
    step: int | None


def own_failure(folder: str, codes: Mapping[int, int | None], out_of_memory: bool) -> Own | None:
    """That of the first of these ranks that failed by itself; `codes` as `processes.first_failure` has them."""
    for rank in (rank for rank, code in codes.items() if code and blame.read(folder, rank) is None):
        code = codes[rank] or 0
        what = blame.exception_of(folder, rank)
        if out_of_memory and code == -signal.SIGKILL:
            what = OUT_OF_MEMORY
        elif -code in _OWN_SIGNALS:
            what = signal.Signals(-code).name
        return Own(what, blame.step_of(folder, rank)) if what else None
    return None


class Restarts:
    """Of one agent."""

    def __init__(self) -> None:
        self._last: Own | None = None
        self._furthest = 0
        self._in_vain = 0  # starts in a row that got no further

    def why_not(self, own: Own | None) -> str:
        """Why another start would end like this one; empty if it may not."""
        same = own is not None and own == self._last
        self._last = own
        if not same or own is None:
            return ""
        where = "before the first step" if own.step is None else f"after step {own.step:,}"
        return f"twice in the same way ({own.what}) {where}, so it isn't started anew"

    def pause(self, step: int | None) -> float:
        """Seconds until the next start: 0, and where none gets further than the one before, 1, 2, 4 … 30."""
        if (step or 0) > self._furthest:
            self._furthest, self._in_vain = step or 0, 0
        self._in_vain += 1
        return min(2.0 ** (self._in_vain - 2), _MOST_SECONDS) if self._in_vain > 1 else 0.0
