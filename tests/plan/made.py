"""Measurements that follow a known law, so that what a plan makes of them can be computed by hand."""

from __future__ import annotations

from typing import Any

from cputrain.plan.measured import Measured
from cputrain.trials.jobs import Job

MB = 1e6
LAYERS = 10


def job(**changes: Any) -> Job:
    fields = {"name": "made", "config": {}, "architecture": "BertForQuestionAnswering", "layers": LAYERS}
    return Job(**{**fields, "sequences": 4, "length": 128, "dtype": "int16", **changes})


def point(layers: int, sequences: int) -> dict[str, float]:
    """Embedding of 5 M parameters, layers of 1 M; a sequence keeps 2 MB in each layer and 1 MB in the head."""
    parameters = 5e6 + layers * 1e6
    saved = (2 * layers + 1) * sequences * MB
    after_forward, after_backward = 12 * parameters + saved, 16 * parameters
    return {
        "weights": 4 * parameters,
        "parameters": parameters,
        "trained": parameters,
        "saved": saved,
        "after_forward": after_forward,
        "after_backward": after_backward,
        "peak": max(after_forward, after_backward) + 20 * MB + sequences * MB,
        "forward": 0.01 * (layers + 2) * sequences,
        "backward": 0.02 * (layers + 2) * sequences,
        "optimizer": 0.001 * (layers + 5),
    }


def measured(layers: tuple[int, ...] = (1, 4), sequences: tuple[int, int] = (2, 4), **changes: Any) -> Measured:
    points = [[point(k, b) for b in sequences] for k in layers]
    wide = {**point(layers[-1], 40), "sequences": 40.0, "layers": float(layers[-1])}
    facts: dict[str, Any] = {
        "wide": wide,
        "base": 400 * MB,
        "dtype": "int16",
        "ranks": 1,
        "threads": 2,
        "gflops": 100.0,
        "copied": 1e10,
    }
    return Measured(changes.pop("job", job()), layers, sequences, points, **{**facts, "cpu": "a CPU", **changes})
