"""Cores for ranks on machines that we don't have: equal shares, whole cores, one NUMA node, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cputrain.launch import cores
from tests.unit.test_hardware import V2, ZEN3, FakeMachine


def machine(tmp_path: Path, sockets: int, cores: int, smt: int = 1, affinity: str = "", quota: str = ""):
    fake = FakeMachine(tmp_path)
    total = sockets * cores * smt
    fake.cpuinfo(total, ZEN3)
    fake.topology(sockets, cores, smt)
    fake.process(affinity or f"0-{total - 1}", mounts=(V2,))
    if quota:
        fake.write("/sys/fs/cgroup/cpu.max", quota)
    return fake.read()


def bound(division: cores.Division) -> list:
    return [share.cpus for share in division.shares]


def test_two_sockets_two_ranks(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 2, 4, smt=2), 2)
    assert bound(division) == [(0, 1, 2, 3), (4, 5, 6, 7)], "one thread of each core"
    assert [share.threads for share in division.shares] == [4, 4]
    assert division.warnings == ()


def test_four_ranks_on_two_sockets(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 2, 4), 4)
    assert bound(division) == [(0, 1), (2, 3), (4, 5), (6, 7)] and not division.warnings


def test_three_ranks_on_two_sockets_stay_within_a_node(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 2, 4), 3)
    assert bound(division) == [(0, 1), (2, 3), (4, 5)]
    assert division.warnings == ("2 of 8 cores stay idle: 3 ranks get 2 each, because steps are in step.",)


def test_uneven_cores(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 1, 7), 2)
    assert bound(division) == [(0, 1, 2), (3, 4, 5)]
    assert "1 of 7 cores stay idle" in division.warnings[0]


def test_one_rank_on_two_sockets_gets_both_and_a_warning(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 2, 4), 1)
    assert bound(division) == [tuple(range(8))]
    assert "1 rank on 2 NUMA nodes: memory of other nodes is slower to reach, start 2" in division.warnings[0]


def test_affinity_that_cuts_a_node(tmp_path) -> None:
    """Six cores, four of one node and two of the other: two each, and nobody crosses."""
    division = cores.divide(machine(tmp_path, 2, 4, affinity="0-5"), 3)
    assert bound(division) == [(0, 1), (2, 3), (4, 5)] and not division.warnings


def test_affinity_to_a_second_thread_counts_as_its_core(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 1, 2, smt=2, affinity="2,3"), 2)
    assert bound(division) == [(2,), (3,)]


def test_more_ranks_than_cores(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 1, 2), 4)
    assert bound(division) == [(0,), (1,), (0,), (1,)]
    assert "4 ranks on 2 cores take turns, and every step waits for the last: start at most 2." in division.warnings
    assert all(share.takes_turns for share in division.shares)


def test_a_quota_gives_time_but_no_cores(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 1, 16, quota="400000 100000"), 2)
    assert bound(division) == [None, None]
    assert [share.threads for share in division.shares] == [2, 2]
    assert "quota" in division.shares[0].reason and not division.warnings


@pytest.mark.parametrize(
    ("quota", "said"), [("300000 100000", "1 of 3 cores stay idle"), ("100000 100000", "take turns")]
)
def test_a_quota_that_does_not_divide(tmp_path, quota, said) -> None:
    division = cores.divide(machine(tmp_path, 1, 16, quota=quota), 2)
    assert {share.threads for share in division.shares} == {1} and said in division.warnings[0]
    assert {share.takes_turns for share in division.shares} == {said == "take turns"}


def test_cores_for_communication(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 2, 4), 2, communication=1)
    assert [(share.threads, share.communication) for share in division.shares] == [(3, (3,)), (3, (7,))]
    assert bound(division) == [(0, 1, 2, 3), (4, 5, 6, 7)], "the rank may use them all"


def test_nothing_left_to_compute_with(tmp_path) -> None:
    division = cores.divide(machine(tmp_path, 1, 2), 2, communication=1)
    assert [share.threads for share in division.shares] == [1, 1]
    assert "--cores-for-communication 1 would leave nothing of 1 core" in division.warnings[0]


def test_alone(tmp_path) -> None:
    share = cores.alone(machine(tmp_path, 1, 8, affinity="0-3"), 1).shares[0]
    assert (share.cpus, share.threads) == (None, 3)


@pytest.mark.parametrize(
    ("asked", "number", "said"),
    [
        (
            "8",
            8,
            "OMP_NUM_THREADS=8 is kept, but this rank has 4 cores to compute with: threads wait for each other, 4",
        ),
        ("2", 2, "OMP_NUM_THREADS=2 is kept; 2 of 4 cores stay idle."),
        ("4", 4, None),
        ("2,3", 2, "2 of 4 cores stay idle"),  # the second is for loops within loops
        (None, 4, None),
        ("0", 4, None),
        ("all", 4, None),
    ],
)
def test_a_users_own_threads(asked, number, said) -> None:
    found, warning = cores.threads(asked, cores.Share((0, 1, 2, 3), 4, (), ""))
    assert found == number
    assert warning is None if said is None else said in warning
