"""Measurements in a file, so that a plan can be made on another machine than the one that will train."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from cputrain import hardware
from cputrain.plan import measured
from cputrain.plan.measured import Measured
from cputrain.trials.jobs import Job

_FORMAT = 1


class Profile:
    """What was measured on one machine, by job."""

    def __init__(self, machine: dict[str, Any], found: list[Measured]) -> None:
        self.machine, self.found = machine, found

    @classmethod
    def of_this_machine(cls) -> Profile:
        known = hardware.this_machine()
        machine = {"cpu": known.model.value, "cores": known.usable_cores.value, "memory": known.usable_memory.value}
        return cls(machine, [])

    def of(self, job: Job, ranks: int) -> Measured | None:
        """Of this job with any number of sequences."""
        return next((one for one in self.found if _key(one.job) == _key(job) and one.ranks == ranks), None)

    def gflops(self, dtype: str) -> float | None:
        return max((one.gflops for one in self.found if one.dtype == dtype), default=None)

    def add(self, new: Measured) -> None:
        self.found = [one for one in self.found if _key(one.job) != _key(new.job) or one.ranks != new.ranks] + [new]


def _key(job: Job) -> Any:
    return dataclasses.asdict(job.but(name="", sequences=0, batch_file=None))


def scaled(here: Measured, there: Profile) -> Measured:
    """What was measured here, at the other machine's speed of products: a first idea, no more."""
    other = there.gflops(here.dtype) or max(one.gflops for one in there.found)
    ratio = here.gflops / other
    points = [
        [{k: v * ratio if k in measured.SECONDS else v for k, v in point.items()} for point in row]
        for row in here.points
    ]
    return dataclasses.replace(here, points=points, gflops=other, cpu=str(there.machine.get("cpu")))


def load(path: Path) -> Profile:
    try:
        content = json.loads(path.read_text())
        if content["cputrain_profile"] != _FORMAT:
            raise ValueError("another format")
        profile = Profile(dict(content["machine"]), [measured.from_json(one) for one in content["measured"]])
        if not profile.found:
            raise ValueError("nothing measured")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is no profile of this release: write one with --save-profile {path}.") from None
    return profile


def save(path: Path, profile: Profile) -> None:
    content = {
        "cputrain_profile": _FORMAT,
        "machine": profile.machine,
        "measured": [one.to_json() for one in profile.found],
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=1))
        os.replace(beside, path)
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror}.") from None
