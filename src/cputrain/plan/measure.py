"""Trials: a model of few layers and one of more take real steps in turns, until their difference is clear.

A model that is quick enough is tried as a whole. Memory is asked for within what is free, so that a trial that is too
large fails by itself; it is then tried with fewer sequences.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cputrain import hardware, process_memory
from cputrain.plan.measured import BYTES, SECONDS, WIDE, Measured
from cputrain.trials import turns
from cputrain.trials.jobs import Job
from cputrain.trials.turns import Answer, Side

_SHARE = 0.9  # of the memory that is free
_MOST_ROUNDS, _LEAST_ROUNDS = 5, 3
# By the third step the allocator's heap has its size; with fewer sequences only what is in use is asked for.
_SETTLED, _STEPS = 3, 6  # the second: all that a depth takes, rounds included
_WIDE, _WIDE_SECONDS, _WIDE_SHARE = 16, 2.0, 0.4  # times the sequences, of one step, of what is free
Say = Callable[[str], None]


class NoMemoryError(Exception):
    """Not even the smallest trial has room here."""


class Ranks:
    """Processes that do the same at the same time, each on cores of its own, as the ranks of one machine do.

    They start when they are first asked, or before, so that imports take place meanwhile.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.cores = name, _cores(ranks)
        self.sides: list[Side] = []
        self.rates: dict[str, Answer] = {}

    def start(self) -> None:
        for cpus in self.cores[len(self.sides) :]:
            environment = {"OMP_NUM_THREADS": str(len(cpus)), "TOKENIZERS_PARALLELISM": "false"}
            command = ["-m", "cputrain.trials.worker", f'{{"cpus": {list(cpus)}}}']
            self.sides.append(Side(self.name, command, environment))

    def ask(self, request: str, **arguments: Any) -> Answer:
        """The slowest rank's times, and the most memory."""
        self.start()
        for side in self.sides:
            side.send(request, **arguments)
        answers = [side.receive() for side in self.sides]
        for answer in answers:
            if "error" in answer:
                raise ValueError(answer["error"])
            if "no_memory" in answer:
                raise NoMemoryError
        return {
            name: max(answer[name] for answer in answers) if isinstance(value, (int, float)) else value
            for name, value in answers[0].items()
        }

    def rates_of(self, dtype: str) -> Answer:
        """Of products and of copies, measured once."""
        if dtype not in self.rates:
            self.rates[dtype] = self.ask("rates", dtype=dtype)
        return self.rates[dtype]

    def close(self) -> None:
        for side in self.sides:
            side.close()


def threads(ranks: int) -> int:
    return len(_cores(ranks)[0])


def _cores(ranks: int) -> list[tuple[int, ...]]:
    """One CPU of each core, dealt to the ranks."""
    machine = hardware.this_machine()
    usable = set(machine.usable_cpus.value)
    firsts = [min(usable.intersection(core)) for core in machine.cores.value if usable.intersection(core)]
    firsts = firsts[: machine.usable_cores.value]
    if ranks > len(firsts):
        raise ValueError(f"--ranks is {ranks}, but {len(firsts)} cores may be used here: give each rank one at least.")
    each = len(firsts) // ranks
    return [tuple(firsts[rank * each : (rank + 1) * each]) for rank in range(ranks)]


@contextmanager
def workers(ranks: int) -> Iterator[tuple[Ranks, Ranks]]:
    """For few layers, and for more."""
    both = Ranks("shallow", ranks), Ranks("deep", ranks)
    try:
        yield both
    finally:
        for one in both:
            one.close()


def measure(pair: Sequence[Ranks], job: Job, budget: float, say: Say) -> Measured:
    """With as many sequences as the job has, or with fewer where memory doesn't suffice.

    `budget`: seconds of steps; without any, a quarter of the layers takes as few steps as there can be.
    """
    for one in pair:
        one.start()
    sequences = job.sequences
    while True:
        try:
            return _Trials(pair, job, sequences, budget, say).measured()
        except NoMemoryError:
            for one in pair:
                one.ask("drop")
            if sequences == 1:
                raise
            sequences //= 2
            say(f"{sequences * 2} sequences have no room in the memory that is free: trying {sequences}")


