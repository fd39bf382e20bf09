"""What ranks leave for the agent that started them: which other rank they failed because of, and how far they were.

A survivor of a dead rank fails as well, and often ends before the rank that raised: who ended first doesn't tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from cputrain import settings

# Of an agent of `cputrain launch`, on the rank's own machine; a file for each rank that blames another one.
FOLDER = settings.BLAME_FOLDER
_FAILED = "failed"
# Exit code of a rank that was asked to end, has saved, and ends: what a shell says of one that SIGTERM ended.
STOPPED = 128 + signal.SIGTERM


class Blame(NamedTuple):
    culprit: int  # a global rank
    sentence: str


def tell(blame: Blame, environ: settings.Environ | None = None) -> None:
    """The first blame counts: what fails then fails because of it."""
    folder, rank = settings.value_of(FOLDER, environ), settings.value_of(settings.RANK, environ)
    if not folder or not rank or not os.path.isdir(folder) or os.path.exists(f"{folder}/{rank}"):
        return
    with contextlib.suppress(OSError):  # a full disk must not hide what is being raised
        Path(folder, f"unfinished-{rank}").write_text(json.dumps(blame))
        os.rename(f"{folder}/unfinished-{rank}", f"{folder}/{rank}")


def read(folder: str, rank: int) -> Blame | None:
    try:
        return Blame(*json.loads(Path(folder, str(rank)).read_text()))
    except FileNotFoundError:
        return None


def seconds_ago(folder: str, rank: int) -> float:
    """How long this rank has known of the cause; it may take a while to end after that."""
    return time.time() - Path(folder, str(rank)).stat().st_mtime


def note_step(step: int) -> None:
    """How far this rank's training is: a number in a file, which is still there when the rank was killed."""
    folder, rank = settings.value_of(FOLDER), settings.value_of(settings.RANK)
    if folder and rank:
        with contextlib.suppress(OSError):
            Path(folder, f"step-{rank}").write_text(str(step))


def step_of(folder: str, rank: int) -> int | None:
    """None before the first step."""
    try:
        return int(Path(folder, f"step-{rank}").read_text())
    except (FileNotFoundError, ValueError):
        return None


def note_exception(error: BaseException) -> None:
    """That this rank's script has raised."""
    folder, rank = settings.value_of(FOLDER), settings.value_of(settings.RANK)
    if folder and rank:
        with contextlib.suppress(OSError):
            first = str(error).strip().partition("\n")[0]
            Path(folder, f"exception-{rank}").write_text(f"{type(error).__name__}: {first}".rstrip(": "))


def exception_of(folder: str, rank: int) -> str:
    try:
        return Path(folder, f"exception-{rank}").read_text()
    except FileNotFoundError:
        return ""


def note_failure(folder: str) -> None:
    """Of an agent, before it ends the ranks because one of them has failed: what they have isn't to be saved."""
    with contextlib.suppress(OSError):
        Path(folder, _FAILED).touch()


def peer_has_failed(environ: settings.Environ | None = None) -> bool:
    """Whether a rank that is told to end now, is told so because of another one."""
    folder = settings.value_of(FOLDER, environ)
    return bool(folder) and os.path.exists(f"{folder}/{_FAILED}")


def forget_all(folder: str) -> None:
    """Before ranks are started anew."""
    for file in Path(folder).iterdir():
        file.unlink()
