"""A search on this machine: a first trial tells how long steps take, then candidates are measured until one has won."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cputrain.launch.config import Config
from cputrain.tune import trial
from cputrain.tune.candidates import Candidate
from cputrain.tune.search import OutOfTime, Verdict, search
from cputrain.tune.trial import WARM_UP, Measured, Training
from cputrain.tune.tried import Tried

_FIRST_STEPS = WARM_UP + 3
# The first trial is waited for so long, however small the budget: nothing can be said without it.
_FIRST_SECONDS = 120.0
# Of a trial so much of the budget goes into steps that count: enough of them in ten minutes, and few in one.
_SHARE_OF_A_TRIAL = 1 / 150
_LEAST_MEASURED, _MOST_MEASURED = 4, 100
# The first round may take so much of the budget: later ones repeat it for fewer and fewer.
_SHARE_OF_FIRST_ROUND = 0.7
# No trial begins that could hardly end in time, but for the first: each call brings the search forward.
_LEAST_OF_A_TRIAL = 0.5
# A candidate that takes twice as long as the best is out, and needn't be measured to its end.
_PATIENCE = 2.0
# One that takes this many times the first trial's time in all waits for something.
_LONGEST = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """`left_out`: candidates that aren't tried, and why; `batch`: a Trainer's, of one process."""

    candidates: list[Candidate]
    left_out: list[tuple[Candidate, str]]
    steps: int
    batch: int | None
    accumulation: int


@dataclass
class Session:
    """`say` gets lines, `watch` what is going on now. `steps`: of each trial, if the user chose."""

    training: Training
    base: Config
    tried: Tried
    budget: float  # seconds
    say: Say
    watch: Say
    steps: int | None = None

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.budget
        self._best = math.inf
        self._trials = 0

    def plan(self, candidates: Sequence[Candidate]) -> Plan:
        """The simplest candidate is run for a few steps, unless an earlier session did."""
        if not self.tried.facts:
            self.tried.note_facts(self._first(candidates[0]))
        facts = self.tried.facts
        batch, accumulation = facts.get("batch"), int(facts.get("accumulation") or 1)
        kept: list[Candidate] = []
        left_out: list[tuple[Candidate, str]] = []
        for one in candidates:
            why = self._why_not(one, batch)
            left_out += [(one, why)] if why else []
            kept += [] if why else [one]
        most = max(2, int(_SHARE_OF_FIRST_ROUND * self.budget / facts["took"]))
        left_out += [(one, "the budget is too small") for one in kept[most:]]
        return Plan(kept[:most], left_out, facts["steps"], batch, accumulation)

    def _first(self, candidate: Candidate) -> dict[str, Any]:
        self.watch("a first trial, to see how long a step takes")
        found = trial.run(
            self.training, candidate.config(self.base), _FIRST_STEPS, most=max(self.budget, _FIRST_SECONDS)
        )
        if found.seconds is None:
            raise ValueError(f"the training can't be tuned: {found.problem}")
        measured = self.budget * _SHARE_OF_A_TRIAL / found.seconds
        steps = self.steps or WARM_UP + min(_MOST_MEASURED, max(_LEAST_MEASURED, math.ceil(measured)))
        batch, accumulation = _batch(found)
        took = found.took + (steps - _FIRST_STEPS) * found.seconds
        return {"steps": steps, "took": round(took, 3), "batch": batch, "accumulation": accumulation}

    def _why_not(self, candidate: Candidate, batch: int | None) -> str:
        ranks = candidate.ranks
        if ranks == 1:
            return ""
        if self.training.batch_option:
            try:
                self.training.sharing_batch(ranks)
            except ValueError as error:
                return str(error)
        elif batch is None:
            return "the batch of several ranks isn't known: --batch-option names the script's option for it"
        elif batch % ranks:
            return f"{ranks} ranks can't share a batch of {batch} evenly"
        return ""

    def search(self, plan: Plan) -> Verdict:
        def measure(number: int) -> float | None:
            return self._measure(plan.candidates[number], plan.steps)

        return search(range(len(plan.candidates)), measure)

    def _measure(self, candidate: Candidate, steps: int) -> float | None:
        earlier = self.tried.next_of(candidate)
        if earlier:
            self._best = min(self._best, earlier[0] or math.inf)
            return earlier[0]
        if self._trials and time.monotonic() + _LEAST_OF_A_TRIAL * self.tried.facts["took"] > self._ends:
            raise OutOfTime
        self._trials += 1
        patience = _PATIENCE * self._best * (steps - WARM_UP)
        found = trial.run(
            self.training,
            candidate.config(self.base),
            steps,
            lambda step: self.watch(f"{self._spent()} {candidate.words}: step {step} of {steps}"),
            patience,
            _LONGEST * self.tried.facts["took"],
        )
        self._best = min(self._best, found.seconds or math.inf)
        self.tried.note(candidate, found.seconds, found.problem)
        said = f"{found.seconds:.4g} s a step" if found.seconds else f"failed: {found.problem.splitlines()[-1]}"
        self.say(f"{self._trials:4}  {candidate.words:<44}  {said}")
        return found.seconds

    def _spent(self) -> str:
        left = max(0.0, self._ends - time.monotonic())
        return f"{self.budget - left:.0f} of {self.budget:.0f} s:"


def _batch(found: Measured) -> tuple[int | None, int]:
    """Of a Trainer's arguments."""
    arguments = found.arguments or {}
    batch, accumulation = (
        arguments.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    return (batch if isinstance(batch, int) else None), (accumulation if isinstance(accumulation, int) else 1)
