"""Who is named when another machine fails: the rank that is known to be gone, and nobody else."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cputrain.distributed import failures, native_calls
from cputrain.distributed.failures import Peer
from cputrain.distributed.monitor import _IN_COLLECTIVE, DIFFERS, LATE, Monitor

EVERYBODY = [Peer(rank, rank, f"box{rank}", 100 + rank) for rank in range(3)]


def error(kind: int, culprit: int) -> failures.CollectiveError:
    """What the one rank of a machine hears that was told of a failure elsewhere."""
    status = native_calls.Status(kind=kind, culprit=1 + culprit)
    return failures.from_status(status, EVERYBODY[2:], EVERYBODY, "barrier", 5)


@pytest.mark.parametrize("kind", [native_calls.TIMEOUT, native_calls.DIED])
def test_nobody_is_blamed_if_nobody_is_known(kind: int) -> None:
    text = str(error(kind, failures.unknown_culprit(EVERYBODY)))
    assert "another machine" in text and "box" not in text
    assert "box1" in str(error(kind, 1))


def test_a_difference_elsewhere_is_no_death() -> None:
    for culprit, who in ((1, "box1"), (failures.unknown_culprit(EVERYBODY), "ranks of another machine")):
        found = error(native_calls.MISMATCH, culprit)
        assert isinstance(found, failures.CollectivesDiffer) and who in str(found)


# All numbers, and often those that mean something: ranks, goodbyes, and what announces more.
NUMBERS = some.integers(-(2**31), 2**31 - 1) | some.sampled_from([0, 1, -1, -2, -3, _IN_COLLECTIVE, DIFFERS])


def _packed(numbers: list[int]) -> bytes:
    return struct.pack(f"{len(numbers)}i", *numbers)


def monitor_of(connection: socket.socket) -> tuple[Monitor, list[tuple[int, int]]]:
    """Rank 0's, of three, connected with rank 1, and what it has told."""
    monitor, told = Monitor.__new__(Monitor), []
    monitor.rank, monitor.dead, monitor.found, monitor._closing = 0, -1, {}, False
    monitor._tell = lambda *what: told.append(what)
    monitor._connections, monitor.left, monitor._progress = {1: connection}, {}, {0: 0, 1: 0, 2: 0}
    return monitor, told


def test_a_peer_that_dies_in_the_middle_of_a_message_is_dead() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor, told = monitor_of(ours)
        theirs.sendall(struct.pack("iii", _IN_COLLECTIVE, 1, 7))
        assert monitor._listen(1) and monitor._progress[1] == 7
        theirs.sendall(struct.pack("ii", _IN_COLLECTIVE, 1))
        theirs.close()
        assert not monitor._listen(1)
    assert told == [(native_calls.DIED, 1)] and monitor.dead == 1


@settings(deadline=None)  # a busy machine may stop it for longer
@given(words=some.binary(max_size=40) | some.lists(NUMBERS, max_size=9).map(_packed))
def test_no_message_names_a_rank_that_is_not_there(words: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor, told = monitor_of(ours)
        theirs.sendall(words)
        theirs.close()
        while monitor._listen(1):
            pass
    assert all(rank in (0, 1, 2) for _, rank in told) and set(monitor._progress) == {0, 1, 2}
    assert set(monitor.left) <= {0, 1, 2} and monitor.dead in (-1, 0, 1, 2)


def test_a_difference_is_told_once_and_before_the_death_that_follows_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor, told = monitor_of(ours)
        theirs.sendall(2 * struct.pack("iii", DIFFERS, 1, 2))
        theirs.close()
        assert monitor._listen(1) and monitor._listen(1) and not monitor._listen(1)
    assert told == [(native_calls.MISMATCH, 1), (native_calls.DIED, 1)]


def test_a_rank_that_has_given_up_waiting_is_not_dead() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor, told = monitor_of(ours)
        theirs.sendall(struct.pack("iii", LATE, 1, 2))
        theirs.close()
        assert monitor._listen(1) and not monitor._listen(1)
    assert told[0] == (native_calls.TIMEOUT, 2) and monitor.found == {LATE: (1, 2)}
