"""A machine that is gone without a word: every launch says so and ends, and so does what runs on the lost machine."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts import ROOT, Cluster, needs_hosts
from tests.launch.programs import LAUNCH
from tests.launch.test_hosts import BY_HAND, ENGINES

pytestmark = [*needs_hosts, pytest.mark.timeout(400)]

PEERS = str(ROOT / "tests" / "distributed" / "peers.py")
LOST = "is lost: it, or the network on the way there, doesn't answer any more"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("lost")
    (place / "two").write_text("box1\nbox2\n")
    (place / "alone.py").write_text("import time\nprint('ALONE', flush=True)\ntime.sleep(300)\n")
    return place


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with Cluster(2, place / "cluster", [place]) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.check_quiet()


@contextlib.contextmanager
def cut_off(cluster: Cluster) -> Iterator[None]:
    """Pulls the second machine's plug. What runs there must end before it is put back, but for sshd's own sessions."""
    lost = cluster.hosts[1]
    cluster.take_down(lost)
    try:
        yield
        limit = time.monotonic() + 60
        while (left := [one for one in lost.commands() if not one.startswith("sshd: ")]) and time.monotonic() < limit:
            time.sleep(0.2)
        assert not left
    finally:
        cluster.bring_up(lost)
    lost.end_all()


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Output and errors, soon."""
    began = time.monotonic()
    words = process.communicate(timeout=100)
    assert time.monotonic() - began < 60, words
    return words


@pytest.mark.parametrize("engine", ENGINES)
def test_a_link_that_is_taken_down(engine: list[str], cluster: Cluster, place: Path) -> None:
    words = [*LAUNCH, "--hostfile", "two", "-n", "2", *engine, PEERS, "300"]
    process = cluster.hosts[0].popen(*words, folder=place)
    for _ in range(2):
        assert "by gloo" in process.stdout.readline()
    time.sleep(4)  # two beats
    with cut_off(cluster):
        out, said = ended(process)
    assert "ended PeerDied: rank 1 (host box2, " in out, out + said
    # The rank's exit code, if mpirun ends by itself, which depends on what it has just sent.
    assert process.returncode in (1, 7) and "Traceback" not in said, said
    named = f"cputrain: box2 {LOST}" in said or "cputrain: rank 1 is the cause, as rank 0 on box1 found" in said
    assert process.returncode == 7 or named, said


def test_ranks_that_do_not_communicate_end_too(cluster: Cluster, place: Path) -> None:
    """Nobody but the launch notices. Before, the launch was stopped for longer than a lost machine is waited for."""
    words = [*LAUNCH, "--hostfile", "two", "-n", "2", "--engine", "torchrun", "alone.py"]
    process = cluster.hosts[0].popen(*words, folder=place)
    for _ in range(2):
        assert "ALONE" in process.stdout.readline()
    launches = [p for p in psutil.Process(process.pid).children() if "launch" in p.cmdline()]
    launches[0].send_signal(signal.SIGSTOP)
    time.sleep(20)
    launches[0].send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started
    assert any("alone.py" in words for words in cluster.hosts[1].commands())
    with cut_off(cluster):
        _, said = ended(process)
    assert process.returncode == 1 and re.search(rf"cputrain: (box2|machine 1 .*) {LOST}", said), said


@pytest.mark.parametrize("script", [[PEERS, "300"], ["alone.py"]], ids=["ranks notice", "launch notices"])
def test_launched_by_hand(script: list[str], cluster: Cluster, place: Path) -> None:
    started = [
        host.popen(*LAUNCH, *BY_HAND, "--machine_rank", str(number), *script, folder=place)
        for number, host in enumerate(cluster.hosts)
    ]
    for process in started:
        assert process.stdout.readline()
    time.sleep(1)
    with cut_off(cluster):
        said = [ended(process) for process in started]
    assert all(process.returncode in (1, 7) for process in started), said
    if script[0] == PEERS:
        assert "PeerDied: rank 1 (host box2, " in said[0][0] and "PeerDied: rank 0 (host box1, " in said[1][0], said
    else:
        assert f"cputrain: machine 1 (counted from 0) {LOST}" in said[0][1], said
        assert "cputrain: box2 lost the machine at 10.77.0.1:29611, where all meet" in said[1][1], said
