"""What Kubeflow's operators set, and what a launch inside the pod makes of it."""

from __future__ import annotations

import pytest

from cputrain.launch import join, plan, ranks
from cputrain.launch.config import Config

# What the training operator sets in a pod of an elastic PyTorchJob, and the Trainer in a TrainJob's.
ELASTIC = {
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ID": "job-1f",
    "PET_RDZV_CONF": "join_timeout=3600,read_timeout=900",
    "PET_NNODES": "1:4",
    "PET_MAX_RESTARTS": "10",
    "PET_NPROC_PER_NODE": "2",
}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}


def fields(told: dict[str, str], config: Config | None = None) -> dict:
    place = ranks.find(told)
    assert isinstance(place, ranks.Node)
    return ranks.order_fields(place, told, config or Config())


def test_every_variable_of_an_elastic_job_counts() -> None:
    assert fields(ELASTIC) == {
        "machines": 1,
        "most": 4,
        "max_restarts": 10,
        "meeting": {"join_timeout": "3600", "read_timeout": "900"},
        "backend": "c10d",
        "endpoint": "job-worker-0:23456",
        "run_id": "job-1f",
    }
    place = ranks.find(ELASTIC)
    assert isinstance(place, ranks.Node) and place.rank is None, "the rendezvous numbers the machines"
    assert ranks.processes_here(place, None, None) == 2


def test_a_train_job() -> None:
    expected = {"machines": 2, "most": 2, "backend": "static", "endpoint": "job-node-0-0.job:29500", "machine": 1}
    assert fields(TRAINJOB) == expected


def test_master_addr_comes_first_then_the_operators_then_the_configurations() -> None:
    configured = Config(main_process_ip="own", main_process_port=7)
    told = {**TRAINJOB, "MASTER_ADDR": "here", "MASTER_PORT": "6"}
    assert fields(told, configured)["endpoint"] == "here:6"
    assert fields(TRAINJOB, configured)["endpoint"] == "job-node-0-0.job:29500"
    unsaid = {name: value for name, value in TRAINJOB.items() if not name.startswith("PET_MASTER")}
    assert fields(unsaid, configured)["endpoint"] == "own:7"


@pytest.mark.parametrize("value", ["", "1", "true"])
def test_standalone_wins_over_all_that_speaks_of_others(value: str) -> None:
    alone = fields({**ELASTIC, "PET_STANDALONE": value})
    assert (alone["machines"], alone["most"]) == (1, 1) and "endpoint" not in alone
    assert fields({**ELASTIC, "PET_STANDALONE": "0"})["most"] == 4


def test_one_machine_meets_nobody() -> None:
    assert fields({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}) == {"machines": 1, "most": 1}


def test_torchs_default_port() -> None:
    assert fields({**ELASTIC, "PET_RDZV_ENDPOINT": "job-worker-0"})["endpoint"] == "job-worker-0:29400"


def test_the_users_restarts_win_over_the_operators() -> None:
    assert fields(ELASTIC, Config(max_restarts=3))["max_restarts"] == 3


def test_what_is_not_known_is_said_once(caplog) -> None:
    fields({**ELASTIC, "PET_START_METHOD": "fork", "PET_TEE": "3"})
    assert [record.message for record in caplog.records] == [
        "PET_START_METHOD, PET_TEE: without effect, cputrain launch doesn't know of it"
    ]


def test_a_process_for_each_cpu_of_the_host_is_not_followed(caplog) -> None:
    """What the operator says where the manifest says nothing: out of memory, or a deadlock."""
    told = {**ELASTIC, "PET_NPROC_PER_NODE": "auto"}
    fields(told)
    assert "PET_NPROC_PER_NODE=auto would be a process for each of the host's CPUs" in caplog.text
    place = ranks.find(told)
    assert isinstance(place, ranks.Node) and ranks.processes_here(place, None, None) == 1


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({**ELASTIC, "PET_RDZV_BACKEND": "static"}, "PET_NNODES=1:4, and machines that may come and go need a rend"),
        ({**ELASTIC, "PET_RDZV_CONF": "join_timeout"}, "PET_RDZV_CONF is 'join_timeout': write NAME=VALUE"),
        ({**ELASTIC, "PET_MAX_RESTARTS": "many"}, "PET_MAX_RESTARTS must be a whole number, found 'many'"),
        ({"PET_NNODES": "2"}, "it is not said where 2 machines meet"),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "x"}, "it is not said which of 2 machines this is"),
    ],
)
def test_what_is_missing_or_nonsense_is_a_sentence(told: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fields(told)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1, r"1 processes were asked for, but 1 to 4 machines of 2 processes are 2 to 8"),
        (9, r"9 processes were asked for, but 1 to 4 machines of 2 processes are 2 to 8"),
        (8, None),
    ],
)
def test_a_number_of_processes_that_the_machines_can_not_have(size: int, said: str | None) -> None:
    place = ranks.find(ELASTIC)
    assert isinstance(place, ranks.Node)
    if said is None:
        assert ranks.processes_here(place, None, size) == 2
        return
    with pytest.raises(ValueError, match=said):
        ranks.processes_here(place, None, size)


@pytest.mark.parametrize(("world", "fits"), [(1, False), (2, True), (8, True), (9, False)])
def test_ranks_of_an_elastic_job_expect_a_range(world: int, fits: bool, monkeypatch) -> None:
    monkeypatch.setattr(join.os, "sched_setaffinity", lambda *_: None)
    environ = {**plan.size_variables(2, 8), "RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    monkeypatch.setattr(join.processes, "guard", lambda environ: None)
    if fits:
        join.join(environ)
    else:
        with pytest.raises(ValueError, match=f"2 to 8 ranks were asked for, found {world} "):
            join.join(environ)
