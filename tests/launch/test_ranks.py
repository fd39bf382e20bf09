"""Who this process is, by what torchrun, mpirun, srun and Kubeflow leave in the environment: the first match counts."""

from __future__ import annotations

import logging

import pytest

from cputrain.launch import join, ranks
from cputrain.launch.ranks import Node, Place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
INTEL = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
# What a PyTorchJob with a Master, an elastic one without, and a TrainJob set.
WITH_MASTER = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
}
TRAINJOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}
ELASTIC = {"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:2"}


@pytest.mark.parametrize(
    ("environ", "rank", "size", "local_rank", "local_size", "by"),
    [
        (TORCHRUN, 3, 4, 1, 2, "environment"),
        (OPENMPI, 1, 2, 1, 2, "openmpi"),
        (INTEL, 2, 4, 0, 2, "pmi"),
        (SRUN, 4, 5, 0, 1, "slurm"),
        ({**SRUN, "SLURM_NODEID": "1"}, 4, 5, 0, 2, "slurm"),
        # mpirun inside Slurm: Slurm numbers mpirun's proxies, MPI the ranks.
        ({**SRUN, **INTEL}, 2, 4, 0, 2, "pmi"),
        ({**SRUN, **OPENMPI}, 1, 2, 1, 2, "openmpi"),
        # srun --mpi=pmi2 has PMI's numbers, but Slurm's local one.
        ({**SRUN, "PMI_RANK": "4", "PMI_SIZE": "5"}, 4, 5, 0, 1, "pmi"),
        ({**INTEL, **TORCHRUN}, 3, 4, 1, 2, "environment"),
        ({**SRUN, **OPENMPI, **INTEL, **TORCHRUN}, 3, 4, 1, 2, "environment"),
        ({**OPENMPI, **INTEL}, 1, 2, 1, 2, "openmpi"),
        # What numbers ranks wins over what speaks of a machine: torchrun, mpirun or srun within a pod.
        ({**TRAINJOB, **TORCHRUN}, 3, 4, 1, 2, "environment"),
        ({**TRAINJOB, **INTEL}, 2, 4, 0, 2, "pmi"),
        ({"RANK": "1", "WORLD_SIZE": "2", **OPENMPI}, 1, 2, 1, 2, "openmpi"),
        ({"RANK": "1", "WORLD_SIZE": "2", **SRUN}, 4, 5, 0, 1, "slurm"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 0, 1, 0, 1, "environment"),
    ],
)
def test_ranks(environ, rank, size, local_rank, local_size, by) -> None:
    place = ranks.find(environ)
    assert isinstance(place, Place)
    assert (place.rank, place.size, place.local_rank) == (rank, size, local_rank)
    assert (place.local_size, place.by) == (local_size, by)
    assert place.is_local == (size == local_size)


def test_the_reason_names_the_variables() -> None:
    assert ranks.find(INTEL).reason == "PMI_RANK=2, PMI_SIZE=4, MPI_LOCALRANKID=0"


def test_nobody() -> None:
    assert ranks.find({}) is None
    # A batch script has SLURM_PROCID, but no step.
    assert ranks.find({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}) is None
    assert ranks.find({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        (WITH_MASTER, (1, 2, 1)),
        (ELASTIC, (None, 2, None)),
        ({**ELASTIC, "PET_NPROC_PER_NODE": "auto"}, (None, 2, None)),
        (TRAINJOB, (1, 2, 3)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, (0, 1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, (1, 2, None)),
    ],
)
def test_nodes(environ, node) -> None:
    found = ranks.find(environ)
    assert isinstance(found, Node)
    assert (found.rank, found.machines, found.processes_here) == node


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**TORCHRUN, "RANK": "4"}, r"rank 4 can't be among 4"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, r"WORLD_SIZE must be a whole number, found 'four'"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"none of MPI_LOCALRANKID, SLURM_LOCALID"),
        ({"PET_NNODES": "4:1"}, r"PET_NNODES is '4:1': write a number of machines, N, or the least and the most, N:M"),
        ({"PET_NNODES": "0"}, r"PET_NNODES is '0'"),
        ({"RANK": "1"}, r"RANK=1 says that there are others, but not how many: set WORLD_SIZE"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, r"RANK=1 says that there are others"),
        ({"PET_NNODES": "few"}, r"PET_NNODES is 'few'"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, r"machine 2 can't be among 2"),
    ],
)
def test_nonsense_is_a_sentence(environ, said) -> None:
    with pytest.raises(ValueError, match=said):
        ranks.find(environ)


# --- What `run` makes of it --------------------------------------------------------------------------------------


@pytest.fixture
def stay(monkeypatch):
    """Lets `join` set variables, but not bind the tests' own process."""
    monkeypatch.setattr(join.os, "sched_setaffinity", lambda *_: None)


def test_a_node_with_one_process_is_a_rank(stay) -> None:
    environ = {**WITH_MASTER, join.MET: "1"}  # else it would wait for its Master
    join.join(environ)
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "job-master-0"}
    assert expected.items() <= environ.items()
    assert environ["MASTER_PORT"] == "23456" and int(environ["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (TRAINJOB, "this is a machine for 3 processes"),
        (ELASTIC, "this is one of 2 machines, but the environment doesn't say which"),
    ],
)
def test_a_node_with_several_needs_launch(environ, said) -> None:
    with pytest.raises(ValueError, match=f"{said}.*write cputrain launch in place of cputrain run"):
        join.join(dict(environ))


def test_threads_are_always_set_and_a_users_are_kept(stay, caplog) -> None:
    environ: dict[str, str] = {}
    join.join(environ)
    assert int(environ["OMP_NUM_THREADS"]) >= 1 and "RANK" not in environ
    assert not caplog.messages
    environ = {"OMP_NUM_THREADS": "999", "CCL_ATL_TRANSPORT": "mpi"}
    with caplog.at_level(logging.INFO, "cputrain"):
        join.join(environ)
    assert environ["OMP_NUM_THREADS"] == "999"
    assert [text.split(",")[0].split(":")[0] for text in caplog.messages] == [
        "OMP_NUM_THREADS=999 is kept",
        "CCL_ATL_TRANSPORT has no effect",
    ]


def test_a_users_threads_get_a_warning_that_says_what_they_cost(stay, caplog) -> None:
    join.join(
        {
            **TORCHRUN,
            "RANK": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            join.MET: "1",
            "OMP_NUM_THREADS": "999",
        }
    )
    assert "OMP_NUM_THREADS=999 is kept, but this rank has" in caplog.text


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({join.EXPECTED: "2"}, "2 ranks were asked for, found none: no launcher numbered this process"),
        ({join.EXPECTED: "8", **TORCHRUN}, r"8 ranks were asked for, found 4 \(RANK=3"),
        ({join.VERSION: "0.0.9"}, r"has cputrain .*, the machine that launches has 0\.0\.9: install the same"),
    ],
)
def test_a_world_of_another_size_or_version_ends_at_once(environ, said) -> None:
    with pytest.raises(ValueError, match=said):
        join.join(dict(environ))
