"""Ending processes for good: the ones that we started, and what they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, MutableMapping

_MARK = "CPUTRAIN_STARTED_BY"
# In the environment of every rank that an mpirun of ours starts, and of what they start.
JOB = "CPUTRAIN_JOB"
# A child that is still on its way from fork to exec has no mark, and may be told to end for so long.
_LATE_SECONDS = 1.0
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def adopt_orphans() -> None:
    """Grandchildren whose parent dies become our children, rather than init's: so they can be found and ended."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Ends this process when its parent is gone, even if that was killed and could end no child."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(128 + signal.SIGKILL)


def is_guarded(environ: Mapping[str, str]) -> bool:
    """Whether this is a rank that has a guard already, or something that one started."""
    return bool(environ.get(_MARK))


def guard(environ: MutableMapping[str, str]) -> None:
    """Leaves a small process behind that ends what this one started, wherever it went, when this one is gone.

    Found by a mark in their environment: mpirun kills a rank's process group, and children may have left it.
    """
    if is_guarded(environ):
        return
    environ[_MARK] = mark = secrets.token_hex(8)
    guarded = os.getpid()
    if os.fork() == 0:
        try:
            _outlive(guarded, mark)
        finally:
            os._exit(0)  # whatever happens: it must never come back as a second rank


def _outlive(guarded: int, mark: str) -> None:
    os.setsid()
    os.closerange(0, 65_536)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGUSR1)
    if os.getppid() == guarded:
        signal.sigwait({signal.SIGUSR1})
    asked: set[int] = set()
    limit = time.monotonic() + _LATE_SECONDS
    while time.monotonic() < limit:
        new = set(marked(_MARK, mark)) - asked  # the guard itself was started without the mark
        for pid in new:
            send(pid, signal.SIGTERM)
        asked |= new
        time.sleep(_LATE_SECONDS / 4)
    for pid in marked(_MARK, mark):
        send(pid, signal.SIGKILL)


def marked(name: str, value: str) -> list[int]:
    """The processes, of those that we may look at, that were started with a variable of this value."""
    entry = f"{name}={value}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if entry in file.read().split(b"\0"):
                found.append(int(pid))
    return found


def end_descendants(seconds: float = 5.0) -> None:
    """Asks all descendants of this process to end, then kills those that are left."""
    import psutil

    for ask in (signal.SIGTERM, signal.SIGKILL):
        # What ends may leave orphans, which are ours from then on: hence several rounds.
        end = time.monotonic() + seconds
        asked: set[int] = set()
        while living := [child for child in psutil.Process().children(recursive=True) if _lives(child)]:
            for child in living:
                if child.pid not in asked:
                    asked.add(child.pid)
                    send(child.pid, ask)
            if time.monotonic() > end:
                break
            time.sleep(0.05)


def _lives(process: object) -> bool:
    """A zombie of ours is reaped here; other zombies are their parents' business."""
    import psutil

    assert isinstance(process, psutil.Process)
    with contextlib.suppress(psutil.Error, ChildProcessError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        os.waitpid(process.pid, os.WNOHANG)
    return False


def send(pid: int, number: int) -> None:
    """Unless it is gone, or its number has become another process's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt, as Ctrl-C does: what was begun is ended in one way."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def interrupted_code(interrupt: KeyboardInterrupt) -> int:
    """Of a process that Ctrl-C or SIGTERM ended."""
    return 128 + (signal.SIGTERM if interrupt.args else signal.SIGINT)


def exit_code(code: int) -> int:
    """As a shell counts: 128 and the signal's number where a signal ended the process."""
    return 128 - code if code < 0 else code
