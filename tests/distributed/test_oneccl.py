"""The real oneCCL as the engine between machines: every operation and dtype, with and without mpirun; failures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cputrain.distributed.engines import oneccl, oneccl_library
from tests.distributed import mpi_ranks
from tests.distributed.mpi_ranks import BESIDE, MpiOutcome
from tests.distributed.ranks import Outcome, cases_of, spawn, start
from tests.distributed.scenarios import HOST, said

needs_oneccl = pytest.mark.skipif(
    not (BESIDE / "lib/ccl/cpu/lib/libccl.so.1").exists(), reason='needs pip install "cputrain[oneccl]"'
)
OPERATIONS = "tests.distributed.operations"
ONECCL = {"CPUTRAIN_CCL_TRANSPORT": "oneccl"}


@pytest.fixture(scope="module", params=["mpirun", "alone"])
def outcome(request, tmp_path_factory) -> tuple[str, Outcome]:
    """Over Intel MPI, two ranks; without mpirun three, of which two share a machine."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mpirun":
        return "oneccl", MpiOutcome(folder, mpi_ranks.intel(2), 2, OPERATIONS, **ONECCL)
    return "shm+oneccl", Outcome(folder, 3, OPERATIONS, CPUTRAIN_CCL_TEST_MACHINES="0,1;2", **ONECCL)


@needs_oneccl
@pytest.mark.parametrize("case", cases_of(OPERATIONS))
def test_operation_over_oneccl(case: str, outcome: tuple[str, Outcome]) -> None:
    outcome[1].check(case)


@needs_oneccl
def test_the_transport_is_oneccl(outcome: tuple[str, Outcome]) -> None:
    assert outcome[1].transports == {outcome[0]}


# --- Failures ----------------------------------------------------------------------------------------------------


@needs_oneccl
def test_waits_differences_and_deaths(tmp_path) -> None:
    """The same processes, of two machines: one that failed in the middle of oneCCL's work doesn't hinder the next."""
    differences = ["the_last_size_differs", "reductions_differ"]
    names = ["waits_ten_seconds", *differences, "a_rank_is_killed"]
    found = said(tmp_path, names, 3, **ONECCL, CPUTRAIN_CCL_TEST_MACHINES="0;1,2")
    waited = found["waits_ten_seconds"]
    assert [text for _, text in waited.values()] == ["done"] * 3 and waited[0][0] > 9, "and burns no core"
    for after, text in (one for name in differences for one in found[name].values()):
        assert after < 20 and text.startswith("CollectivesDiffer: the ranks called different collectives"), text
    assert len(found["a_rank_is_killed"]) == 2
    for after, text in found["a_rank_is_killed"].values():
        assert after < 5
        assert text.startswith(f"PeerDied: rank 1 (host {HOST}, process ") and "in all_reduce" in text, text


def save_late(rank: int, size: int, folder: str, end: str) -> None:
    """Rank 0 is late by more than a rank waits for its peers' end without mpirun: it saves a model, for example."""
    start(rank, size, folder, **ONECCL)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        time.sleep(oneccl._GRACE + 2)
        Path(folder, "saved").touch()
    elif end == "raises":
        raise ValueError("this rank's own")
    if end == "destroys the group":
        dist.destroy_process_group()


@needs_oneccl
@pytest.mark.parametrize("end", ["destroys the group", "just ends", "raises"])
def test_mpirun_lets_a_rank_finish_that_is_later_than_the_others(end: str, tmp_path) -> None:
    """Intel's mpirun kills the others if a rank ends that has not left MPI."""
    function = "tests.distributed.test_oneccl:save_late"
    answer = mpi_ranks.run(mpi_ranks.intel(2), function, str(tmp_path), end, seconds=60)
    assert (tmp_path / "saved").exists() and "KILLED" not in answer.stdout, answer.stdout + answer.stderr
    assert answer.returncode == (end == "raises") and ("this rank's own" in answer.stderr) == (end == "raises")


def test_a_oneccl_that_never_ended_a_group_is_not_used_again(monkeypatch) -> None:
    thread = object.__new__(oneccl._EngineThread)
    thread.start = lambda size, name, *_: oneccl._Started(size, name, ())  # type: ignore[method-assign]
    assert not thread.ask(0, "leave").finished.is_set()
    monkeypatch.setattr(oneccl._EngineThread, "_only", thread)
    with pytest.raises(ValueError, match="it still waits for a rank of a group that failed: start the processes anew"):
        oneccl._EngineThread.of_this_process("127.0.0.1")
    with pytest.raises(ValueError, match=r"oneCCL made no group within 0\.01 s"):
        thread.call(0.01, "join")


# --- Settings, and what can't be had -----------------------------------------------------------------------------


def test_without_mpirun_oneccl_uses_ofi_on_the_interface_of_the_route(monkeypatch) -> None:
    monkeypatch.delenv("CPUTRAIN_COMMUNICATION_CPUS", raising=False)
    found = oneccl_library.variables("127.0.0.1", {})
    assert found["CCL_ATL_TRANSPORT"] == "ofi" and found["CCL_PROCESS_LAUNCHER"] == "none"
    assert found["CCL_KVS_IFACE"] == "lo" and found["CCL_ALLREDUCE"] == "nreduce"
    assert found["CCL_WORKER_OFFLOAD"] == "0", "a worker would burn a core that computes"


def test_under_intels_mpirun_oneccl_uses_it(monkeypatch, tmp_path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmpi.so.12").touch()
    monkeypatch.setenv("CPUTRAIN_COMMUNICATION_CPUS", "6,7")
    environ = {"I_MPI_ROOT": str(tmp_path), "PMI_RANK": "0", "I_MPI_HYDRA_UUID": "x"}
    found = oneccl_library.variables("127.0.0.1", environ)
    assert found["CCL_ATL_TRANSPORT"] == "mpi" and "CCL_PROCESS_LAUNCHER" not in found
    assert found["CCL_ALLGATHERV"] == "ring", "MPI_Iallgatherv hangs if the parts differ in size"
    assert found["CCL_MPI_LIBRARY_PATH"] == f"{tmp_path}/lib/libmpi.so.12"
    assert found["CCL_WORKER_AFFINITY"] == "6,7" and found["CCL_WORKER_COUNT"] == "2"


def _refused(rank: int, folder: str) -> None:
    if rank == 1:  # as if this machine had no oneCCL
        oneccl_library.sys.prefix = folder  # type: ignore[attr-defined]
    try:
        start(rank, 2, folder, **ONECCL)
    except ValueError as error:
        Path(folder, f"refused-{rank}").write_text(str(error))


@needs_oneccl
def test_one_machine_without_oneccl_is_an_error_on_all(tmp_path) -> None:
    spawn(_refused, 2, str(tmp_path))
    for rank in range(2):
        text = (tmp_path / f"refused-{rank}").read_text()
        assert "CPUTRAIN_CCL_TRANSPORT=oneccl, but on rank 1: oneCCL is not installed beside this Python" in text
