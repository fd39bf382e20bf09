"""cputrain against stock PyTorch on standard jobs: steps in turns, with stock against itself as control."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from cputrain.trials import turns
from cputrain.trials.jobs import Job
from cputrain.trials.turns import Answer, Side

JOBS = ("minilm", "llama-135m")
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_SIDES = ("stock", "control", "cputrain")


@dataclass(frozen=True)
class Result:
    """Medians over rounds. `control`: stock's speed over that of another stock; what differs from 1 is noise."""

    job: str
    sequences: int
    length: int
    dtype: str
    rounds: int
    stock_seconds: float
    seconds: float
    times_faster: float
    control: float
    stock_memory: float
    memory: float


def compare(names: Sequence[str], dtype: str, budget: float, say: Callable[[str], None]) -> list[Result]:
    """Within `budget` seconds, as many rounds as there is time for, three if that takes half as long again."""
    command = ["-m", "cputrain.trials.worker"]
    begun = time.monotonic()
    with (
        closing(Side("stock", command, {})) as stock,
        closing(Side("control", command, {})) as control,
        closing(Side("cputrain", command, {})) as ours,
    ):
        sides = [stock, control, ours]
        results = []
        for number, name in enumerate(names):
            left = budget - (time.monotonic() - begun)
            results.append(_one(sides, name, dtype, left / (len(names) - number), say))
            for side in sides:
                side.ask("drop")
    return results


def _one(sides: Sequence[Side], name: str, dtype: str, budget: float, say: Callable[[str], None]) -> Result:
    begun = time.monotonic()
    job = _job(sides[0], name)
    for side in sides:
        say(f"{name}: {side.name}")
        of_side = job.but(dtype=dtype if side.name == "cputrain" else "stock")
        _asked(side, "build", job=dataclasses.asdict(of_side), layers=job.layers, share=0.9)
    job, memory = _warm(sides, job, budget)
    found: list[list[Answer]] = []
    while len(found) < _MOST_ROUNDS:
        passed = time.monotonic() - begun
        enough = len(found) >= _LEAST_ROUNDS or (found and passed > 1.5 * budget)
        if enough and passed + sum(answer["seconds"] for answer in found[-1]) > budget:
            break
        say(f"{name}: round {len(found) + 1}")
        order = sides[:: -1 if len(found) % 2 else 1]
        answers = next(turns.in_turns(order, 1, sequences=job.sequences))
        found.append(answers[:: -1 if len(found) % 2 else 1])
    stock, control, ours = ([answers[side]["seconds"] for answers in found] for side in range(len(_SIDES)))
    return Result(
        job=name,
        sequences=job.sequences,
        length=job.length,
        dtype=_asked(sides[-1], "chosen", dtype=dtype)["dtype"],
        rounds=len(found),
        stock_seconds=statistics.median(stock),
        seconds=statistics.median(ours),
        times_faster=turns.median_ratio(stock, ours),
        control=turns.median_ratio(stock, control),
        stock_memory=memory[0],
        memory=memory[-1],
    )


def _job(side: Side, name: str) -> Job:
    found = _asked(side, "resolve", model=name, task=None)
    sequences, length = found["usual"]
    return Job(name, found["config"], found["architecture"], found["layers"], sequences, length)


def _warm(sides: Sequence[Side], job: Job, budget: float) -> tuple[Job, list[float]]:
    """Memory of each side. Fewer sequences, where three rounds would take longer than there is time."""
    first = _asked(sides[0], "step", number=0, sequences=1)["seconds"]
    affordable = int(budget / (first * len(_SIDES) * (_LEAST_ROUNDS + 2)))
    job = job.but(sequences=max(1, min(job.sequences, affordable)))
    return job, [_asked(side, "measure", sequences=job.sequences, steps=2)["peak"] for side in sides]


def _asked(side: Side, request: str, **arguments: object) -> Answer:
    answer = side.ask(request, **arguments)
    if "no_memory" in answer:
        raise ValueError("the standard jobs have no room in the memory that is free: they need 6 GB.")
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer
