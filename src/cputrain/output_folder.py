"""`OUT/_cputrain/`: what cputrain keeps in a training's output folder, apart from what the script itself writes there.

The name begins with an underscore, because uploads to the hub skip `_*`, and isn't `checkpoint-*`, because Trainer's
rotation deletes those.
"""

from __future__ import annotations

from pathlib import Path

NAME = "_cputrain"


def path(output: str | Path) -> Path:
    """Where it is, or would be."""
    return Path(output) / NAME


def make(output: str | Path) -> Path:
    """The folder, made with those around it as far as they are missing; OSError if it can't be."""
    folder = path(output)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
