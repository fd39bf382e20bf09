"""A rank that dies, leaves, is late or does something else: every other rank hears of it, by name, and soon."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from tests.distributed.scenarios import HOST, Said, said

# What the same processes go through, one after another, with a new group for each: names, ranks, seconds of the groups'
# timeout, machines. Where somebody is killed, that comes last.
RUNS: dict[str, tuple[list[str], int, float, str]] = {
    "two": (
        [
            *("collectives_differ", "sizes_differ", "dtypes_differ", "roots_differ", "parts_differ"),
            "reductions_differ",
            *("message_sizes_differ", "a_rank_raises", "a_rank_is_stopped", "waits_ten_seconds", "interrupted"),
            "a_rank_is_killed",
        ],
        2,
        60,
        "",
    ),
    "three": (["a_rank_is_killed"], 3, 60, ""),
    "three, impatient": (["a_rank_is_late"], 3, 2, ""),
    "three, monitored": (["two_ranks_are_late_for_a_monitored_barrier"], 3, 60, ""),
    "three machines, monitored": (["two_ranks_are_late_for_a_monitored_barrier"], 3, 60, "0;1,2"),
    "three, messages": (["a_rank_is_killed_while_others_wait_for_a_message"], 3, 60, ""),
    "two machines": (["sizes_differ", "parts_differ", "a_rank_is_stopped", "a_rank_is_killed"], 2, 60, "0;1"),
    "one and two": (
        ["reductions_differ", "the_last_size_differs", "the_last_takes_the_mean", "a_rank_is_killed"],
        3,
        60,
        "0;1,2",
    ),
}


@functools.cache
def outcome(run: str) -> dict[str, Said]:
    names, size, seconds, machines = RUNS[run]
    with tempfile.TemporaryDirectory() as folder:
        return said(Path(folder), names, size, seconds, CPUTRAIN_CCL_TEST_MACHINES=machines)


@pytest.mark.parametrize("run", ["two", "three"])
def test_a_killed_rank_is_named_within_seconds(run: str) -> None:
    found = outcome(run)["a_rank_is_killed"]
    assert set(found) == set(range(RUNS[run][1])) - {1}
    for after, text in found.values():
        assert after < 5
        assert text.startswith("PeerDied: rank 1 (host ") and f"host {HOST}" in text and " died" in text
        assert (
            "its last collective was barrier number 2" in text
            and "this rank is in all_reduce (float32, 4,000,000 bytes, sum)" in text
        )


def test_whoever_waits_for_a_message_hears_of_it_too() -> None:
    found = outcome("three, messages")["a_rank_is_killed_while_others_wait_for_a_message"]
    assert all(after < 5 and "rank 1" in text and "died" in text for after, text in found.values()) and len(found) == 2


def test_a_rank_that_ends_early_has_left() -> None:
    found = outcome("two")["a_rank_raises"]
    assert found[1][0] < 20 and "rank 0" in found[1][1] and "has ended the group" in found[1][1]


def test_the_timeout_names_the_late_rank() -> None:
    found = outcome("three, impatient")["a_rank_is_late"]
    for rank in (0, 1):
        assert "rank 2" in found[rank][1] and "is late: waited 2 s" in found[rank][1]
        assert found[rank][1].startswith("PeerLate")
        assert 2 <= found[rank][0] < 5
    assert "rank 2" in found[2][1]  # it comes too late, and hears why


@pytest.mark.parametrize("run", ["three, monitored", "three machines, monitored"])
def test_a_monitored_barrier_names_all_that_are_late(run: str) -> None:
    found = outcome(run)["two_ranks_are_late_for_a_monitored_barrier"][0][1]
    assert found.startswith("PeerLate: rank 1 (host ") and "rank 2 (host " in found, found
    assert found.endswith("did not come to monitored_barrier: waited 5 s."), found


@pytest.mark.parametrize("run", ["two", "two machines"])
def test_a_stopped_rank_is_waited_for(run: str) -> None:
    found = outcome(run)["a_rank_is_stopped"]
    assert [text for _, text in found.values()] == ["done", "done"] and found[0][0] > 3


DIFFERENCES = ("collectives_differ", "sizes_differ", "dtypes_differ", "roots_differ", "parts_differ")


@pytest.mark.parametrize("name", [*DIFFERENCES, "reductions_differ"])
def test_mismatched_collectives_are_reported(name: str) -> None:
    found = outcome("two")[name]
    assert len(found) == 2
    for after, text in found.values():
        assert after < 5 and text.startswith("CollectivesDiffer: the ranks called different collectives"), text


def test_a_message_of_another_size_is_reported() -> None:
    found = outcome("two")["message_sizes_differ"]
    assert "rank 0 sent 20 bytes, this rank receives 24" in found[1][1]


def test_waiting_burns_no_core() -> None:
    found = outcome("two")["waits_ten_seconds"]
    assert [text for _, text in found.values()] == ["done", "done"] and found[0][0] > 9


def test_ctrl_c_ends_a_wait() -> None:
    found = outcome("two")["interrupted"]
    assert found[0][1].startswith("KeyboardInterrupt") and found[0][0] < 20


# --- Between machines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["two machines", "one and two"])
def test_a_killed_rank_of_another_machine_is_named(run: str) -> None:
    found = outcome(run)["a_rank_is_killed"]
    assert set(found) == set(range(RUNS[run][1])) - {1}
    for after, text in found.values():
        assert after < 5 and text.startswith(f"PeerDied: rank 1 (host {HOST}, process "), text
        assert "its last collective was" in text and "this rank is in all_reduce" in text


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("two machines", "sizes_differ"),
        ("two machines", "parts_differ"),
        ("one and two", "reductions_differ"),
        ("one and two", "the_last_size_differs"),  # which the first machine sees nothing of
        ("one and two", "the_last_takes_the_mean"),
    ],
)
def test_mismatched_collectives_of_two_machines_are_reported(run: str, name: str) -> None:
    found = outcome(run)[name]
    assert len(found) == RUNS[run][1]
    for after, text in found.values():
        assert after < 20 and text.startswith("CollectivesDiffer: the ranks called different collectives"), text
    if name == "reductions_differ":
        assert "(float32, 40 bytes, max)" in found[0][1] and "(float32, 40 bytes, sum)" in found[0][1]
    if name == "the_last_takes_the_mean":
        assert "rank 2" in found[1][1] and "is in all_reduce number 3 (float32, 40 bytes, avg)" in found[1][1], found[
            1
        ][1]
