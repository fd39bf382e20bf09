"""Memory by part, seconds, the largest batch: what follows from trials for the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cputrain.plan.measured import SECONDS, Measured

_IN_USE = ("after_forward", "after_backward", "trained")
_MARGIN = 0.95  # of the limit: what the largest batch may take
_MOST_SEQUENCES = 1 << 16
# Numbers of fp32 that an optimizer keeps for each one that is trained; SGD has no momentum unless it is asked for.
_MOMENTS = {"AdamW": 2, "Adam": 2, "SGD": 0}


@dataclass(frozen=True)
class Parts:
    """Bytes of one rank. Gradients come as activations go, so the peak has the larger of the two."""

    libraries: float
    weights: float
    gradients: float
    moments: float
    activations: float  # what the layers keep for the backward
    head: float  # what embedding, head and loss keep
    rest: float  # working memory, and gaps that the allocator leaves
    peak: float


@dataclass(frozen=True)
class Step:
    """Seconds of one step of one rank."""

    forward: float
    backward: float
    optimizer: float
    accumulation: int = 1

    @property
    def seconds(self) -> float:
        return self.accumulation * (self.forward + self.backward) + self.optimizer


class Estimate:
    """Of a job as it was measured. `base`: of the script's own process, where it is known. `shares`: ranks exchange
    gradients, which then stay in the buckets that they travel in. `unevenness`: the largest batch by the usual one."""

    def __init__(
        self,
        measured: Measured,
        base: float | None = None,
        accumulation: int = 1,
        shares: bool = False,
        unevenness: float = 1.0,
    ) -> None:
        self.measured, self.accumulation, self.unevenness = measured, accumulation, unevenness
        self.base = measured.base if base is None else base
        self.keeps_gradients = shares or accumulation > 1

    def parts(self, sequences: int) -> Parts:
        found, layers = self.measured, self.measured.job.layers
        gradients = 4 * found.at("trained", layers, sequences)
        moments = _MOMENTS.get(found.job.optimizer, 2) * gradients
        most = sequences * self.unevenness
        saved = max(0.0, found.at("saved", layers, most))
        head = min(saved, max(0.0, found.at("saved", 0, most))) if len(found.layers) > 1 else 0.0
        weights, peak = found.at("weights", layers, sequences), self.peak(sequences)
        held = saved + gradients if self.keeps_gradients else max(saved, gradients)
        rest = max(0.0, peak - self.base - weights - moments - held)
        return Parts(self.base, weights, gradients, moments, saved - head, head, rest, peak)

    def peak(self, sequences: float) -> float:
        """The most is at the end of the forward or of the backward, whichever is larger; what came on top of that in
        the trials comes on top of it here."""
        sequences *= self.unevenness
        layers, most = self.measured.job.layers, self.measured.sequences[1]
        whole = {name: self.measured.at(name, layers, sequences) for name in _IN_USE}
        beside = [self._beside(row[1]) for row in self.measured.points]
        many = self._deeper(beside)
        wide = self.measured.wide
        if wide is None:  # at most as the batch does
            growth = many / most
        else:
            growth = max(0.0, (self._beside(wide) - beside[-1]) / (wide["sequences"] - most))
        return self._most(whole) + max(0.0, many + growth * (sequences - most)) + self.base

    def _beside(self, point: dict[str, float]) -> float:
        """What a trial had beyond the most that was handed out at one of the two moments."""
        return point["peak"] - max(point["after_forward"], point["after_backward"])

    def _deeper(self, column: Sequence[float]) -> float:
        """The same of all layers: at least what the deeper trial had, and at most in proportion to what is in use."""
        found = self.measured
        each = (column[-1] - column[0]) / max(1, found.layers[-1] - found.layers[0])
        grown = column[-1] + each * (found.job.layers - found.layers[-1])
        tried = self._most(found.points[-1][1])
        whole = self._most({name: found.at(name, found.job.layers, found.sequences[1]) for name in _IN_USE})
        return max(column[-1], min(grown, column[-1] * whole / tried))

    def _most(self, point: dict[str, float]) -> float:
        kept = 4 * point["trained"] if self.keeps_gradients else 0.0
        return max(point["after_forward"] + kept, point["after_backward"])

    def step(self, sequences: float) -> Step:
        forward, backward, optimizer = (self.measured.seconds(name, sequences) for name in SECONDS)
        return Step(forward, backward, optimizer, self.accumulation)

    def largest(self, limit: float) -> int:
        """Sequences of the largest batch that has room; 0: not even one has."""
        low, high = 0, 1
        while high <= _MOST_SEQUENCES and self.peak(high) <= _MARGIN * limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle) <= _MARGIN * limit else (low, middle)
        return low
