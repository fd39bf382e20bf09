"""The rendered batch script on a real Slurm: a controller and two nodes on machines made of namespaces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cputrain.cluster import slurm
from cputrain.cluster.slurm import SlurmJob
from tests.checkpoints import requeues
from tests.cluster.slurm_cluster import Slurm, running
from tests.cluster.test_rendered_job_trains import SCRIPT, STEPS
from tests.hosts import needs_hosts

ROOT = Path(__file__).parents[2]
pytestmark = [
    *needs_hosts,
    pytest.mark.needs_program("slurmctld", "slurm-wlm"),
    pytest.mark.needs_program("munged", "munge"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def assert_one_model(log: str) -> list[dict[str, Any]]:
    found = sorted((json.loads(text) for text in re.findall(r"RESULT (\{.*\})", log)), key=lambda one: one["rank"])
    assert [(one["rank"], one["size"], one["host"]) for one in found] == [(0, 2, "box1"), (1, 2, "box2")], log
    assert found[0]["sum"] == found[1]["sum"]
    return found


def test_two_nodes_train_one_model(cluster: Slurm) -> None:
    script, output = cluster.folder / "train.py", cluster.folder / "qa"
    script.write_text(SCRIPT)
    words = (str(ROOT / "examples" / "demo"), str(STEPS), str(output), "$(id) 'x'")
    variables = (("HF_HOME", "/tmp/hf"),)
    job = SlurmJob("qa", str(script), words, nodes=2, cpus=1, time="10:00", environment=variables)
    number = cluster.submitted(slurm.to_text(job))
    state = cluster.until_over(number)
    log = (cluster.folder / f"qa-{number}.log").read_text()
    assert state == "COMPLETED", log
    found = assert_one_model(log)
    assert all(one["last"] < 0.75 * one["first"] and one["trick"] == "$(id) 'x'" for one in found)
    assert load_file(output / "model.safetensors")


def test_a_job_whose_time_is_up_saves_is_queued_again_and_ends_with_the_same_weights(cluster: Slurm) -> None:
    began, weights = requeues.result(cluster, "again", [1.0])
    assert weights == requeues.undisturbed(cluster.folder)
    assert began[0] == 0 and 0 < began[1] < requeues.STEPS


def test_what_slurm_refuses_is_a_sentence(cluster: Slurm) -> None:
    (cluster.folder / "big.sh").write_text(slurm.to_text(SlurmJob("qa", "a.py", nodes=9, partition="nowhere")))
    answer = cluster.run(sys.executable, "-m", "cputrain", "slurm", "submit", str(cluster.folder / "big.sh"))
    assert answer.returncode == 2
    assert answer.stderr.startswith("cputrain: Slurm refused the job: ")
    assert answer.stderr.count("\n") == 1


def test_no_sbatch_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\n")
    command = [sys.executable, "-m", "cputrain", "slurm", "submit", str(tmp_path / "job.sh")]
    environ = {**os.environ, "PATH": str(tmp_path)}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "sbatch isn't on the PATH" in answer.stderr
