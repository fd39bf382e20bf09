"""What trials of a few layers and sequences have shown, and what follows for others: it grows evenly with both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cputrain.trials.jobs import Job, from_answer

# Of each point: bytes, and seconds.
BYTES = ("weights", "parameters", "trained", "saved", "after_forward", "after_backward", "peak")
WIDE = ("after_forward", "after_backward", "peak")
SECONDS = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Measured:
    """`points[i][j]`: of `layers[i]` layers and `sequences[j]` sequences. One rank's, while all ranks worked.

    A peak is what it is above `base`, the bytes of a process that has imported what it needs and has no model; only
    that with more sequences counts.
    """

    job: Job
    layers: tuple[int, ...]
    sequences: tuple[int, int]
    points: list[list[dict[str, float]]]
    base: float
    dtype: str  # what the job's means on that CPU
    ranks: int
    threads: int
    gflops: float
    copied: float  # bytes a second
    cpu: str
    wide: dict[str, float] | None = None  # a point with many more sequences: how working memory grows with them

    def at(self, name: str, layers: int, sequences: float) -> float:
        first, last = ([point[name] for point in row] for row in (self.points[0], self.points[-1]))
        few, many = (
            _line(self.layers[0], self.layers[-1], *pair, layers)  # type: ignore[call-arg]
            for pair in zip(first, last, strict=True)
        )
        return _line(*self.sequences, few, many, sequences)

    def seconds(self, name: str, sequences: float) -> float:
        if name == "optimizer":  # knows nothing of sequences
            sequences = self.sequences[1]
        return max(0.0, self.at(name, self.job.layers, sequences))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_json(found: dict[str, Any]) -> Measured:
    job = from_answer(found["job"])
    return Measured(**{**found, "job": job, "layers": tuple(found["layers"]), "sequences": tuple(found["sequences"])})


def _line(x0: float, x1: float, y0: float, y1: float, x: float) -> float:
    return y1 if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
