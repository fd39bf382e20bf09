"""A record's file: JSON lines that only grow, until the file is too large and its older lines are thinned.

A file that can't be written ends the record, and never the training.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cputrain.log import say_once

Entry = dict[str, Any]
MOST_BYTES = 50 << 20
# What stands in a line of steps, by how two neighbouring lines become one.
_SUMS, _LAST, _MOST = ("n", "s", "real", "padded", "gflop"), ("t", "step", "lr"), ("rss",)


class Lines:
    def __init__(self, path: Path, goes_on: bool, most: int = MOST_BYTES) -> None:
        """`goes_on`: the same training was started anew; otherwise what stands there is another run's."""
        self.path, self._most = path, most
        self._file: int | None = None
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not goes_on and path.exists():
                os.replace(path, path.with_suffix(".previous.jsonl"))
            self._open()
        except OSError as error:
            self._give_up(error)

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = to_line(entry)
        try:
            if self._size + len(line) > self._most:
                self._thin()
            self._size += os.write(self._file, line)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                os.close(self._file)
            except OSError as error:  # a file system across the network says only now that it is full
                self._give_up(error)
        self._file = None

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":  # the last run ended within a line
            self._size += os.write(self._file, b"\n")

    def _thin(self) -> None:
        """A new file takes the old one's place when it is whole."""
        entries = [entry for entry in map(parsed, self.path.read_bytes().splitlines()) if entry is not None]
        beside = self.path.with_suffix(".thinned")
        beside.write_bytes(b"".join(map(to_line, thinned(entries))))
        os.replace(beside, self.path)
        assert self._file is not None
        os.close(self._file)
        self._open()

    def _give_up(self, error: OSError) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None
        say_once(f"the run's record ends: {self.path} can't be written ({error.strerror}); the training goes on")


def to_line(entry: Mapping[str, Any]) -> bytes:
    """JSON has no NaN: a loss that isn't a number becomes null, and a reader of any language can read the line."""
    try:
        text = json.dumps(entry, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(entry), separators=(",", ":"))
    return text.encode() + b"\n"


def parsed(line: bytes) -> Entry | None:
    """None if this is no entry: the line that was written when the process or the disk came to its end, for example."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("kind"), str) else None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def thinned(entries: Sequence[Entry]) -> list[Entry]:
    """The older half with two lines of steps made one each; what happened between them (events) stays."""
    half = len(entries) // 2
    kept: list[Entry] = []
    for entry in entries[:half]:
        before = kept[-1] if kept else None
        if before is not None and before["kind"] == entry["kind"] == "steps" and not before.get("two"):
            kept[-1] = {**_together(before, entry), "two": True}
        else:
            kept.append(entry)
    for entry in kept:
        entry.pop("two", None)
    if len(kept) == half:  # nothing could be made one: these are events, and the oldest are dropped
        kept = [entry for number, entry in enumerate(kept) if number >= half // 2 or entry["kind"] == "run"]
    return [*kept, *entries[half:]]


def _together(first: Entry, second: Entry) -> Entry:
    both = {name: first.get(name, 0) + second.get(name, 0) for name in _SUMS if name in first or name in second}
    both |= {name: second[name] for name in _LAST if name in second}
    both |= {
        name: max(one.get(name, 0) for one in (first, second)) for name in _MOST if name in first or name in second
    }
    losses = [(one["loss"], one.get("n", 1)) for one in (first, second) if one.get("loss") is not None]
    if losses:
        both["loss"] = sum(loss * number for loss, number in losses) / sum(number for _, number in losses)
    phases = [one.get("phases", {}) for one in (first, second)]
    names = dict.fromkeys([*phases[0], *phases[1]])
    return {"kind": "steps", **both, "phases": {name: sum(one.get(name, 0) for one in phases) for name in names}}
