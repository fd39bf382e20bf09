"""Memory from the node of a rank's cores: which node that is, and what the kernel says of it."""

from __future__ import annotations

import os
import threading

import pytest

from cputrain.launch import cores
from tests.launch.test_topology import machine


@pytest.mark.parametrize(("cpus", "node"), [((0, 1), 0), ((4, 5), 1), ((3, 4), None)])
def test_the_node_of_some_cores(cpus: tuple[int, ...], node: int | None, tmp_path) -> None:
    assert cores.numa_node(cpus, machine(tmp_path, 2, 4)) == node


def test_one_node_needs_no_policy(tmp_path) -> None:
    assert cores.numa_node((0,), machine(tmp_path, 1, 4)) is None


def in_a_thread(work) -> list:
    """A policy is a thread's own: the tests' process keeps its own."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


def test_the_kernel_is_told() -> None:
    def work() -> tuple:
        return cores.prefer_memory_of(0), cores.memory_policy(), cores.prefer_memory_of(0)

    ((refused, policy, again),) = in_a_thread(work)
    if refused == os.strerror(1):
        pytest.skip("this container forbids memory policies")
    assert refused is None and policy == (1, [0])
    assert "a memory policy of its own, which is kept" in again


def test_a_node_that_is_not_there() -> None:
    assert in_a_thread(lambda: cores.prefer_memory_of(900)) != [None]
