"""MPI as the engine between machines: every operation and dtype under each MPI, and what failures say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.distributed import mpi_ranks, scenarios
from tests.distributed.mpi_ranks import MpiOutcome
from tests.distributed.ranks import cases_of, spawn, start
from tests.distributed.scenarios import HOST, Said

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py"),
    pytest.mark.needs_program("mpirun.mpich", "mpich"),
    pytest.mark.needs_program("mpirun.openmpi", "openmpi-bin"),
]
OPERATIONS = "tests.distributed.operations"
MPI = {"CPUTRAIN_CCL_TRANSPORT": "mpi"}
# Whose mpirun, how many ranks, which of them share a machine ("": all), and what is then used.
SETTINGS = {
    "intel": (mpi_ranks.intel, 2, "", "mpi"),
    "mpich": (mpi_ranks.mpich, 3, "0,1;2", "shm+mpi"),
    "open-mpi": (mpi_ranks.open_mpi, 2, "", "mpi"),
}


@pytest.fixture(scope="module", params=SETTINGS)
def outcome(request, tmp_path_factory) -> tuple[str, MpiOutcome]:
    mpirun, ranks, machines, transport = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    environment = {**MPI, "CPUTRAIN_CCL_TEST_MACHINES": machines}
    return transport, MpiOutcome(folder, mpirun(ranks), ranks, OPERATIONS, **environment)


@pytest.mark.parametrize("case", cases_of(OPERATIONS))
def test_operation_over_mpi(case: str, outcome: tuple[str, MpiOutcome]) -> None:
    outcome[1].check(case)


def test_the_transport_is_mpi(outcome: tuple[str, MpiOutcome]) -> None:
    assert outcome[1].transports == {outcome[0]}


# --- Failures ----------------------------------------------------------------------------------------------------


def said(folder: Path, names: list[str], command: list[str], seconds: float = 60) -> tuple[dict[str, Said], int]:
    """What each of two ranks raised in each scenario, and how mpirun ended."""
    scenarios.prepare(folder, names)
    go = "tests.distributed.scenarios:go_through"
    answer = mpi_ranks.run(command, go, str(folder), names, seconds, {}, **MPI)
    return scenarios.read(folder, names, 2), answer.returncode


def test_a_killed_rank_is_named(tmp_path) -> None:
    """If mpirun leaves the others alone; by itself it ends them."""
    command = mpi_ranks.mpich(2)
    found, _ = said(tmp_path, ["a_rank_is_killed"], [command[0], "-disable-auto-cleanup", *command[1:]])
    after, text = found["a_rank_is_killed"][0]
    assert set(found["a_rank_is_killed"]) == {0} and after < 5
    assert text.startswith(f"PeerDied: rank 1 (host {HOST}, process ") and "this rank is in all_reduce" in text, text


def test_a_rank_that_ends_early_ends_all(tmp_path) -> None:
    found, code = said(tmp_path, ["a_rank_raises"], mpi_ranks.intel(2))
    after, text = found["a_rank_raises"][1]
    assert after < 20 and "rank 0" in text and "has ended the group" in text
    assert code != 0


def test_a_late_rank_is_not_waited_for_longer_than_the_timeout(tmp_path) -> None:
    after, text = said(tmp_path, ["a_rank_is_late"], mpi_ranks.intel(2), seconds=2)[0]["a_rank_is_late"][0]
    assert text.startswith("PeerLate") and "waited 2 s (ddp_timeout)" in text and after < 5


def test_waiting_burns_no_core_and_mismatched_collectives_are_reported(tmp_path) -> None:
    found, _ = said(tmp_path, ["waits_ten_seconds", "parts_differ", "collectives_differ"], mpi_ranks.mpich(2))
    waited = found["waits_ten_seconds"]
    assert [text for _, text in waited.values()] == ["done", "done"] and waited[0][0] > 9
    for name in ("parts_differ", "collectives_differ"):
        texts = "".join(text for _, text in found[name].values())
        assert "CollectivesDiffer: the ranks called different collectives" in texts


# --- What can't be had -------------------------------------------------------------------------------------------


def _refused(rank: int, folder: str) -> None:
    try:
        start(rank, 2, folder, **MPI)
    except ValueError as error:
        Path(folder, f"refused-{rank}").write_text(str(error))


def test_ranks_of_nobodys_mpirun_are_refused(tmp_path) -> None:
    """Each of them is a world of its own for MPI."""
    spawn(_refused, 2, str(tmp_path))
    for rank in range(2):
        text = (tmp_path / f"refused-{rank}").read_text()
        assert "sees a world of 1 for a group of 2: start the ranks with that MPI's mpirun" in text
