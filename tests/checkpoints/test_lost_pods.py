"""A pod that is preempted leaves no trace; `python -m tests.checkpoints.lost_pods --times 10` has more, and kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.checkpoints.lost_pods import Loss, result
from tests.checkpoints.requeues import undisturbed
from tests.cluster.pods import CGROUP

pytestmark = [
    pytest.mark.needs_program("ip", "iproute2"),
    pytest.mark.skipif(os.geteuid() != 0 or not CGROUP.is_dir(), reason="needs root and a cgroup v1 CPU controller"),
]


def test_a_preempted_pod_is_started_anew_and_the_weights_are_the_same(tmp_path: Path) -> None:
    began, weights = result(tmp_path, Loss(1, signal.SIGTERM, 1.0))
    assert weights == undisturbed(tmp_path) and len(began) == 2
