"""Where ccl's own threads run: on the cores that `--cores-for-communication` (or CCL_WORKER_COUNT) kept free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from cputrain.log import say_once
from cputrain.settings import COMMUNICATION_CPUS, communication_cpus


def move_there() -> None:
    """This thread, and all that it starts from now on."""
    if communication_cpus():
        _move(frozenset(communication_cpus()))


@contextlib.contextmanager
def threads_start_there() -> Iterator[None]:
    """Threads that a library starts within are bound there; the caller's own isn't, afterwards."""
    before = os.sched_getaffinity(0)
    move_there()
    try:
        yield
    finally:
        if communication_cpus():
            os.sched_setaffinity(0, before)


def _move(wanted: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        say_once(f"{COMMUNICATION_CPUS}={','.join(map(str, sorted(wanted)))} has no effect: {error.strerror}")
