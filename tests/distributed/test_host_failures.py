"""A link that is taken down, a host that is killed, a rank that is killed or stopped: heard of on every other host."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.hosts import ROOT, Cluster, needs_hosts

pytestmark = [*needs_hosts, pytest.mark.timeout(400)]

PEERS = str(ROOT / "tests" / "distributed" / "peers.py")
MACHINES = (1, 2)  # ranks of each host: both ways of data are used


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("failures")
    with Cluster(2, place / "cluster", [place]) as cluster:
        yield cluster


class Ranks:
    """Three ranks on two hosts, which nobody watches: what one hears of another, it hears by itself."""

    def __init__(self, cluster: Cluster, *arguments: str) -> None:
        self.cluster, self.started, self.hosts = cluster, [], []
        places = [(host, local) for host, count in zip(cluster.hosts, MACHINES, strict=True) for local in range(count)]
        for rank, (host, local) in enumerate(places):
            environ = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": local}
            environ |= {"LOCAL_WORLD_SIZE": MACHINES[cluster.hosts.index(host)], "OMP_NUM_THREADS": 1}
            environ |= {"MASTER_ADDR": cluster.hosts[0].address, "MASTER_PORT": 29533}
            words = [sys.executable, "-m", "cputrain", "run", PEERS, *arguments]
            self.started.append(host.popen(*words, environ={name: str(value) for name, value in environ.items()}))
            self.hosts.append(host)
        for rank, process in enumerate(self.started):
            assert f"on {self.hosts[rank].name} by shm+gloo" in process.stdout.readline()
        time.sleep(1)

    def pid(self, rank: int) -> int:
        """Of the rank itself, behind nsenter and before its worker."""
        return psutil.Process(self.started[rank].pid).children()[0].pid

    def ended(self, *ranks: int, seconds: float) -> dict[int, tuple[float, str]]:
        """When each of these ranks said what, by the clock that all hosts share; each ends with it."""
        found = {}
        for rank in ranks:
            try:
                self.started[rank].wait(seconds)
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {rank} has not ended")
            line = self.started[rank].stdout.readline()
            said = re.fullmatch(r"PEER \d+ (\S+) \d+ ended (.*)\n", line)
            assert said and self.started[rank].returncode == 7, line + self.started[rank].stderr.read()
            found[rank] = float(said[1]), said[2]
        return found

    def close(self) -> None:
        for host in self.cluster.hosts:
            host.end_all()
        for process in self.started:
            process.send_signal(signal.SIGCONT)  # nsenter stops with the rank that it has started
            process.communicate(timeout=30)


@pytest.fixture
def ranks(cluster: Cluster) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def start(*arguments: str) -> Ranks:
        made.append(Ranks(cluster, *arguments))
        return made[-1]

    yield start
    for one in made:
        one.close()
    cluster.check_quiet()


def test_a_link_that_is_taken_down(ranks: Callable[..., Ranks], cluster: Cluster) -> None:
    running = ranks("300")
    time.sleep(3)  # the monitors have told each other of a collective by then: they do so every second
    down = time.time()
    cluster.take_down(cluster.hosts[1])
    try:
        found = running.ended(0, 1, 2, seconds=60)
    finally:
        cluster.bring_up(cluster.hosts[1])
    assert all(when - down < 15 and said.startswith("PeerDied: rank ") for when, said in found.values()), found
    assert "(host box2, " in found[0][1] and "its machine can't be reached" in found[0][1]
    assert all("rank 0 (host box1, " in found[rank][1] for rank in (1, 2))
    known = ("all_reduce number", "the one before")
    assert all(said.split("its last collective was ")[1].startswith(known) for _, said in found.values()), found


def test_a_host_whose_processes_are_killed(ranks: Callable[..., Ranks], cluster: Cluster) -> None:
    running = ranks("300")
    killed = time.time()
    cluster.hosts[1].end_all()
    (when, said) = running.ended(0, seconds=60)[0]
    assert when - killed < 5 and re.match(r"PeerDied: rank [12] \(host box2, process \d+\) died", said), said


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_whose_worker_holds_its_sockets(victim: int, ranks: Callable[..., Ranks]) -> None:
    """The first of all, the first of its host, and one that only its own host speaks to."""
    running = ranks("300")
    killed = time.time()
    psutil.Process(running.pid(victim)).kill()
    found = running.ended(*{0, 1, 2} - {victim}, seconds=60)
    for when, said in found.values():
        assert when - killed < 5, found
        assert said.startswith(f"PeerDied: rank {victim} (host {running.hosts[victim].name}, process "), said


def test_late_is_not_dead(ranks: Callable[..., Ranks]) -> None:
    """One rank of the second host is stopped for 60 s, the other holds its interpreter for 20 s: all wait."""
    running = ranks("300", "gil", "1")
    stopped = psutil.Process(running.pid(2))
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(60)
    assert all(process.poll() is None for process in running.started)
    stopped.send_signal(signal.SIGCONT)
    time.sleep(5)
    assert all(process.poll() is None for process in running.started)
    # They have gone on, and not only not ended: a death is heard of in the middle of a collective that came later.
    psutil.Process(running.pid(2)).kill()
    said = running.ended(0, seconds=60)[0][1]
    assert int(re.search(r"this rank is in all_reduce number (\d+)", said)[1]) > 2, said


@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_timeout_is_honoured_and_names_the_late_rank(late: int, ranks: Callable[..., Ranks]) -> None:
    running = ranks("8")
    stopped = psutil.Process(running.pid(late))
    stopped.send_signal(signal.SIGSTOP)
    began = time.time()
    found = running.ended(*{0, 1, 2} - {late}, seconds=60)
    for when, said in found.values():
        assert 7 < when - began < 30
        assert said.startswith(f"PeerLate: rank {late} (host {running.hosts[late].name}, "), said
        assert "is late: waited 8 s (ddp_timeout)" in said
    stopped.kill()
