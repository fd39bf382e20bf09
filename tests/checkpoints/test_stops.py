"""Stops of a training, one after the other; `tests.checkpoints.stops` draws more of them."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.checkpoints.stops import Stop, check, undisturbed

STOPS = (
    Stop("loading"),
    Stop("training", signal.SIGTERM, 2, workers=2),
    Stop("evaluation", signal.SIGUSR1, 3),
    Stop("saving", signal.SIGHUP),
    Stop("accumulation", signal.SIGINT, 7),
)


def test_a_training_that_is_stopped_in_every_phase_ends_with_the_same_weights(tmp_path: Path) -> None:
    check(tmp_path / "stopped", STOPS, undisturbed(tmp_path / "undisturbed"))
