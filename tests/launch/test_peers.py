"""Machines that tell each other how they fare, through the store of their rendezvous."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from cputrain.launch.liveness import Peers
from cputrain.launch.processes import Failure


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pair(clock: Clock) -> tuple[Peers, Peers]:
    store = HashStore()
    return Peers(store, 0, 2, clock), Peers(store, 1, 2, clock)


def test_all_have_ended_only_when_each_has_said_so(pair) -> None:
    for first, second in (pair, pair[::-1]):
        assert not first.all_ended() and not second.all_ended()
        first.say_ended()
    assert pair[0].all_ended() and pair[1].all_ended()


def test_a_machine_that_has_not_begun_has_not_ended() -> None:
    alone = Peers(HashStore(), 0, 2)
    alone.say_ended()
    assert not alone.all_ended() and alone.lost() == []


def test_the_first_failure_counts(pair) -> None:
    assert pair[0].failure() is None
    pair[1].say_failed(Failure("rank 1 failed", 3))
    pair[0].say_failed(Failure("rank 0 lost rank 1", 1))
    assert not pair[1].all_heard()
    assert pair[0].failure() == pair[1].failure() == Failure("rank 1 failed", 3)
    assert pair[1].all_heard() and Peers(HashStore(), 0, 1).all_heard()


def test_late_is_not_lost_and_silent_is(pair, clock: Clock) -> None:
    pair[0].say_ended()
    assert pair[0].lost() == []
    clock.now = 80
    pair[1].beat()
    for clock.now in (100, 160):
        assert pair[0].lost() == [], "heard of within 90 seconds"
    clock.now = 191
    assert pair[0].lost() == [1]
    pair[1].beat()
    assert pair[0].lost() == []


def test_who_has_ended_may_be_silent(pair, clock: Clock) -> None:
    pair[1].say_ended()
    assert pair[0].lost() == []
    clock.now = 1000
    assert pair[0].lost() == []


def test_a_machine_that_started_anew_needs_the_others_again() -> None:
    """A static rendezvous has one store for all starts: an end of the last one doesn't count in the next."""
    store = HashStore()
    first, second = Peers(store, 0, 2), Peers(store, 1, 2)
    first.say_ended()
    second.say_ended()
    again = Peers(store, 1, 2)
    assert first.lost() == [1] and not first.all_ended()
    assert not again.all_ended()
    Peers(store, 0, 2).say_ended()
    again.say_ended()
    assert again.all_ended()