class _Trials:
    def __init__(self, pair: Sequence[Ranks], job: Job, sequences: int, budget: float, say: Say) -> None:
        self.shallow, self.deep = pair
        self.job, self.budget, self.say = job, budget, say
        self.ranks = len(self.shallow.cores)
        self.sequences = (sequences // 2, sequences) if sequences > 1 else (1, 2)
        self.base = 0.0

    def measured(self) -> Measured:
        chosen = self.shallow.ask("chosen", dtype=self.job.dtype)["dtype"] if self.job.dtype != "stock" else "stock"
        rates = self.deep.rates_of("int16" if chosen == "int16" else "fp32")
        rows = [self._row(self.shallow, 1)]
        layers: tuple[int, ...] = (1,)
        if self.job.layers > 1:
            low, deep = 1, math.ceil(self.job.layers / 4)
            if self.budget:
                rows.append(self._row(self.shallow, 2))
                low, deep = 2, self._depth(rows[0][1], rows[1][1])
            layers = (low, max(deep, low + 1))
            # In a process that had no other model: what its allocator keeps is what a run's would.
            rows = [rows[-1], self._row(self.deep, layers[1])]
        self._time(rows, layers)
        return Measured(
            self.job, layers, self.sequences, rows, self.base, chosen, self.ranks, threads(self.ranks),
            **rates, cpu=hardware.this_machine().model.value, wide=self._wide(rows[-1], layers[-1]),
        )  # fmt: skip

    def _row(self, ranks: Ranks, layers: int) -> list[dict[str, float]]:
        """Memory of each number of sequences, the larger one first, as in a run; times are a first guess."""
        self.say(f"{_counted(layers, 'layer')} of {self.job.layers}")
        built = ranks.ask("build", job=dataclasses.asdict(self.job), layers=layers, share=_SHARE / self.ranks)
        self.base = built["before"]
        many = built | ranks.ask("measure", sequences=self.sequences[1], steps=_SETTLED)
        found = [built | ranks.ask("measure", sequences=self.sequences[0], steps=1), many]
        for point in found:
            point["peak"] -= self.base
        return [{name: float(point[name]) for name in (*BYTES, *SECONDS)} for point in found]

    def _depth(self, one: dict[str, float], two: dict[str, float]) -> int:
        """All layers if they take at most twice the budget; else as many as fit it, but at least a quarter, or noise
        would be most of the answer."""
        times = [sum(point[name] for name in SECONDS) for point in (one, two)]
        each = max(times[1] - times[0], 0.02 * times[0])
        affordable = int((self.budget / _STEPS - times[0]) / each)
        wanted = self.job.layers if affordable >= self.job.layers / 2 else affordable
        return min(max(wanted, math.ceil(self.job.layers / 4), 3), self.job.layers, self._room(one, two))

    def _room(self, one: dict[str, float], two: dict[str, float]) -> int:
        """How many layers there is certainly room for: half of what is free."""
        each = max(two["peak"] - one["peak"], 1.0)
        return max(2, int(0.5 * process_memory.available() / self.ranks / each))

    def _wide(self, row: list[dict[str, float]], layers: int) -> dict[str, float] | None:
        """A step with as many sequences as time and memory allow: few sequences tell little about many."""
        taken, most = sum(row[1][name] for name in SECONDS), self.sequences[1]
        of_one = max((row[1]["peak"] - row[0]["peak"]) / (most - self.sequences[0]), row[1]["saved"] / most, 1.0)
        room = _WIDE_SHARE * process_memory.available() / self.ranks / of_one
        wide = int(min(_WIDE * most, most * _WIDE_SECONDS / taken, room))
        if wide < 2 * most:
            return None
        try:
            found = (self.deep if self.job.layers > 1 else self.shallow).ask("measure", sequences=wide, steps=2)
        except NoMemoryError:
            return None
        found["peak"] -= self.base
        return {name: float(found[name]) for name in WIDE} | {
            "trained": row[1]["trained"], "sequences": wide, "layers": layers
        }  # fmt: skip

    def _time(self, rows: list[list[dict[str, float]]], layers: tuple[int, ...]) -> None:
        """Medians of rounds in which all depths take turns, with each number of sequences."""
        is_whole = layers[-1] == self.job.layers
        places = [len(rows) - 1] if is_whole else [0, 1]
        sides = [(self.shallow, self.deep)[place] for place in places]
        a_round = sum(sum(point[name] for name in SECONDS) for place in places for point in rows[place])
        rounds = int(min(max(self.budget / max(a_round, 1e-3), _LEAST_ROUNDS), _MOST_ROUNDS))
        self.say(f"{_counted(rounds, 'round')} of real steps with {layers[-1]} of {self.job.layers} layers")
        for column, sequences in enumerate(self.sequences):
            if column == 0 and not self.budget:
                continue
            answers = list(turns.in_turns(sides, rounds, sequences=sequences))
            for number, place in enumerate(places):
                for name in SECONDS:
                    rows[place][column][name] = statistics.median(answer[number][name] for answer in answers)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
