"""Where the ranks meet: told by somebody, or asked of a process manager, of which there is a small one here."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time

import pytest

from cputrain.launch import pmi, rendezvous
from cputrain.launch.ranks import Place


def place(rank: int = 0, size: int = 2, local_size: int | None = 1, by: str = "pmi") -> Place:
    return Place(rank, size, 0, local_size, by, "a test")


@pytest.mark.parametrize(
    ("environ", "local_size", "by", "meeting"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "5", "PET_MASTER_ADDR": "b"}, 1, "pmi", ("a", 5)),
        ({"PET_MASTER_ADDR": "b", "PET_MASTER_PORT": "6"}, 1, "environment", ("b", 6)),
        ({"SLURM_STEP_NODELIST": "node[003-006,9],x", "SLURM_JOB_ID": "7"}, 1, "slurm", ("node003", 20217)),
        ({"SLURM_STEP_NODELIST": "n1,n2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, 1, "slurm", ("n1", 20219)),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7"}, 2, "slurm", ("127.0.0.1", 20217)),
        ({"OMPI_MCA_ess_base_jobid": str(12345 * 65536 + 1)}, 2, "openmpi", ("127.0.0.1", 22345)),
        ({}, 2, "openmpi", ("127.0.0.1", 29500)),
    ],
)
def test_told(environ, local_size, by, meeting, monkeypatch) -> None:
    monkeypatch.setattr(pmi.importlib.util, "find_spec", lambda name: None)
    found, exchange = rendezvous.meet(place(local_size=local_size, by=by), environ)
    assert (found.address, found.port) == meeting and exchange is None and found.reason


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("environment", "but not MASTER_ADDR"),
        ("openmpi", "-x MASTER_ADDR=… or pip install mpi4py|Open MPI"),
        ("pmi", ""),
    ],
)
def test_never_localhost_unless_all_ranks_are_local(by, said, monkeypatch) -> None:
    monkeypatch.setattr(pmi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="MASTER_ADDR") as error:
        rendezvous.meet(place(by=by), {})
    assert re.search(said, str(error.value))


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a-1,b", "a-1"), ("n[1,3]", "n1"), ("r[01-02]n[05-06]", "r01n05"), ("x.y[007-9].z", "x.y007.z")],
)
def test_the_first_host_of_slurms_notation(hosts, first) -> None:
    assert rendezvous.first_host(hosts) == first


def test_what_is_no_list_of_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="not a list of hosts"):
        rendezvous.first_host("-oProxyCommand=x")


# --- A process manager -------------------------------------------------------------------------------------------


class Manager:
    """Hydra's part of PMI-1 for a few ranks: put, get, barrier, finalize, abort."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: dict[str, str] = {}
        self.heard: list[list[str]] = [[] for _ in range(size)]
        self.ends = [socket.socketpair() for _ in range(size)]
        for rank in range(size):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def environ(self, rank: int) -> dict[str, str]:
        return {"PMI_FD": str(self.ends[rank][0].fileno()), "PMI_RANK": str(rank)}

    def _serve(self, rank: int) -> None:
        mine = self.ends[rank][1]
        with contextlib.suppress(OSError):  # a rank that aborts doesn't wait for an answer
            for line in mine.makefile("r"):
                words = dict(word.split("=", 1) for word in line.split())
                self.heard[rank].append(line.strip())
                mine.sendall(self._answer(words).encode() + b"\n")

    def _answer(self, words: dict[str, str]) -> str:
        match words["cmd"]:
            case "get_my_kvsname":
                return "cmd=my_kvsname kvsname=space"
            case "put":
                self.values[words["key"]] = words["value"]
                return "cmd=put_result rc=0 msg=success"
            case "get":
                return f"cmd=get_result rc=0 msg=success value={self.values[words['key']]}"
            case "barrier_in":
                try:
                    self.barrier.wait(10)
                except threading.BrokenBarrierError:
                    return "cmd=killed"
                return "cmd=barrier_out"
            case other:
                return f"cmd={other}_ack"


@pytest.fixture
def at_exit(monkeypatch):
    """What would run when the process ends."""
    registered: list = []
    monkeypatch.setattr(pmi.atexit, "register", registered.append)
    return registered


def all_ranks(size: int, work) -> list:
    """The answers of `work(rank)`, all at once."""
    answers: list = [None] * size

    def one(rank: int) -> None:
        try:
            answers[rank] = work(rank)
        except ValueError as error:
            answers[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def test_rank_0_is_asked_for_its_address(at_exit) -> None:
    manager = Manager(3)
    answers = all_ranks(3, lambda rank: rendezvous.meet(place(rank, 3), manager.environ(rank))[0])
    assert len({(meeting.address, meeting.port) for meeting in answers}) == 1
    assert not answers[0].address.startswith("127."), "the ranks might be on other machines"
    assert len(answers[0].token) == 64 and len({meeting.token for meeting in answers}) == 1
    with socket.create_server(("", answers[0].port)):
        pass  # the port is free again, for torch's store


def test_a_local_world_asks_for_a_port_only(at_exit) -> None:
    manager = Manager(2)
    answers = all_ranks(2, lambda rank: rendezvous.meet(place(rank, 2, 2), manager.environ(rank))[0])
    assert answers[0] == answers[1] and answers[0].address == "127.0.0.1" and len(answers[0].token) == 64


def test_strangers_are_not_taken_for_ranks_by_the_greeter() -> None:
    key = rendezvous._greeting_key("the token")
    with rendezvous._Greeter(None, key, 2) as greeter:
        strangers = [socket.create_connection(("127.0.0.1", greeter.port)) for _ in range(10)]
        for words, stranger in zip((b"", b"x", b"GET / HTTP/1.1\r\n\r\n", b"y" * 1000), strangers, strict=False):
            stranger.sendall(words)
        assert not rendezvous._answers("127.0.0.1", greeter.port, "another", 1) and greeter.met_at is None
        assert rendezvous._answers("127.0.0.1", greeter.port, "the token", 1)
        for stranger in strangers:
            stranger.close()
    assert greeter.met_at == "127.0.0.1"


def test_an_address_that_does_not_answer_is_a_sentence(at_exit, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "own_addresses", lambda: ["127.0.0.2"])
    monkeypatch.setattr(rendezvous, "_answers", lambda *_: False)
    manager = Manager(2)
    manager.barrier = threading.Barrier(2)

    def meet(rank: int):
        try:
            return rendezvous.meet(place(rank), manager.environ(rank))[0]
        except ValueError:
            manager.barrier.abort()  # as mpirun does
            raise

    assert re.search(r"rank 1 on .* can't reach rank 0 at 127\.0\.0\.2, port \d+: open the", str(all_ranks(2, meet)[1]))


def test_the_manager_is_told_of_the_end(at_exit) -> None:
    manager = Manager(1)
    connection = pmi.Pmi(manager.environ(0))
    (end,) = at_exit
    end()
    assert manager.heard[0][-1] == "cmd=finalize"
    failing = Manager(1)
    connection = pmi.Pmi(failing.environ(0))
    connection.exit_code = 3
    at_exit[1]()
    limit = time.monotonic() + 10
    while len(failing.heard[0]) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert failing.heard[0][1:] == ["cmd=abort exitcode=3"]


def test_the_way_to_an_address() -> None:
    assert rendezvous.address_towards("127.0.0.1") == "127.0.0.1"
    assert rendezvous.interface_towards("127.0.0.1") is None
    assert rendezvous.address_towards("no.such.host.invalid") is None
