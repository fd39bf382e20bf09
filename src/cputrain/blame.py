"""What ranks that fail because of another one leave for the agent that started them, which then names that one.

A survivor of a dead rank fails as well, and often ends before the rank that raised: who ended first doesn't tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# Of an agent of `cputrain launch`, on the rank's own machine; a file for each rank that blames another one.
FOLDER = "CPUTRAIN_BLAME_FOLDER"


class Blame(NamedTuple):
    culprit: int  # a global rank
    sentence: str


def tell(blame: Blame, environ: Mapping[str, str] = os.environ) -> None:
    """The first blame counts: what fails then fails because of it."""
    folder, rank = environ.get(FOLDER), environ.get("RANK")
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


def forget_all(folder: str) -> None:
    """Before ranks are started anew."""
    for file in Path(folder).iterdir():
        file.unlink()
