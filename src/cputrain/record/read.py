"""Reads records of runs, also broken ones and such as others have made up: nothing in them is trusted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cputrain import output_folder
from cputrain.record.lines import Entry, parsed
from cputrain.record.recorder import PHASES

_FILE = re.compile(r"run-(\d{1,6})\.jsonl")
_MOST_BYTES = 1 << 30
_MOST = 1e15  # no second, byte or token of a run is beyond it
NUMBERS = ("t", "step", "n", "s", "loss", "lr", "real", "padded", "gflop", "rss")


@dataclass
class Rank:
    """One rank's record. A training that was started anew has several starts."""

    rank: int
    starts: list[Entry] = field(default_factory=list)
    steps: list[Entry] = field(default_factory=list)  # numbers are finite; `clock` is the time since the first start
    events: list[Entry] = field(default_factory=list)
    metrics: list[Entry] = field(default_factory=list)
    end: Entry | None = None
    broken: int = 0  # lines that couldn't be read

    @property
    def head(self) -> Entry:
        return self.starts[-1] if self.starts else {}


@dataclass
class Run:
    name: str
    ranks: list[Rank]

    @property
    def first(self) -> Rank:
        return self.ranks[0]


def read(given: str | Path) -> Run:
    """A run's output folder, the folder `_cputrain` in it, or one rank's file."""
    path = Path(given)
    files = [path] if path.is_file() else _files(path)
    ranks = [_rank(file) for file in files]
    ranks = [rank for rank in ranks if rank.steps or rank.starts]
    if not ranks:
        raise ValueError(f"{given} holds no record that can be read: the file is empty or broken.")
    folder = path.parent if path.is_file() else path
    named = folder.parent if folder.name == output_folder.NAME else folder
    return Run(named.resolve().name or str(given), sorted(ranks, key=lambda rank: rank.rank))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"there is no {path}: give the output folder of a training.")
    folder = path if path.name == output_folder.NAME else output_folder.path(path)
    found = sorted(file for file in folder.glob("run-*.jsonl") if _FILE.fullmatch(file.name)) if folder.is_dir() else []
    if not found:
        raise ValueError(
            f"{path} holds no record of a run ({output_folder.NAME}/run-0.jsonl): train with `cputrain run` or "
            "`cputrain launch` and --output_dir, or say where with --record FOLDER."
        )
    return found


def _rank(file: Path) -> Rank:
    named = _FILE.fullmatch(file.name)
    rank = Rank(int(named[1]) if named else 0)
    before = 0.0
    clock = 0.0
    for entry in _entries(file, rank):
        kind = entry["kind"]
        if kind == "run":
            rank.starts.append(entry)
            before = clock
        elif kind == "steps":
            made = _steps(entry, before)
            if made is None:
                rank.broken += 1
                continue
            clock = made["clock"]
            _forget_what_is_done_again(rank, made)
            rank.steps.append(made)
        elif kind in ("event", "metrics"):
            (rank.events if kind == "event" else rank.metrics).append(_moment(entry, before))
        elif kind == "end":
            rank.end = entry
    return rank


def _entries(file: Path, rank: Rank) -> Iterator[Entry]:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{file} has more than {_MOST_BYTES >> 20} MiB: this is no record of a run.")
        with file.open("rb") as lines:
            for line in lines:
                entry = parsed(line)
                if entry is not None:
                    yield entry
                elif line.strip():
                    rank.broken += 1
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}.") from None


def _steps(entry: Entry, before: float) -> Entry | None:
    """Only what we know, and only numbers."""
    found: Entry = {name: value for name in NUMBERS if (value := number(entry.get(name))) is not None}
    if "step" not in found or "s" not in found or found["s"] < 0:
        return None
    found["n"] = max(1, int(found.get("n", 1)))
    phases = entry.get("phases")
    phases = phases if isinstance(phases, dict) else {}
    found["phases"] = {name: value for name in PHASES if (value := number(phases.get(name))) is not None}
    found["clock"] = before + found.get("t", 0.0)
    return found


def _moment(entry: Entry, before: float) -> Entry:
    return {**entry, "clock": before + (number(entry.get("t")) or 0.0), "step": number(entry.get("step")) or 0}


def _forget_what_is_done_again(rank: Rank, made: Entry) -> None:
    """A training that goes on from a checkpoint does the steps after it once more."""
    while rank.steps and rank.steps[-1]["step"] >= made["step"]:
        rank.steps.pop()


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) < _MOST else None
