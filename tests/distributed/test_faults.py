"""A rank's fault under DDP: a few of the cases of fault_matrix.py, of which `make soak` runs all."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cputrain import blame
from cputrain.blame import Blame
from cputrain.keep_alive import LAST_WORDS_SECONDS
from cputrain.launch import agent, processes
from tests.distributed import fault_matrix
from tests.distributed.fault_matrix import SCRIPT, Case, Ended
from tests.hosts import Cluster, needs_hosts
from tests.launch.programs import launch

# --- On this machine, which needs no root ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["exit-0", "kill", "other-shape"])
def test_a_fault_on_this_machine(fault: str, tmp_path: Path) -> None:
    case = Case(fault, "one", "agent", 1)
    answer = launch("-n", "2", SCRIPT, fault, "1", folder=tmp_path)
    assert fault_matrix.wrong(case, Ended(answer.returncode, answer.stdout + answer.stderr, 0.0)) == [], answer.stderr
    assert re.search(r"\[0\] RuntimeError: .*(PeerDied: rank 1 \(host |CollectivesDiffer)", answer.stderr)
    assert "all_reduce number 14" in answer.stderr or fault == "other-shape"
    assert _nothing_runs()


def _nothing_runs(seconds: float = 10) -> bool:
    limit = time.monotonic() + seconds
    while left := [p for p in psutil.process_iter(["cmdline"]) if SCRIPT in (p.info["cmdline"] or [])]:
        if time.monotonic() > limit:
            for process in left:
                process.kill()
            return False
        time.sleep(0.1)
    return True


# --- On two machines ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("faults")
    with Cluster(2, place / "cluster", [place]) as cluster:
        yield cluster


HOST_CASES = [Case("raise", "two", "ssh", 1), Case("kill", "two", "mpi", 1)]
MARKS = {"mpi": [pytest.mark.needs_program("mpirun.mpich", "mpich")]}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[*needs_hosts, *MARKS.get(case.engine, [])]) for case in HOST_CASES],
)
def test_a_fault_on_two_machines(case: Case, cluster: Cluster, tmp_path_factory) -> None:
    ended = fault_matrix.run(case, cluster, tmp_path_factory.getbasetemp() / "faults0")
    assert fault_matrix.wrong(case, ended) == [], ended.text
    cluster.check_quiet()


# --- Who is named ------------------------------------------------------------------------------------------------

DIED = "PeerDied: rank 1 (host box, process 7) died."


@pytest.mark.parametrize(
    ("codes", "blames", "expected"),
    [
        ({0: 1, 1: -9, 2: None}, {0: Blame(1, DIED)}, ("rank 1 on box was ended by SIGKILL", 137)),
        ({0: 1, 1: 3}, {0: Blame(1, DIED)}, ("rank 1 on box failed with exit code 3", 3)),
        ({0: 1, 1: 0}, {0: Blame(1, DIED)}, (f"rank 1 is the cause, as rank 0 on box found: {DIED[:-1]}", 1)),
        (
            {0: 1, 1: 1, 2: 1},
            {0: Blame(1, "CollectivesDiffer: a"), 1: Blame(0, "CollectivesDiffer: b"), 2: Blame(1, "no")},
            ("rank 0 on box failed: CollectivesDiffer: a", 1),
        ),
    ],
    ids=["killed", "failed", "ended early", "differ"],
)
def test_the_cause_is_named_and_not_who_suffers_from_it(codes, blames, expected, monkeypatch) -> None:
    monkeypatch.setattr(processes.socket, "gethostname", lambda: "box")
    found = processes.first_failure(codes, blames)
    assert found is not None and (found.sentence, found.code) == expected


def test_the_cause_is_waited_for_as_long_as_it_may_show() -> None:
    blames = {0: Blame(1, DIED)}
    assert processes.cause_may_show({0: 1, 1: None}, blames), "it runs still"
    assert processes.cause_may_show({0: 1}, blames), "it is on another machine"
    assert not processes.cause_may_show({0: 1, 1: -9}, blames) and not processes.cause_may_show({0: 1, 1: 0}, blames)
    assert not processes.cause_may_show({0: 1, 1: None}, {}), "no rank is blamed"


def test_a_rank_that_takes_long_to_end_is_heard_before_a_lost_machine_is_given_up(tmp_path: Path, monkeypatch) -> None:
    """It has said which rank is gone; the agent itself knows only the machine."""
    monkeypatch.setenv(blame.FOLDER, str(tmp_path))
    waiting = agent.Agent.__new__(agent.Agent)
    waiting._remaining_restarts, waiting._broken_since = 0, time.monotonic() - 2 * LAST_WORDS_SECONDS
    monkeypatch.setattr(agent.Agent, "_exit_codes", lambda *_: {0: None})
    waiting._worker_group = None
    with pytest.raises(agent.MachineLost, match=r"machine 1 \(counted from 0\) is lost"):
        waiting._end_without([1])
    blame.tell(Blame(1, DIED), {blame.FOLDER: str(tmp_path), "RANK": "0"})
    with pytest.raises(agent.MachineLost, match=r"rank 1 is the cause, as rank 0 on .* found: PeerDied: rank 1 "):
        waiting._end_without([1])


def test_the_first_blame_counts(tmp_path: Path) -> None:
    environ = {blame.FOLDER: str(tmp_path), "RANK": "3"}
    assert blame.read(str(tmp_path), 3) is None
    for sentence in ("the cause", "what followed"):
        blame.tell(Blame(1, sentence), environ)
    assert blame.read(str(tmp_path), 3) == Blame(1, "the cause")
    os.utime(tmp_path / "3", (0, time.time() - 7))
    assert 7 <= blame.seconds_ago(str(tmp_path), 3) < 60
    blame.forget_all(str(tmp_path))
    assert blame.read(str(tmp_path), 3) is None
