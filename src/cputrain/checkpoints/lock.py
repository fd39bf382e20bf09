"""Who writes checkpoints into an output folder: of two writers the later one wins, and the older stops.

A restarted run must not wait for what is left of its predecessor, perhaps on a machine that can't be reached. So the
lock is taken from it: a file with the holder's number, which is read again before a checkpoint takes its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from cputrain import output_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_HOLDER, _DOOR = "writer.json", "writer.lock"


class Superseded(RuntimeError):
    """Another process writes into the folder now."""


class Lock:
    """Of one output folder; taken when it is made."""

    def __init__(self, output: Path) -> None:
        self._folder = output_folder.make(output)
        self.name = secrets.token_hex(8)
        with self._door():
            number = int(_read(self._folder).get("number", 0)) + 1
            holder = {"number": number, "name": self.name, "host": socket.gethostname(), "process": os.getpid()}
            beside = self._folder / f"{_HOLDER}.{self.name}"
            beside.write_text(json.dumps(holder))
            os.replace(beside, self._folder / _HOLDER)

    @staticmethod
    def is_held_by(output: Path, name: str) -> bool:
        return bool(_read(output_folder.path(output)).get("name") == name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While it lasts no other process can take the lock; Superseded if one has."""
        with self._door():
            found = _read(self._folder)
            if found.get("name") != self.name:
                other = f"process {found.get('process', '?')} on {found.get('host', 'an unknown machine')}"
                raise Superseded(f"{other} writes checkpoints into {self._folder.parent} since: this training stops.")
            yield

    @contextlib.contextmanager
    def _door(self) -> Iterator[None]:
        """Only a moment's; the kernel opens it when its process ends. Not every network file system has such locks."""
        with open(self._folder / _DOOR, "w") as file:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _read(folder: Path) -> dict:
    try:
        found = json.loads((folder / _HOLDER).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
