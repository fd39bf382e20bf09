"""The checkpoints of an output folder: which there are, which is whole, which may go.

`_cputrain` has those that are on their way (`staging`), those that turned out bad (`bad`), and for a moment those
that are being removed (`removed`): what begins with `checkpoint-` is whole, or was written by other programs.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cputrain import output_folder
from cputrain.checkpoints import manifest, stock_files
from cputrain.checkpoints.manifest import Bad, Manifest
from cputrain.log import logger

PREFIX = "checkpoint-"
STAGING, BAD, REMOVED = "staging", "bad", "removed"
# Of those saved because time was up: the script's own are its business.
KEPT_BY_TIME = 2


class Found(NamedTuple):
    step: int
    path: Path


class Verdict(NamedTuple):
    """`manifest` is None if it is bad; `reason` says why it is, or what couldn't be checked."""

    manifest: Manifest | None
    reason: str = ""


def listed(output: Path) -> list[Found]:
    """By step, the last one first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(output):
            number = re.fullmatch(rf"{PREFIX}(\d+)", entry.name)
            if number and entry.is_dir():
                found.append(Found(int(number[1]), Path(entry.path)))
    return sorted(found, reverse=True)


def verdict(path: Path) -> Verdict:
    """Reads all of it."""
    try:
        if (path / manifest.NAME).exists():
            return Verdict(manifest.verify(path))
        return Verdict(stock_files.verify(path), "written without sums")
    except Bad as error:
        return Verdict(None, str(error))


def newest(output: Path, run: str | None = None) -> Iterator[tuple[Found, Manifest]]:
    """Those that verify, the last one first, `run`'s only if given; bad ones are named and set aside on the way."""
    for found in listed(output):
        if run is not None and not _is_of(found.path, run):
            continue
        answer = verdict(found.path)
        if answer.manifest is not None:
            yield found, answer.manifest
        else:
            set_aside(output, found.path, answer.reason)


def _is_of(path: Path, run: str) -> bool:
    """A damaged manifest may be this run's: its checkpoint is looked at, and found bad."""
    try:
        return manifest.read(path).run == run
    except Bad:
        return (path / manifest.NAME).exists()


def set_aside(output: Path, path: Path, reason: str) -> None:
    logger.error("%s isn't used: %s", path, reason)
    with contextlib.suppress(OSError):  # of a read-only folder: it was named
        _move(output, path, BAD)


def rotate(output: Path, run: str, keep: int | None, spared: Sequence[Path]) -> None:
    """Removes those beyond `keep`, and of those saved by time all but two: other runs' first, then those of few steps.

    The last of `spared` was just written, and is known to be good.
    """
    stays = {path.resolve() for path in spared if path.is_dir()}
    known = [_Known.of(found) for found in listed(output) if found.path.resolve() not in stays]
    known.sort(key=lambda one: (one.run == run, one.step), reverse=True)
    by_time = [one for one in known if one.by_time]
    too_many = by_time[KEPT_BY_TIME - _Known.of(Found(0, spared[-1])).by_time :]
    if keep is not None and keep > 0:
        too_many += known[max(keep - len(stays), 0) :]
    for path in dict.fromkeys(one.path for one in too_many):
        remove(output, path)


class _Known(NamedTuple):
    """What a checkpoint's manifest says, without looking at its files."""

    step: int
    path: Path
    run: str | None
    by_time: bool

    @classmethod
    def of(cls, found: Found) -> _Known:
        try:
            said = manifest.read(found.path)
        except Bad:
            return cls(*found, None, False)
        return cls(*found, said.run, said.by_time)


def remove(output: Path, path: Path) -> None:
    """Out of sight first: one that is half removed is never seen as a checkpoint."""
    try:
        shutil.rmtree(_move(output, path, REMOVED))
    except OSError as error:
        logger.warning("%s can't be removed: %s", path, error.strerror)


def _move(output: Path, path: Path, to: str) -> Path:
    folder = output_folder.make(output) / to
    folder.mkdir(exist_ok=True)
    target = folder / f"{path.name}.{secrets.token_hex(4)}"
    os.rename(path, target)
    return target


def put_in_place(output: Path, staged: Path, target: Path) -> None:
    """A whole checkpoint gets its name. One that has it already goes: until then this one is whole in `staging`."""
    replaced = _move(output, target, REMOVED) if target.exists() else None
    os.rename(staged, target)
    manifest.flush_name(target)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def clear(output: Path) -> None:
    """Finishes what a process left that was ended while it saved: a whole checkpoint gets its place, others go."""
    for found in sorted(output_folder.path(output).glob(f"{STAGING}/*/*")):
        target = output / found.name
        if (
            (found / manifest.NAME).exists()
            and verdict(found).manifest
            and not (target.exists() and verdict(target).manifest)
        ):
            put_in_place(output, found, target)
    for name in (STAGING, REMOVED):
        shutil.rmtree(output_folder.path(output) / name, ignore_errors=True)
