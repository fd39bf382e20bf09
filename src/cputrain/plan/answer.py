"""A plan: what was asked, what was measured, and all that follows."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cputrain import hardware, process_memory
from cputrain.plan import measure, nodes, profile, seen
from cputrain.plan.estimate import Estimate, Parts, Step
from cputrain.plan.measure import NoMemoryError, Ranks, Say
from cputrain.plan.measured import Measured
from cputrain.plan.profile import Profile
from cputrain.trials.jobs import Job

_DTYPES = ("fp32", "int16", "bf16")
_LORA_RANK = 16
_BUDGET = 12.0  # seconds of steps; memory and imports come on top


@dataclass(frozen=True)
class Question:
    job: Job
    parameters: int
    samples: int = 100_000
    ranks: int = 1
    accumulation: int = 1
    unevenness: float = 1.0  # tokens of the largest batch over those of the usual one
    script: str | None = None
    memory: float | None = None  # bytes, of another machine
    nodes: Sequence[int] = (1,)
    network: float = 10e9 / 8  # bytes a second
    price: float | None = None
    alternatives: bool = True
    base: float | None = None  # bytes of the script's process without its model
    runs: Sequence[str | Path] = ()
    profile: Path | None = None
    save_profile: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """One way to train it. None: a trial had no room in the memory that is free."""

    name: str
    job: Job
    peak: float | None = None
    fits: bool = False
    seconds: float | None = None  # of a step with as many sequences as asked
    largest: int = 0


@dataclass(frozen=True)
class Plan:
    question: Question
    asked: Recipe
    limit: float  # bytes of one rank
    limit_source: str
    parts: Parts | None
    step: Step | None
    measured: Measured | None
    alternatives: list[Recipe]
    curve: list[nodes.Point]
    seen: list[seen.Compared]
    notes: list[str] = field(default_factory=list)


def make(question: Question, pair: Sequence[Ranks], say: Say) -> Plan:
    known = profile.load(question.profile) if question.profile else None
    kept = known or Profile.of_this_machine()
    plan = _plan(question, _Source(pair, question, known, kept, say), *_limit(question, known))
    if question.save_profile:
        profile.save(question.save_profile, kept)
    return plan


class _Source:
    """Where measurements come from: trials on this machine, or a file."""

    def __init__(self, pair: Sequence[Ranks], question: Question, known: Profile | None, kept: Profile, say: Say):
        self.pair, self.question, self.known, self.kept, self.say = pair, question, known, kept, say
        self.notes: list[str] = []

    def measured(self, job: Job, budget: float) -> Measured | None:
        if self.known is not None and (found := self.known.of(job, self.question.ranks)):
            return found
        try:
            found = measure.measure(self.pair, job, budget, self.say)
        except NoMemoryError:
            return None
        if self.known is not None:
            self.notes.append(
                f"the profile has no {job.name}, {job.recipe}, at {job.length} tokens: measured here and scaled by the "
                "speed of products, a first idea only"
            )
            return profile.scaled(found, self.known)
        self.kept.add(found)
        return found


def _limit(question: Question, known: Profile | None) -> tuple[float, str]:
    """Of the machine that will train: what its control group allows, and no more than is free."""
    if question.memory is not None:
        return question.memory, "--memory"
    if known is not None:
        return float(known.machine.get("memory") or 0), "the profile's machine"
    allowed, free = hardware.this_machine().usable_memory, process_memory.free()
    if allowed.value is not None and allowed.value <= free:
        return allowed.value, allowed.source
    return free, "free now"


def _plan(question: Question, source: _Source, whole: float, limit_source: str) -> Plan:
    job = question.job
    limit = whole / question.ranks
    found = source.measured(job, _BUDGET)
    asked = _recipe("as asked", job, found, question, limit)
    alternatives = []
    if question.alternatives:
        chosen = found.dtype if found else job.dtype
        for name, other in alternatives_of(job, chosen):
            source.say(name)
            tried = source.measured(other, 0.0)
            if tried is not None and found is not None:  # what earlier trials left behind is none of its memory
                tried = dataclasses.replace(tried, base=found.base)
            alternatives.append(_recipe(name, other, tried, question, limit))
    parts = step = None
    curve: list[nodes.Point] = []
    compared: list[seen.Compared] = []
    if found is None:
        parts = _of_parameters(question.parameters) if not job.lora else None
    else:
        estimate = _estimate(found, question)
        parts, step = estimate.parts(job.sequences), estimate.step(job.sequences)
        curve = _curve(question, found, step)
        compared = [seen.compare(run, estimate) for run in question.runs]
    return Plan(
        question, asked, limit, limit_source, parts, step, found, alternatives, curve, compared,
        list(dict.fromkeys(source.notes)),
    )  # fmt: skip


def _estimate(found: Measured, question: Question) -> Estimate:
    shares = question.ranks > 1 or max(question.nodes) > 1
    return Estimate(found, question.base, question.accumulation, shares, question.unevenness)


def _recipe(name: str, job: Job, found: Measured | None, question: Question, limit: float) -> Recipe:
    if found is None:
        return Recipe(name, job)
    estimate = _estimate(found, question)
    peak = estimate.peak(job.sequences)
    seconds = estimate.step(job.sequences).seconds
    return Recipe(name, job, peak, peak <= limit, seconds, estimate.largest(limit))


def _of_parameters(count: int) -> Parts:
    """The least that any training of all weights needs; activations aren't known."""
    size = 4.0 * count
    return Parts(0.0, size, size, 2 * size, 0.0, 0.0, 0.0, 4 * size)


def _curve(question: Question, found: Measured, step: Step) -> list[nodes.Point]:
    """The head's share of the backward comes first, then the layers; the embedding's gradient comes last."""
    layers = question.job.layers
    trained = 4 * found.at("trained", layers, 1)
    of_layers = trained - 4 * found.at("trained", 0, 1) if len(found.layers) > 1 else trained
    backward = found.at("backward", layers, question.job.sequences)
    before = max(0.0, found.at("backward", 0, question.job.sequences)) if len(found.layers) > 1 else 0.0
    first = min(1.0, before / backward) if backward else 0.0
    shares = [(first, 0.0), *[((1 - first) / layers, of_layers / layers)] * layers, (0.0, trained - of_layers)]
    local = _locally(question.ranks, trained, found.copied)
    of_machine = Step(step.forward, step.backward, step.optimizer + local, step.accumulation)
    sequences = question.job.sequences * question.accumulation * question.ranks
    numbers = sorted({1, *question.nodes})
    return nodes.curve(of_machine, shares, sequences, numbers, question.network, question.samples, question.price)


def _locally(ranks: int, size: float, copied: float) -> float:
    """A sum in shared memory keeps the cores busy: each rank copies its gradients in and out, and adds up its share."""
    return 0.0 if ranks == 1 else size * (5 + 1 / ranks) / copied


def alternatives_of(job: Job, dtype: str) -> list[tuple[str, Job]]:
    found: list[tuple[str, Job]] = []
    if importlib.util.find_spec("peft") is not None:
        if not job.lora:
            found.append(("LoRA", job.but(lora=_LORA_RANK)))
        if not job.quantised and importlib.util.find_spec("bitsandbytes") is not None:
            found.append(("QLoRA", job.but(lora=job.lora or _LORA_RANK, quantised=True)))
    if not job.checkpointing:
        found.append(("gradient checkpointing", job.but(checkpointing=True)))
    found += [(one, job.but(dtype=one)) for one in _DTYPES if one != dtype and job.dtype != "stock"]
    return found
