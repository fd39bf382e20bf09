"""The rendered batch script on a real Slurm: a controller and two nodes on machines made of namespaces."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.test_rendered_job_trains import SCRIPT, STEPS
from hosts import Cluster, needs_hosts
from safetensors.torch import load_file

from cputrain.cluster import slurm
from cputrain.cluster.slurm import SlurmJob

ROOT = Path(__file__).parents[2]
pytestmark = [
    *needs_hosts,
    pytest.mark.needs_program("slurmctld", "slurm-wlm"),
    pytest.mark.needs_program("munged", "munge"),
]


def configuration(folder: Path, cluster: Cluster) -> str:
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=1 State=UNKNOWN" for host in cluster.hosts]
    head = cluster.hosts[0]
    return "\n".join(
        [
            f"ClusterName=test\nSlurmctldHost={head.name}({head.address})\nSlurmUser=root\nAuthType=auth/munge",
            # A job that is queued again waits until its first credential has expired: else two minutes.
            "AuthInfo=cred_expire=5",
            "CredType=cred/munge\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none",
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nMpiDefault=none\nReturnToService=2",
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdLogFile={folder}/slurmd-%n.log\nSlurmctldTimeout=60\nSlurmdTimeout=60",
            *nodes,
            "PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "",
        ]
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o400)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "cputrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m cputrain "$@"\n')
    (programs / "cputrain").chmod(0o755)
    path = f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    environ = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    with Cluster(2, folder / "keys", shared=[folder]) as cluster:
        (folder / "slurm.conf").write_text(configuration(folder, cluster))
        (folder / "state").mkdir()
        daemons = []
        for number, host in enumerate(cluster.hosts):
            (folder / f"spool-{host.name}").mkdir()
            munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
            files = ["--socket=/run/munge/munge.socket.2", "--pid-file=/run/munged.pid", "--seed-file=/run/munge.seed"]
            host.run("mkdir", "-p", "/run/munge")
            daemons.append(host.popen(*munged, *files, "--log-file=/run/munged.log", environ=environ))
            if number == 0:
                daemons.append(host.popen("slurmctld", "-D", environ=environ))
            daemons.append(host.popen("slurmd", "-D", "-N", host.name, environ=environ))
        yield cluster, folder, environ
        for daemon in daemons:
            daemon.kill()


def until_over(cluster: Cluster, environ: dict[str, str], number: str, seconds: float = 240) -> str:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        said = cluster.hosts[0].run("scontrol", "show", "job", number, environ=environ).stdout
        state = re.search(r"JobState=(\w+)", said)
        if state and state[1] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
            return state[1]
        time.sleep(0.5)
    return said


def submitted(cluster: Cluster, folder: Path, environ: dict[str, str], job: SlurmJob) -> str:
    """The job's number: the rendered script, by `cputrain slurm submit`, once both nodes are there."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.sh").write_text(slurm.to_text(job))
    head = cluster.hosts[0]
    limit = time.monotonic() + 60
    while "2idle" not in head.run("sinfo", "--noheader", "--format=%D%t", environ=environ).stdout:
        assert time.monotonic() < limit, (folder / "slurmctld.log").read_text()[-3000:]
        time.sleep(0.5)
    submit = ["-m", "cputrain", "slurm", "submit", str(folder / "job.sh")]
    answer = head.run(sys.executable, *submit, environ=environ, folder=folder)
    assert answer.returncode == 0, answer.stderr
    number = re.search(r"number (\d+)", answer.stdout)
    assert number
    return number[1]


def job_of(folder: Path, name: str, steps: int, *arguments: str, **more: Any) -> SlurmJob:
    words = (str(ROOT / "examples" / "demo"), str(steps), str(folder / name), *arguments)
    variables = (("HF_HOME", "/tmp/hf"),)
    return SlurmJob(name, str(folder / "train.py"), words, nodes=2, cpus=1, time="10:00", environment=variables, **more)


def assert_one_model(log: str) -> list[dict[str, Any]]:
    found = sorted((json.loads(text) for text in re.findall(r"RESULT (\{.*\})", log)), key=lambda one: one["rank"])
    assert [(one["rank"], one["size"], one["host"]) for one in found] == [(0, 2, "box1"), (1, 2, "box2")], log
    assert found[0]["sum"] == found[1]["sum"]
    return found


def test_two_nodes_train_one_model(running: tuple[Cluster, Path, dict[str, str]]) -> None:
    cluster, folder, environ = running
    number = submitted(cluster, folder, environ, job_of(folder, "qa", STEPS, "$(id) 'x'"))
    state = until_over(cluster, environ, number)
    log = (folder / f"qa-{number}.log").read_text()
    assert state == "COMPLETED", log
    found = assert_one_model(log)
    assert all(one["last"] < 0.75 * one["first"] and one["trick"] == "$(id) 'x'" for one in found)
    assert load_file(folder / "qa" / "model.safetensors")


def test_a_job_that_is_queued_again_goes_on_from_its_checkpoint(running: tuple[Cluster, Path, dict[str, str]]) -> None:
    """Slurm's signal before time is up, sent at once: the script queues its own job again."""
    cluster, folder, environ = running
    number = submitted(cluster, folder, environ, job_of(folder, "again", 120, resume=("--resume it's",)))
    checkpoint, limit = folder / "again" / "step", time.monotonic() + 120
    while not checkpoint.exists() or int(checkpoint.read_text() or 0) < 20:
        assert time.monotonic() < limit, (folder / f"again-{number}.log").read_text()
        time.sleep(0.1)
    answer = cluster.hosts[0].run("scancel", "--batch", "--signal=USR1", number, environ=environ)
    assert answer.returncode == 0, answer.stderr
    state = until_over(cluster, environ, number)
    log = (folder / f"again-{number}.log").read_text()
    assert state == "COMPLETED", log
    assert log.count("time is up: queued again") == 1
    found = assert_one_model(log)
    # The first run has no fourth argument: its results would have failed.
    assert all(one["trick"] == "--resume it's" and 20 <= one["resumed"] < 120 for one in found)
    assert checkpoint.read_text() == "120"


def test_what_slurm_refuses_is_a_sentence(running: tuple[Cluster, Path, dict[str, str]]) -> None:
    cluster, folder, environ = running
    (folder / "big.sh").write_text(slurm.to_text(SlurmJob("qa", "a.py", nodes=9, partition="nowhere")))
    command = [sys.executable, "-m", "cputrain", "slurm", "submit", str(folder / "big.sh")]
    answer = cluster.hosts[0].run(*command, environ=environ)
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
