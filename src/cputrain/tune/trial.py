"""One candidate, run for a few real steps by `cputrain launch`, in folders that are removed; measured by its record."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from cputrain import settings
from cputrain.launch import config_file, import_path, processes
from cputrain.launch.config import Config
from cputrain.record import read, recorder
from cputrain.record.lines import parsed
from cputrain.secrets_in_clear import shown_value

# The first steps allocate memory and choose formats.
WARM_UP = 2
_POLL_SECONDS = 0.1
# What belongs to a run of the user's, or would win over the candidate's own settings.
_NOT_INHERITED = (
    *(settings.RESUME, settings.RUN_ID, settings.SAVE_EVERY, settings.RECORD, settings.PROGRESS),
    *(settings.THREADS, settings.COMMUNICATION_CORES, settings.WORKERS),
)
_LAST_LINES = 12
# How a trial was ended by us: its steps are too slow to win, or it takes too long in all.
_SLOW, _LATE = "slow", "late"


@dataclass(frozen=True)
class Training:
    """The user's command. `batch_option` names the script's own option for the batch of a process."""

    words: tuple[str, ...]
    may_write: bool = False
    batch_option: str | None = None

    def sharing_batch(self, ranks: int) -> tuple[str, ...]:
        """The words for so many ranks; Trainer's batch is shared in the rank itself."""
        return with_batch(self.words, self.batch_option, ranks) if self.batch_option else self.words


@dataclass(frozen=True)
class Measured:
    """`seconds` of a step, or the `problem`; `took`: the whole trial. `arguments` are a Trainer's."""

    seconds: float | None
    took: float
    problem: str = ""
    arguments: Mapping[str, Any] | None = None


def with_batch(words: tuple[str, ...], option: str, ranks: int) -> tuple[str, ...]:
    """The option's value divided by the number of ranks; ValueError if it isn't there, or can't be."""
    found = list(words)
    for place, word in enumerate(found):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        value = value if equals else found[place + 1] if place + 1 < len(found) else ""
        if not value.isdecimal() or int(value) == 0 or int(value) % ranks:
            raise ValueError(f"{option} is {value or 'nothing'}: {ranks} ranks can't share that evenly.")
        shared = str(int(value) // ranks)
        if equals:
            found[place] = f"{name}={shared}"
        else:
            found[place + 1] = shared
        return tuple(found)
    raise ValueError(f"the script's arguments have no {option}: its value is the batch that the ranks share.")


def run(
    training: Training,
    config: Config,
    steps: int,
    watch: Callable[[int], None] = lambda step: None,
    patience: float = math.inf,
    most: float = math.inf,
) -> Measured:
    """`watch` hears of each step. A trial whose steps take longer than `patience`, in seconds, is ended early.

    One that takes longer than `most` in all has failed: it may wait for ever.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cputrain-tune-", ignore_cleanup_errors=True) as folder:
        file, output = Path(folder, "config.yaml"), Path(folder, "output")
        config_file.write(replace(config, max_restarts=0, log_dir=None), file)
        program = [sys.executable, import_path.program("__main__.py"), "launch", "--config_file", str(file)]
        words = [*program, "--record", str(output), *training.sharing_batch(config.num_processes)]
        with open(Path(folder, "log"), "w+b") as log:
            ended = _run(words, _environment(training, steps), log, output, watch, patience, began + most)
            seconds, arguments = _seconds(output, steps, ended == _SLOW)
            problem = "" if seconds is not None else _problem(log, ended, most, output)
    return Measured(seconds, time.monotonic() - began, problem, arguments)


def _environment(training: Training, steps: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    asked = {settings.TRIAL_STEPS: str(steps), settings.PROGRESS: "off"}
    return {**kept, **asked, settings.TRIAL_OWN_LOOPS: str(training.may_write).lower()}


def _run(
    words: list[str],
    environ: dict[str, str],
    log: IO[bytes],
    output: Path,
    watch: Callable[[int], None],
    patience: float,
    until: float,
) -> int | str:
    """The exit code, or why it was ended."""
    processes.adopt_orphans()
    child = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    record, seen = recorder.path_of(output, 0), 0
    try:
        while (code := child.poll()) is None:
            steps = _steps_so_far(record)
            if len(steps) > seen:
                seen = len(steps)
                watch(seen)
            spent = sum(steps[WARM_UP:])
            if spent > patience or time.monotonic() > until:
                return _SLOW if spent > patience else _LATE
            time.sleep(_POLL_SECONDS)
        return code
    finally:
        processes.end_descendants()
        child.wait()


def _steps_so_far(record: Path) -> list[float]:
    try:
        lines = record.read_bytes().splitlines()
    except OSError:
        return []
    entries = [entry for entry in map(parsed, lines) if entry is not None and entry["kind"] == "steps"]
    return [entry["s"] for entry in entries]


def _seconds(output: Path, steps: int, ended_early: bool) -> tuple[float | None, Mapping[str, Any] | None]:
    """Of a step, on average: the steps of all trials are the same batches."""
    try:
        first = read.read(output).first
    except ValueError:
        return None, None
    arguments = first.head.get("arguments") or None
    measured = [entry for entry in first.steps if entry["step"] > WARM_UP]
    if not measured or not (ended_early or first.steps[-1]["step"] >= steps):
        return None, arguments
    return sum(entry["s"] for entry in measured) / sum(entry["n"] for entry in measured), arguments


def _problem(log: IO[bytes], ended: int | str, most: float, output: Path) -> str:
    steps = len(_steps_so_far(recorder.path_of(output, 0)))
    if ended == _LATE:
        return f"it didn't end within {most:.0f} s, after {steps} steps"
    if not isinstance(ended, int) or ended == 0:
        did = f"ended after {steps} step{'s' * (steps != 1)}" if steps else "ended without a step of an optimizer"
        return f"the script {did}"
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return "\n".join([f"exit code {processes.exit_code(ended)}", *map(shown_value, lines[-_LAST_LINES:])])
