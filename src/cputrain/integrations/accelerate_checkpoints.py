"""Accelerate's checkpoints: `save_state` writes them whole or not at all, `load_state` verifies, and executes nothing.

Ranks need not call `save_state` together (many scripts let rank 0 do it alone), so nothing here waits for others: rank
0 stages all that it writes and puts it in place with a manifest; another rank adds the state of its random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator as stock
import torch

from cputrain import output_folder, settings
from cputrain.checkpoints import folder, manifest, stock_files, writing
from cputrain.checkpoints.manifest import Bad, Manifest
from cputrain.log import logger


class CheckpointingAccelerator:
    """A part of our Accelerator."""

    project_configuration: Any
    project_dir: str | None
    why_stock: str | None

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        named = self.project_configuration.automatic_checkpoint_naming
        if self.why_stock is not None or (output_dir is None and not named):
            return super().save_state(output_dir, *args, **kwargs)  # type: ignore[misc]
        target = Path(self._next_name() if named else os.path.expanduser(str(output_dir)))
        with _names_given(self.project_configuration):
            if settings.is_first_rank():
                save = functools.partial(super().save_state, **kwargs)  # type: ignore[misc]
                saved, limit = _save(target, lambda place: save(place, *args)), self.project_configuration.total_limit
                if saved and named and limit is not None:
                    _rotate(target.parent, limit, target)
            else:
                super().save_state(str(target), *args, **kwargs)  # type: ignore[misc]
        return target

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self.why_stock is not None:
            super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
            return
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = str(_newest(self._checkpoints()))
        path = Path(os.path.expanduser(input_dir or ""))
        if input_dir is not None and path.is_dir() and (reason := _why_bad(path)):
            raise ValueError(f"{input_dir} can't be loaded: {reason}.")
        with _plain_values_only():
            super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
        if input_dir is not None and not (path / f"random_states_{self.process_index}.pkl").exists():  # type: ignore[attr-defined]
            logger.warning(
                "%s has no random numbers of this rank: its draws are others than they would have been", path
            )

    def _checkpoints(self) -> Path:
        return Path(str(self.project_dir), "checkpoints")

    def _next_name(self) -> Path:
        number = self.project_configuration.iteration
        target = self._checkpoints() / f"checkpoint_{number}"
        if settings.is_first_rank() and target.exists():
            raise ValueError(f"{target} exists already: set project_configuration.iteration to another number.")
        return target


@contextlib.contextmanager
def _names_given(configuration: Any) -> Iterator[None]:
    """Stock removes old checkpoints before it writes the new one, unless it is told where to write."""
    before, configuration.automatic_checkpoint_naming = configuration.automatic_checkpoint_naming, False
    try:
        yield
    finally:
        configuration.automatic_checkpoint_naming = before


def _save(target: Path, save: Callable[[str], Any]) -> bool:
    """What can't be written leaves the training running, and what was there as it was."""
    try:
        staging = output_folder.make(target.parent) / folder.STAGING / secrets.token_hex(8)
        staged = staging / target.name
        staged.mkdir(parents=True)
        try:
            save(str(staged))
            files = manifest.flushed(staged, manifest.files_in(staged))
            manifest.write(staged, Manifest(0, settings.value_of(settings.RUN_ID), files))
            _put_in_place(staged, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except Exception as error:
        if not writing.cannot_write(error):
            raise
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        logger.error("%s was not saved, the training goes on: %s", target, why)
        return False
    return True


def _put_in_place(staged: Path, target: Path) -> None:
    if not target.exists() or _is_ours_alone(target):
        with contextlib.suppress(FileExistsError):
            folder.put_in_place(target.parent, staged, target)
            return
    # There is more in it: other ranks' files, or the script's own.
    (target / manifest.NAME).unlink(missing_ok=True)
    for name in manifest.files_in(staged):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged / name, target / name)
    manifest.flush_folder(target)
    os.replace(staged / manifest.NAME, target / manifest.NAME)
    manifest.flush_folder(target)


def _is_ours_alone(target: Path) -> bool:
    try:
        return set(manifest.files_in(target)) == set(manifest.read(target).files)
    except Bad:
        return False


def _rotate(checkpoints: Path, limit: int, newest: Path) -> None:
    others = [path for path in _by_number(checkpoints) if path != newest]
    for path in others[max(limit - 1, 0) :]:
        folder.remove(checkpoints, path)


def _newest(checkpoints: Path) -> Path:
    """The newest that is whole; rank 0 sets the others aside."""
    for path in _by_number(checkpoints):
        reason = _why_bad(path)
        if not reason:
            return path
        if settings.is_first_rank():
            folder.set_aside(checkpoints, path, reason)
    raise ValueError(f"there is no checkpoint in {checkpoints} that is whole.")


def _by_number(checkpoints: Path) -> list[Path]:
    """The last one first."""
    found = [(int(n[1]), path) for path in checkpoints.glob("*") if (n := re.fullmatch(r"checkpoint_(\d+)", path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _why_bad(path: Path) -> str:
    """Empty if it is whole; what stock wrote, and other ranks, as far as the files tell."""
    try:
        names = manifest.verify(path).files if (path / manifest.NAME).exists() else {}
        stock_files.verify_files(path, [name for name in manifest.files_in(path) if name not in names])
    except Bad as bad:
        return str(bad)
    return ""


@contextlib.contextmanager
def _plain_values_only() -> Iterator[None]:
    """Stock unpickles what a script has registered."""
    before, stock.load_custom_state = stock.load_custom_state, _load_custom_state  # type: ignore[attr-defined]
    try:
        yield
    finally:
        stock.load_custom_state = before  # type: ignore[attr-defined]


def _load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    file = f"{path}/custom_checkpoint_{index}.pkl"
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{file} has more than tensors and plain values ({what[1] if what else 'objects'}), which loading would "
            "execute: let state_dict() of the registered object return plain values."
        ) from None
    obj.load_state_dict(found)
