"""Ranks on several machines, made of namespaces: by ssh and by each MPI; and what goes wrong between machines.

What they compute together is in tests/distributed/test_hosts.py.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cputrain
from cputrain.launch import output
from tests.hosts import Cluster, needs_hosts
from tests.launch import programs
from tests.launch.programs import LAUNCH, shown
from tests.launch.test_several import INTEL, MPIS

pytestmark = needs_hosts

SSH = pytest.param(["--engine", "torchrun"], id="ssh")
ENGINES = [SSH, *(pytest.param(["--mpirun", *p.values], id=p.id, marks=p.marks) for p in MPIS)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("hosts")
    programs.write(place, show=programs.SHOW, sum=programs.SUM, fail=programs.FAIL, wait=programs.WAIT)
    (place / "two").write_text("box1\nbox2\n")
    return place


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with Cluster(2, place / "cluster", [place]) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.check_quiet()


def launched(cluster: Cluster, place: Path, *words: str, seconds: float = 100, **environ: str):
    return cluster.hosts[0].run(*LAUNCH, *words, folder=place, seconds=seconds, environ=environ)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_are_where_the_hostfile_puts_them(engine: list[str], cluster: Cluster, place: Path) -> None:
    (place / "uneven").write_text("box2:2\nbox1 slots=1\n")
    answer = launched(
        cluster, place, "--hostfile", "uneven", *engine, "--env", "SPECIAL=a b", "show.py", HF_TOKEN="hush"
    )
    assert answer.returncode == 0, answer.stderr
    ranks = shown(answer.stdout)
    assert [(one["host"], one["LOCAL_RANK"]) for one in ranks] == [("box2", "0"), ("box2", "1"), ("box1", "0")]
    # Rank 0's own name means 127.0.1.1 on its machine, which is no address for the others.
    assert {one["MASTER_ADDR"] for one in ranks} == {"10.77.0.2"}
    assert {one["SPECIAL"] for one in ranks} == {"a b"}
    assert "hush" not in answer.stdout + answer.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_fails_on_another_machine_ends_all(engine: list[str], cluster: Cluster, place: Path) -> None:
    answer = launched(cluster, place, "--hostfile", "two", "-n", "2", *engine, "fail.py", "3")
    assert answer.returncode == 3, answer.stderr


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[2]])
def test_output_that_another_machine_loses_is_told(engine: list[str], cluster: Cluster, place: Path) -> None:
    cluster.hosts[1].run("sh", "-c", "mkdir -p /tmp/logs && ln -sf /dev/full /tmp/logs/rank-1.log")
    answer = launched(cluster, place, "--hostfile", "two", "-n", "2", *engine, "--log_dir", "/tmp/logs", "show.py")
    assert answer.returncode == output.LOST, answer.stderr
    said = "cputrain: output is lost: /tmp/logs/rank-1.log can't be written (No space left on device)"
    assert answer.stderr.count(said) == 1 and len(shown(answer.stdout)) == 2


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1]])
def test_ctrl_c_ends_the_ranks_of_all_machines(engine: list[str], cluster: Cluster, place: Path) -> None:
    process = cluster.hosts[0].popen(*LAUNCH, "--hostfile", "two", "-n", "2", *engine, "wait.py", folder=place)
    for _ in range(2):
        assert "WAITING" in process.stdout.readline()
    assert any("wait.py" in words for words in cluster.hosts[1].commands())
    inner = [p for p in _descendants(process.pid) if "launch" in p.cmdline() and "nsenter" not in p.cmdline()]
    inner[0].send_signal(signal.SIGINT)
    process.communicate(timeout=40)
    assert process.returncode == 128 + signal.SIGINT


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_ranks_end_when_the_launch_is_killed(cluster: Cluster, place: Path) -> None:
    """Only ssh's closed connection tells the other machine."""
    words = ["--hostfile", "two", "-n", "2", "--engine", "torchrun", "wait.py"]
    process = cluster.hosts[0].popen(*LAUNCH, *words, folder=place)
    for _ in range(2):
        assert "WAITING" in process.stdout.readline()
    for inner in [inner for inner in _descendants(process.pid) if "launch" in inner.cmdline()]:
        with contextlib.suppress(psutil.NoSuchProcess):  # one ends with another
            inner.kill()
    process.kill()
    process.communicate(timeout=20)
    assert all(host.is_quiet(20) for host in cluster.hosts)


# --- One sentence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1]])
@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("box1\nbox2;reboot\n", "bad, line 2: 'box2;reboot' is not a host name or an address."),
        ("box1\nbox9\n", "the host box9 can't be resolved: check its name in the hostfile."),
        ("box1\n10.77.0.99\n", "10.77.0.99 can't be reached by ssh: "),
    ],
)
def test_wrong_hosts(engine: list[str], hosts: str, said: str, cluster: Cluster, place: Path) -> None:
    (place / "bad").write_text(hosts)
    answer = launched(cluster, place, "--hostfile", "bad", "-n", "2", *engine, "show.py", seconds=60)
    assert answer.returncode == 2 and "SHOWN" not in answer.stdout
    assert said in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1]])
