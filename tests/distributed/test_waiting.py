"""Whether a rank that waits looks again and again, or sleeps at once."""

from __future__ import annotations

import pytest

from cputrain.distributed import shared_memory
from cputrain.distributed.rendezvous import Machine


@pytest.mark.parametrize(
    ("ranks", "cpus", "spins"),
    [
        (2, {0, 1}, True),  # also if each rank is bound to one of them
        (2, {5}, False),
        (3, {0, 1}, False),  # a look would take time from the rank that is waited for
        (1, {0}, True),
    ],
)
def test_ranks_spin_if_all_of_them_have_cpus(ranks, cpus, spins):
    assert bool(shared_memory._spin(Machine(list(range(ranks)), cpus=cpus))) == spins


def test_a_quota_counts_like_missing_cpus(monkeypatch):
    hardware = shared_memory.hardware.this_machine()
    tight = type(hardware.cpu_quota)(1.5, "a test")
    monkeypatch.setattr(shared_memory.hardware, "this_machine", lambda: type("Machine", (), {"cpu_quota": tight}))
    assert shared_memory._spin(Machine([0, 1], cpus={0, 1})) == 0
