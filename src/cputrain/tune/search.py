"""Which of several candidates is fastest, from as few measurements as that needs: successive halving in rounds.

In each round every candidate that is left is measured once, in another order, so that a machine that is slow for a
while is slow for all of them. What counts are differences within rounds. After each round those that are clearly slower
are dropped, and the slower half of all, until one is left, or those that are left are equal.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# What measurements of one candidate differ by before any were repeated, and as how many it counts: what training steps
# on shared machines show, in log seconds.
_NOISE, _NOISE_COUNTS = 0.03, 3
# A difference of so many standard errors is clear; one of 2%, its error included, is none that a user would notice.
_CLEAR, _EQUAL = 2.0, 0.02
MOST_ROUNDS = 5
# Between candidates that are this close, the one that stands first, the simpler one, is chosen.
_CLOSE = 0.01


class OutOfTime(Exception):
    """Raised by `measure`: no time is left for another measurement."""


@dataclass
class Verdict:
    """`slower`: by how much of the winner's time, of every candidate that was measured; `why` says how it ended."""

    winner: int
    why: str
    slower: dict[int, float]
    equal: list[int]  # to the winner, as far as could be seen
    dropped: dict[int, int] = field(default_factory=dict)  # in which round, from 1
    is_settled: bool = True


class Rounds:
    """Logarithms of seconds, round by round; a candidate that is left was measured in each."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, float]] = []

    def add(self, seconds: Mapping[int, float]) -> None:
        self.rounds.append({number: math.log(value) for number, value in seconds.items()})

    def differences(self, one: int, other: int) -> list[float]:
        """By how much `one` was slower than `other` where both were measured."""
        return [found[one] - found[other] for found in self.rounds if one in found and other in found]

    def slower(self, one: int, other: int) -> float:
        """Robust from the third round on: a single measurement may fall into a slow phase of the machine."""
        return statistics.median(self.differences(one, other))

    def error(self, candidates: Sequence[int]) -> float:
        """Standard error of a difference, from how much repeated measurements differed, all candidates together."""
        squares, freedom = _NOISE_COUNTS * _NOISE**2, float(_NOISE_COUNTS)
        times = len(self.rounds)
        if times > 1 and len(candidates) > 1:
            means = [statistics.mean(found[one] for one in candidates) for found in self.rounds]
            for one in candidates:
                own = [found[one] - mean for found, mean in zip(self.rounds, means, strict=True)]
                squares += sum((value - statistics.mean(own)) ** 2 for value in own)
            freedom += (len(candidates) - 1) * (times - 1)
        return math.sqrt(2 * squares / freedom / times)

    def best(self, candidates: Sequence[int]) -> int:
        """The fastest by its median difference from the mean of these candidates."""
        means = [statistics.mean(found[one] for one in candidates) for found in self.rounds]

        def place(one: int) -> float:
            return statistics.median(found[one] - mean for found, mean in zip(self.rounds, means, strict=True))

        return min(candidates, key=place)


def search(
    candidates: Sequence[int], measure: Callable[[int], float | None], seed: int = 0, most_rounds: int = MOST_ROUNDS
) -> Verdict:
    """`measure` gives seconds a step, None if the candidate can't run, or raises OutOfTime.

    Candidates are numbers; smaller ones are simpler. At least one must have been measured for there to be a verdict.
    """
    rounds, left, dropped = Rounds(), list(candidates), dict[int, int]()
    chance = random.Random(seed)
    for number in range(1, most_rounds + 1):
        order = chance.sample(left, len(left)) if number > 1 else left  # the simplest first, should time end soon
        found: dict[int, float] = {}
        try:
            for one in order:
                seconds = measure(one)
                if seconds is not None:
                    found[one] = seconds
        except OutOfTime:
            return _out_of_time(rounds, left, found, dropped)
        left = [one for one in left if one in found]
        if not left:
            raise ValueError("none of the candidates could be measured.")
        rounds.add(found)
        best = rounds.best(left)
        error = rounds.error(left)
        slower = {one: rounds.slower(one, best) for one in left}
        dropped |= {one: number for one in left if slower[one] > _CLEAR * error}
        left = [one for one in left if one not in dropped]
        if len(left) == 1:
            return _verdict(rounds, left, dropped, "one is clearly the fastest")
        if all(slower[one] + error < _EQUAL for one in left):
            return _verdict(rounds, left, dropped, f"those that are left are equal, within {_EQUAL:.0%}")
        ranked = sorted(left, key=lambda one: (max(slower[one], _CLOSE), one))
        half = max(2, math.ceil(len(candidates) / 2**number))
        dropped |= dict.fromkeys(ranked[half:], number)
        left = sorted(ranked[:half])
    return _verdict(rounds, left, dropped, f"no difference is clear after {most_rounds} rounds: they count as equal")


def _verdict(rounds: Rounds, left: list[int], dropped: dict[int, int], why: str) -> Verdict:
    best = rounds.best(left)
    winner = min(one for one in left if rounds.slower(one, best) <= _CLOSE)
    measured = {one for found in rounds.rounds for one in found}
    slower = {one: math.expm1(rounds.slower(one, winner)) for one in measured}
    return Verdict(winner, why, slower, [one for one in left if one != winner], dropped)


def _out_of_time(rounds: Rounds, left: list[int], found: dict[int, float], dropped: dict[int, int]) -> Verdict:
    """What the unfinished round says counts where there is no other."""
    if not rounds.rounds:
        if not found:
            raise ValueError("the budget ended before anything was measured: give more, as --budget 20min.")
        rounds.add(found)
        left = list(found)
    verdict = _verdict(rounds, left, dropped, "the budget is spent")
    verdict.is_settled = False
    return verdict
