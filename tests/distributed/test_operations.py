"""Every operation over shared memory, with 1, 2, 3, 4 and 8 ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import cputrain.distributed  # noqa: F401 - registers the backend
from tests.distributed.ranks import Outcome, cases_of

MODULE = "tests.distributed.operations"


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8])
def outcome(request, tmp_path_factory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp(f"{request.param}-ranks"), request.param, MODULE)


@pytest.mark.parametrize("case", cases_of(MODULE))
def test_operation(case: str, outcome: Outcome) -> None:
    outcome.check(case)


def test_the_transport_is_shared_memory(outcome: Outcome, request) -> None:
    assert outcome.transports <= {"shm", "alone"} and len(outcome.transports) == 1


# --- Several machines --------------------------------------------------------------------------------------------

# Which ranks share a machine, and what is then used.
MACHINES = {"0;1": "gloo", "0,1;2": "shm+gloo", "0,2;1,3": "shm+gloo"}


@pytest.fixture(scope="module", params=MACHINES)
def machines(request, tmp_path_factory) -> tuple[str, Outcome]:
    ranks = request.param.replace(";", ",").count(",") + 1
    outcome = Outcome(tmp_path_factory.mktemp("machines"), ranks, MODULE, CPUTRAIN_CCL_TEST_MACHINES=request.param)
    return request.param, outcome


@pytest.mark.parametrize("case", cases_of(MODULE))
def test_operation_between_machines(case: str, machines: tuple[str, Outcome]) -> None:
    machines[1].check(case)


def test_the_transport_is_two_level(machines: tuple[str, Outcome]) -> None:
    assert machines[1].transports == {MACHINES[machines[0]]}


# --- Sparse tensors ----------------------------------------------------------------------------------------------

SPARSE = "tests.distributed.sparse_operations"


@pytest.fixture(scope="module", params=["", "0,1;2"], ids=["one machine", "two machines"])
def sparse(request, tmp_path_factory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("sparse"), 3, SPARSE, CPUTRAIN_CCL_TEST_MACHINES=request.param)


@pytest.mark.parametrize("case", cases_of(SPARSE))
def test_sparse_operation(case: str, sparse: Outcome) -> None:
    sparse.check(case)


def test_torch_hangs_no_recorder_of_its_own_on_a_group(tmp_path, monkeypatch) -> None:
    """torch 2.15 would, unless the backend says that it keeps one; here the set of those that do is made up."""
    keeping = set()
    monkeypatch.setattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", keeping, raising=False)
    dist.init_process_group("ccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert keeping == {"ccl"}
    finally:
        dist.destroy_process_group()
