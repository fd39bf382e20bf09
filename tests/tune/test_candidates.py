"""What is tried on machines that we don't have: whole divisions of the cores, and nothing that can't be fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from cputrain.launch.config import Config, environment_of
from cputrain.launch.cores import divide
from cputrain.tune.candidates import Candidate, candidates
from tests.launch.test_topology import machine


def words(found: list[Candidate]) -> list[str]:
    return [one.words for one in found]


def test_two_cores(tmp_path: Path) -> None:
    assert words(candidates(machine(tmp_path, 1, 2))) == [
        "1 rank × 2 threads",
        "2 ranks × 1 thread",
        "1 rank × 2 threads, threads bound",
        "1 rank × 1 thread",
    ]


def test_one_core_leaves_only_allocators_and_formats(tmp_path: Path) -> None:
    found = candidates(machine(tmp_path, 1, 1), ["fp32", "int16"], ["default", "tcmalloc"])
    assert words(found) == [
        "1 rank × 1 thread, fp32",
        "1 rank × 1 thread, int16",
        "1 rank × 1 thread, tcmalloc, fp32",
        "1 rank × 1 thread, tcmalloc, int16",
    ]


@pytest.mark.parametrize(("sockets", "cores", "smt"), [(1, 2, 2), (1, 6, 1), (2, 4, 2), (2, 24, 2), (4, 16, 1)])
def test_all_cores_are_used_evenly_and_none_twice(tmp_path: Path, sockets: int, cores: int, smt: int) -> None:
    here = machine(tmp_path, sockets, cores, smt)
    found = candidates(here, ["fp32", "int16"], ["default", "jemalloc"])
    assert len(set(found)) == len(found)
    assert [one.differs for one in found] == sorted(one.differs for one in found)
    for one in found:
        full = one.threads * 2 if one.threads * 2 * one.ranks == sockets * cores else one.threads + one.communication
        assert one.ranks * max(full, one.threads) <= sockets * cores
        if one.ranks > 1:
            assert divide(here, one.ranks, one.communication).warnings == ()
        if one.differs == 0:
            assert one.ranks * one.threads == sockets * cores


def test_cores_are_spared_for_communication_where_a_rank_has_some(tmp_path: Path) -> None:
    found = {one.ranks for one in candidates(machine(tmp_path, 2, 8)) if one.communication}
    assert found == {2, 4}


def test_ranks_of_a_large_machine_have_four_cores_or_more(tmp_path: Path) -> None:
    found = {one.ranks for one in candidates(machine(tmp_path, 2, 32))}
    assert found == {1, 2, 4, 8, 16}


def test_a_candidate_becomes_a_configuration_and_keeps_what_it_does_not_tune() -> None:
    base = Config(mixed_precision="bf16", env=("MY=1", "OMP_NUM_THREADS=7", "CPUTRAIN_DTYPE=fp32"))
    made = Candidate(2, 4, True, "default", 1, "int16").config(base)
    assert (made.distributed_type, made.num_processes, made.mixed_precision) == ("MULTI_CPU", 2, "bf16")
    assert made.cores_for_communication == 1
    added, _ = environment_of(made, {})
    assert added["MY"] == "1" and added["OMP_NUM_THREADS"] == "4" and added["OMP_PROC_BIND"] == "close"
    assert added["CPUTRAIN_DTYPE"] == "int16"
    plain = Candidate(1, 4).config(made)
    assert plain.distributed_type == "NO" and plain.cores_for_communication == 0
    assert set(plain.env) == {"MY=1", "CPUTRAIN_DTYPE=int16", "OMP_NUM_THREADS=4"}