def test_an_unknown_host_key(engine: list[str], cluster: Cluster, place: Path) -> None:
    first = cluster.hosts[0]
    first.run("ssh-keygen", "-R", "box2")
    first.run("ssh-keygen", "-R", "10.77.0.2")
    try:
        answer = launched(cluster, place, "--hostfile", "two", "-n", "2", *engine, "show.py", seconds=60)
    finally:
        first.run("cp", str(place / "cluster" / "known_hosts"), "/root/.ssh/known_hosts")
    assert answer.returncode != 0 and "SHOWN" not in answer.stdout
    assert "box2 can't be reached by ssh: its host key isn't known" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_port_in_use_on_another_machine(cluster: Cluster, place: Path) -> None:
    code = "import socket, sys; s = socket.create_server(('', 23987)); print('open', flush=True); sys.stdin.read()"
    holder = cluster.hosts[1].popen(sys.executable, "-c", code, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "open\n"
    (place / "reversed").write_text("box2\nbox1\n")
    words = ["--hostfile", "reversed", "-n", "2", "--engine", "torchrun", "--main_process_port", "23987", "show.py"]
    begin = time.monotonic()
    answer = launched(cluster, place, *words)
    holder.communicate()
    assert answer.returncode == 2 and time.monotonic() - begin < 60
    assert "cputrain: the port of 10.77.0.2:23987 is in use on box2" in answer.stderr


@pytest.fixture
def older(cluster: Cluster, place: Path) -> Iterator[None]:
    """The second machine has another version of cputrain than the first."""
    module = Path(cputrain.__file__)
    (place / "older.py").write_text(re.sub(r"(__version__ =).*", r'\1 "0.0.1"', module.read_text()))
    second = cluster.hosts[1]
    second.run("mount", "--bind", place / "older.py", module)
    yield
    second.run("umount", module)


@pytest.mark.parametrize("engine", ENGINES)
def test_another_version_on_another_machine(engine: list[str], cluster: Cluster, place: Path, older: None) -> None:
    answer = launched(cluster, place, "--hostfile", "two", "-n", "2", *engine, "wait.py", seconds=60)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr, answer.stderr
    assert f"box2 has cputrain 0.0.1, the machine that launches has {cputrain.__version__}" in answer.stderr


# --- Launched on each machine by hand ----------------------------------------------------------------------------

BY_HAND = ["--num_machines", "2", "--main-process-ip", "10.77.0.1", "--main_process_port", "29611", "-n", "2"]


def by_hand(cluster: Cluster, place: Path, *machines: int, **environ: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of the same command on some machines."""
    started = [
        cluster.hosts[number].popen(
            *LAUNCH, *BY_HAND, "--machine_rank", str(number), "sum.py", folder=place, environ=environ
        )
        for number in machines
    ]
    said = [one.communicate(timeout=100) for one in started]
    return [(one.returncode, *words) for one, words in zip(started, said, strict=True)]


def test_launched_by_hand(cluster: Cluster, place: Path) -> None:
    answers = by_hand(cluster, place, 0, 1)
    assert [code for code, _, _ in answers] == [0, 0], answers
    assert [out for _, out, _ in answers] == ["[0] SUM 3.0 3.0 gloo\n", "[1] SUM 3.0 3.0 gloo\n"]


def test_launched_by_hand_with_other_versions(cluster: Cluster, place: Path, older: None) -> None:
    for code, _, said in by_hand(cluster, place, 0, 1):
        assert code == 2 and "Traceback" not in said
        assert f"cputrain: box2 has cputrain 0.0.1, box1 has {cputrain.__version__}" in said


@pytest.mark.parametrize(("machine", "missing"), [(0, "machine 1 of 2 (counted from 0)"), (1, "machine 0")])
def test_launched_by_hand_on_one_machine_only(machine: int, missing: str, cluster: Cluster, place: Path) -> None:
    """It says whom it waits for, and ends."""
    ((code, _, said),) = by_hand(cluster, place, machine, CPUTRAIN_MEETING_SECONDS="12")
    assert code == 2 and "Traceback" not in said
    assert f"cputrain: waiting for {missing} at 10.77.0.1:29611" in said
    assert f"cputrain: {missing} did not come to 10.77.0.1:29611 within 12 s" in said


# --- mpirun itself -----------------------------------------------------------------------------------------------


@pytest.mark.needs_program(INTEL, "impi-rt, which pip installs")
def test_the_guides_mpirun_over_a_hostfile(cluster: Cluster, place: Path) -> None:
    words = ["-f", "two", "-n", "4", "-ppn", "2", "-genv", "OMP_NUM_THREADS=1", sys.executable, "-m", "cputrain", "run"]
    answer = cluster.hosts[0].run(
        INTEL, "-bootstrap", "ssh", *words, "show.py", folder=place, environ={"I_MPI_ROOT": sys.prefix}
    )
    assert answer.returncode == 0, answer.stderr
    ranks = shown(answer.stdout)
    assert [(one["RANK"], one["host"]) for one in ranks] == [("0", "box1"), ("1", "box1"), ("2", "box2"), ("3", "box2")]
    assert {one["MASTER_ADDR"] for one in ranks} == {"10.77.0.1"}
    assert "rank 0 was asked through MPI" in answer.stderr


@pytest.mark.needs_program("mpirun.openmpi", "openmpi-bin")
def test_open_mpis_mpirun_over_a_hostfile(cluster: Cluster, place: Path) -> None:
    """Nobody gives an address: MPI is asked, by mpi4py, although Intel's library lies nearer. Rank 0 is elsewhere."""
    words = ["-np", "2", "--host", "box2,box1", "--map-by", "seq", sys.executable, "-m", "cputrain", "run", "sum.py"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    answer = cluster.hosts[0].run("mpirun.openmpi", *words, folder=place, environ=root)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("SUM 3.0 3.0 gloo") == 2
    assert "they meet at 10.77.0.2, port " in answer.stderr and "rank 0 was asked through MPI" in answer.stderr
