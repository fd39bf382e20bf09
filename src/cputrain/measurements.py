"""Numbers that were measured on this machine, in the user's cache folder: a file for each kind."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

from cputrain import __version__, hardware, settings, user_folders
from cputrain.log import logger


def key(*of: str) -> str:
    """Of a number that holds for this CPU, these versions, and what users hold torch's libraries to."""
    limits = [f"{name}={settings.value_of(name)}" for name in settings.PRODUCT_LIMITS if settings.is_set(name)]
    machine, isa = hardware.this_machine().model.value, hardware.best_isa()[0]
    return " | ".join((machine, isa, f"cputrain {__version__}", f"torch {torch.__version__}", *limits, *of))


def path(kind: str) -> Path | None:
    """None where there is no cache folder: then everything is measured again."""
    cache = user_folders.cache()
    return cache / "cputrain" / f"{kind}.json" if cache else None


def known(kind: str) -> dict[str, float]:
    file = path(kind)
    try:
        found = json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, float) and v > 0} if isinstance(found, dict) else {}


def remember(kind: str, key: str, value: float) -> None:
    """In one go, so that two processes at once leave one whole file."""
    target = path(kind)
    if target is None:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
            json.dump(known(kind) | {key: value}, file, indent=1)
        os.replace(file.name, target)
    except OSError as error:
        logger.info("%s can't be remembered: %s", kind.replace("_", " "), error)
