"""Ending processes for good: the ones that we started, and what they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def adopt_orphans() -> None:
    """Grandchildren whose parent dies become our children, rather than init's: so they can be found and ended."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Ends this process when its parent is gone, even if that was killed and could end nobody."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(128 + signal.SIGKILL)


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
                    _send(child.pid, ask)
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


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def exit_code(code: int) -> int:
    """As a shell counts: 128 and the signal's number where a signal ended the process."""
    return 128 - code if code < 0 else code
