"""Memory by part, seconds, the largest batch: what follows from trials for the whole model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cputrain.plan.measured import SECONDS, Measured

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
        beside = [[point["peak"] - self._most(point) for point in row] for row in self.measured.points]
        layers = self.measured.job.layers
        whole = {name: self.measured.at(name, layers, sequences) for name in ("after_forward", "after_backward")}
        whole["trained"] = self.measured.at("trained", layers, sequences)
        top = _with(self.measured, beside).at("peak", layers, sequences)
        least = min(min(row) for row in beside)  # noise must not make it less than any trial had
        return self._most(whole) + max(top, least) + self.base - self.measured.base

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


def _with(measured: Measured, beside: list[list[float]]) -> Measured:
    points = [[{"peak": value} for value in row] for row in beside]
    return dataclasses.replace(measured, points=points)
