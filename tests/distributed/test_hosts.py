"""The demo's training on machines made of namespaces, started in every way: the losses of one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import ROOT, Cluster, needs_hosts
from tests.launch.programs import CLEAN, LAUNCH
from tests.launch.test_several import MPIS

pytestmark = [*needs_hosts, pytest.mark.timeout(300)]

STEPS = "3"
DEMO = str(ROOT / "tests" / "distributed" / "demo_training.py")
# Who starts the ranks, how many there are on each machine, and which way data takes within and between machines.
STARTS = [
    pytest.param(["--engine", "torchrun"], (2, 2), "shm+gloo", id="ssh, 2 hosts"),
    pytest.param(["--mpirun", *MPIS[0].values], (2, 2), "shm+gloo", id="Intel, 2 hosts", marks=MPIS[0].marks),
    pytest.param(["--mpirun", *MPIS[1].values], (2, 1, 1), "shm+gloo", id="MPICH, 3 hosts", marks=MPIS[1].marks),
    pytest.param(["--mpirun", *MPIS[2].values], (1, 1, 1, 1), "gloo", id="Open MPI, 4 hosts", marks=MPIS[2].marks),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with Cluster(4, place / "cluster", [place]) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.check_quiet()


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """What one process with the whole batches loses."""
    words = [sys.executable, "-m", "cputrain", "run", DEMO, STEPS]
    answer = subprocess.run(words, capture_output=True, text=True, env=CLEAN, timeout=200, check=True)
    return losses(answer.stdout)


def losses(output: str) -> list[float]:
    return json.loads(re.search(r"LOSSES (\[.*\])", output)[1])


def check(output: str, ranks: tuple[int, ...], transport: str, alone: list[float]) -> None:
    """Losses, and that memory was shared within machines and only there, with `transport` between them."""
    first = [sum(ranks[:machine]) for machine in range(len(ranks))]
    machines = [list(range(at, at + count)) for at, count in zip(first, ranks, strict=True)]
    places = [json.loads(text) for text in re.findall(r"PLACE (\{.*\})", output)]
    assert sorted((one["rank"], one["host"]) for one in places) == [
        (rank, f"box{machine}") for machine, of_it in enumerate(machines, 1) for rank in of_it
    ]
    assert all(one["machines"] == machines and one["transport"] == transport for one in places), places
    assert losses(output) == pytest.approx(alone, rel=1e-5)


def test_hosts_share_nothing(cluster: Cluster) -> None:
    """What the other tests of this file show rests on it."""
    pids = [os.getpid(), *(host.pid for host in cluster.hosts)]
    for kind in ("net", "mnt", "uts", "ipc", "pid"):
        assert len({os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids}) == len(pids), kind
    for folder in ("/dev/shm", "/tmp"):
        devices = {host.run("stat", "-c", "%d", folder).stdout for host in cluster.hosts}
        assert len(devices) == len(cluster.hosts)
    assert len({host.run("cat", "/etc/hosts").stdout for host in cluster.hosts}) == len(cluster.hosts)


@pytest.mark.parametrize(("engine", "ranks", "transport"), STARTS)
def test_launch(
    engine: list[str], ranks: tuple[int, ...], transport: str, cluster: Cluster, place: Path, alone: list[float]
) -> None:
    (place / "hostfile").write_text("".join(f"box{n}:{count}\n" for n, count in enumerate(ranks, 1)))
    words = [*LAUNCH, "--hostfile", "hostfile", *engine, DEMO, STEPS]
    answer = cluster.hosts[0].run(*words, folder=place, seconds=200)
    assert answer.returncode == 0, answer.stderr
    check(answer.stdout, ranks, transport, alone)
    assert f"ccl, group 0 of 4: {transport} ({len(ranks)} machines" in answer.stderr


def test_torchrun(cluster: Cluster, place: Path, alone: list[float]) -> None:
    """Its rendezvous gives the ranks the first machine's own name, which means 127.0.1.1 there."""
    meeting = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "box1:29512"]
    words = [sys.executable, "-m", "torch.distributed.run", *meeting, "-m", "cputrain", "run", DEMO, STEPS]
    both = [host.popen(*words, folder=place) for host in cluster.hosts[:2]]
    answers = [one.communicate(timeout=200) for one in both]
    assert [one.returncode for one in both] == [0, 0], answers
    output = "".join(out for out, _ in answers)
    found = {one["host"]: one["rank"] for one in map(json.loads, re.findall(r"PLACE (\{.*\})", output))}
    if found["box2"] < found["box1"]:  # torchrun numbers its machines as it likes
        output = output.translate(str.maketrans({"1": "2", "2": "1"}))
    check(output, (2, 2), "shm+gloo", alone)
