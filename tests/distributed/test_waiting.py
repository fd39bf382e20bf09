"""Whether a rank that waits looks again and again, or sleeps at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest

from cputrain.distributed import native_calls, shared_memory
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


def test_ranks_on_one_core_stop_spinning():
    """A spin there keeps the core from the rank that is waited for; a spin at the start of each wait would go on."""
    memory = mmap.mmap(-1, native_calls.segment_bytes(2))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ranks = [native_calls.SharedMemory(address, rank, 2, [-1, -1], shared_memory._SPIN) for rank in range(2)]
    most = [0, 0]

    def meet(rank: int) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread
        for _ in range(300):
            ranks[rank].publish("barrier", 0, [0, 0], [1, 1], -1, 60 * 10**9)
            most[rank] = max(most[rank], ranks[rank]._group.spins >> 4)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) >= 8, "waits that go without a spin"
