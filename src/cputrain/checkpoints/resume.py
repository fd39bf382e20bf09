"""From which checkpoint a training goes on: rank 0 chooses, and every rank verifies what it sees.

CPUTRAIN_RESUME: `never`, `auto` (the newest that fits), or a folder. Without it, only a checkpoint of this very run
(CPUTRAIN_RUN_ID) is taken: a first start has none, and a restart goes on where the run was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cputrain import settings
from cputrain.checkpoints import folder, ranks
from cputrain.log import logger

# Why a checkpoint that is whole doesn't fit, or nothing.
Fits = Callable[[Path], str]

_trainings: Counter[str] = Counter()  # of this process, by output folder


def name_of_run(output: Path) -> str:
    """Of the training that begins now: a script may train several times into one folder. Empty without a launcher."""
    run = settings.value_of(settings.RUN_ID)
    key = str(output.resolve())
    _trainings[key] += 1
    return run if not run or _trainings[key] == 1 else f"{run}#{_trainings[key]}"


def has_trainings() -> bool:
    """Whether a training of this process can be resumed."""
    return bool(_trainings)


def asked() -> str:
    """auto, never, a folder, or nothing."""
    return settings.value_of(settings.RESUME)


def chosen(output: Path, run: str, fits: Fits) -> Path | None:
    """What the environment says. Of all ranks."""
    wanted = asked()
    if wanted == "never" or (not wanted and not run):
        return None
    if wanted and wanted != "auto":
        return verified(Path(wanted), fits)
    found = newest(output, None if wanted else run, fits)
    if found is None and wanted and ranks.number() == 0:
        logger.info("there is no checkpoint in %s to go on from: the training begins", output)
    return found


def newest(output: Path, run: str | None, fits: Fits) -> Path | None:
    """The newest that every rank finds whole, and that fits. Of all ranks."""
    candidates = (found.path.name for found, _ in folder.newest(output, run)) if ranks.number() == 0 else iter(())
    while name := ranks.of_first(next(candidates, "")):
        path = output / name
        reason = _why_not(path, fits, ranks.number() == 0)
        if not reason:
            return path
        if ranks.number() == 0:
            logger.warning("%s isn't used: %s", path, reason)
    return None


def verified(path: Path, fits: Fits) -> Path:
    """The one that was named, or a sentence. Of all ranks."""
    reason = _why_not(path, fits, False) if path.is_dir() else "there is no such folder"
    if reason:
        raise ValueError(f"the training can't go on from {path}: {reason}.")
    return path


def _why_not(path: Path, fits: Fits, is_verified: bool) -> str:
    answer = folder.Verdict(None) if is_verified else folder.verdict(path)
    reason = answer.reason if answer.manifest is None and not is_verified else ""
    found = ranks.of_all(reason or fits(path))
    return next((f"rank {rank}: {why}" if rank else why for rank, why in enumerate(found) if why), "")
