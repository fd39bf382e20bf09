"""Where ccl's own threads run: on the cores that `--cores-for-communication` (or CCL_WORKER_COUNT) kept free."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

logger = logging.getLogger("cputrain")

# Set by `cputrain run` and `cputrain launch`: numbers of logical CPUs, "6,7".
VARIABLE = "CPUTRAIN_COMMUNICATION_CPUS"
# How many cores of each rank don't compute: all that is known where ranks are not bound.
COUNT = "CPUTRAIN_CORES_FOR_COMMUNICATION"


def cpus() -> set[int]:
    """Empty: none were kept free, and communication shares the cores that compute."""
    text = os.environ.get(VARIABLE, "")
    try:
        return {int(number) for number in text.split(",") if number.strip()}
    except ValueError:
        raise ValueError(f"{VARIABLE} is a list of CPU numbers like 6,7, found {text!r}.") from None


def move_there() -> None:
    """This thread, and all that it starts from now on."""
    if cpus():
        _move(frozenset(cpus()))


@contextlib.contextmanager
def threads_start_there() -> Iterator[None]:
    """Threads that a library starts within are bound there; the caller's own isn't, afterwards."""
    before = os.sched_getaffinity(0)
    move_there()
    try:
        yield
    finally:
        if cpus():
            os.sched_setaffinity(0, before)


def _move(wanted: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        _say_once(f"{VARIABLE}={','.join(map(str, sorted(wanted)))} has no effect: {error.strerror}")


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)
