"""MPI and oneCCL between machines made of namespaces, which share no memory and have addresses of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.mpi_ranks import BESIDE
from tests.hosts import Cluster, needs_hosts
from tests.launch.programs import LAUNCH
from tests.launch.test_several import INTEL

pytestmark = [*needs_hosts, pytest.mark.needs_program(INTEL, "impi-rt, which pip installs")]

PROGRAM = """
import os, torch, torch.distributed as dist
import cputrain.distributed

dist.init_process_group("ccl")
rank = dist.get_rank()
for length in (3, 1_000_000):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((length,), rank + 1.0, dtype=dtype)
        dist.all_reduce(tensor)
        assert (tensor == 6).all()
gathered = [torch.zeros(5) for _ in range(3)]
dist.all_gather(gathered, torch.full((5,), float(rank)))
assert [part[0].item() for part in gathered] == [0, 1, 2]
if rank == 2:
    dist.send(torch.ones(7), 0)
elif rank == 0:
    dist.recv(found := torch.zeros(7), 2)
    assert (found == 1).all()
print("DONE", os.uname().nodename, dist.group.WORLD.transport.name, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("engines")
    (place / "program.py").write_text(PROGRAM)
    (place / "hosts").write_text("box1:2\nbox2:1\n")
    return place


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with Cluster(2, place / "cluster", [place]) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "transport, started",
    [("mpi", ["--mpirun", INTEL]), ("oneccl", ["--mpirun", INTEL]), ("oneccl", ["--engine", "torchrun"])],
    ids=["mpi", "oneccl-over-mpi", "oneccl-by-ssh"],
)
def test_three_ranks_of_two_machines(transport: str, started: list[str], cluster: Cluster, place: Path) -> None:
    if transport == "oneccl" and not (BESIDE / "lib/ccl/cpu/lib/libccl.so.1").exists():
        pytest.skip('needs pip install "cputrain[oneccl]"')
    answer = cluster.hosts[0].run(
        *LAUNCH,
        "--hostfile",
        "hosts",
        *started,
        "program.py",
        folder=place,
        seconds=200,
        environ={"CPUTRAIN_CCL_TRANSPORT": transport},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for host, count in (("box1", 2), ("box2", 1)):
        assert answer.stdout.count(f"DONE {host} shm+{transport}") == count, answer.stdout
    cluster.check_quiet()
