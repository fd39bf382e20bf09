"""How far a plan is off in runs that left a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cputrain.plan.estimate import Estimate
from cputrain.record import read
from cputrain.record.read import Run, number


@dataclass(frozen=True)
class Compared:
    """A run's figures, and the plan's for the same batches. None: the record doesn't say. `why_not`: not comparable."""

    run: str
    why_not: str | None = None
    seconds: float | None = None
    planned_seconds: float | None = None
    memory: float | None = None
    planned_memory: float | None = None


def compare(folder: str | Path, estimate: Estimate) -> Compared:
    run = read.read(folder)
    head = run.first.head
    why_not = _why_not(head, estimate)
    if why_not:
        return Compared(run.name, why_not)
    steps = run.first.steps[1:] if len(run.first.steps) > 2 else run.first.steps
    taken = sum(step["n"] for step in steps)
    seconds = sum(step["s"] for step in steps) / taken
    job = estimate.measured.job
    real, padded = (sum(step.get(name, 0.0) for step in steps) / taken for name in ("real", "padded"))
    accumulation = number(_of(head, "arguments").get("gradient_accumulation_steps")) or 1.0
    # As many sequences of the plan's lengths as these tokens make: of padding dropped, or kept.
    tokens = real if job.padding == "drop" else padded
    share = job.real if job.padding == "drop" else 1.0
    sequences = tokens / accumulation / (job.length * share) if tokens else float(job.sequences)
    step = estimate.step(sequences)
    planned = accumulation * (step.forward + step.backward) + step.optimizer
    return Compared(run.name, None, seconds, planned, _peak(run), estimate.peak(sequences))


def _peak(run: Run) -> float | None:
    ends = [number(rank.end.get("peak")) for rank in run.ranks if rank.end is not None]
    return max((one for one in ends if one), default=None)


def _why_not(head: dict[str, Any], estimate: Estimate) -> str | None:
    measured = estimate.measured
    model = _of(head, "model")
    planned = {name: measured.at(name, measured.job.layers, 1) for name in ("parameters", "trained")}
    for name, value in planned.items():
        if number(model.get(name)) != value:
            return f"it had {number(model.get(name)) or 0:,.0f} {name}, the plan {value:,.0f}"
    if head.get("dtype") != measured.dtype:
        return f"it ran in {str(head.get('dtype'))[:20]}, the plan is for {measured.dtype}"
    if number(head.get("threads")) != measured.threads:
        return f"it had {number(head.get('threads')) or 0:.0f} threads, the plan has {measured.threads}"
    if _of(head, "machine").get("cpu") != measured.cpu:
        return "it ran on another CPU"
    return None


def _of(head: dict[str, Any], name: str) -> dict[str, Any]:
    found = head.get(name)
    return found if isinstance(found, dict) else {}
