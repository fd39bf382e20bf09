"""What ranks that fail because of another one leave for the agent that started them, which then names that one.

A survivor of a dead rank fails as well, and often ends before the rank that raised: who ended first doesn't tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from cputrain import settings

# Of an agent of `cputrain launch`, on the rank's own machine; a file for each rank that blames another one.
FOLDER = settings.BLAME_FOLDER
_FAILED = "failed"


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
