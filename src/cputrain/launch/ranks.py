"""Which rank, or which machine, this process is, if a launcher started it: torchrun, mpirun, srun or Kubeflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cputrain.launch.config import PORT, Config
from cputrain.log import logger


@dataclass(frozen=True)
class Place:
    """One process among several. `by` is what numbered it: environment, openmpi, pmi or slurm."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    by: str
    reason: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} can't be among {self.size} ({self.reason}): ranks begin at 0.")

    @property
    def is_local(self) -> bool:
        """Whether all ranks are known to be on this machine."""
        return self.local_size == self.size


@dataclass(frozen=True)
class Node:
    """One machine among several, whose processes are still to be started. What the environment doesn't say is None.

    Training begins with `machines` of them; `most` is larger where more may join while it runs.
    """

    rank: int | None
    machines: int
    most: int
    processes_here: int | None
    reason: str


class _Numbering(NamedTuple):
    """Names of variables. A local number may come from any of several; the launcher may lack it."""

    by: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# In this order, the first that is complete. mpirun inside Slurm numbers the processes, not Slurm, which numbers the
# proxies of mpirun. SLURM_PROCID alone is set in a batch script, too: only srun sets SLURM_STEP_NUM_TASKS.
_NUMBERINGS = (
    _Numbering("environment", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Numbering(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Numbering("pmi", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "SLURM_LOCALID"), ("MPI_LOCALNRANKS",)),
    _Numbering("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ()),
)


def find(environ: Mapping[str, str]) -> Place | Node | None:
    """The rank or the node that the environment speaks of, first match; None if no launcher started this process."""
    places = (_place(names, environ) for names in _NUMBERINGS)
    return next(filter(None, places), None) or _node(environ)


def _place(names: _Numbering, environ: Mapping[str, str]) -> Place | None:
    if not (environ.get(names.rank) and environ.get(names.size)):
        return None
    local = next((name for name in names.local_rank if environ.get(name)), None)
    if local is None:
        if names.by == "environment":  # RANK and WORLD_SIZE alone: a node of a PyTorchJob
            return None
        raise ValueError(
            f"{names.rank} says which rank this is, but none of {', '.join(names.local_rank)} which one of this "
            "machine: set RANK, WORLD_SIZE and LOCAL_RANK."
        )
    size = number(environ, names.size)
    return Place(
        rank=number(environ, names.rank),
        size=size,
        local_rank=number(environ, local),
        local_size=1 if size == 1 else _local_size(names, environ),
        by=names.by,
        reason=f"{names.rank}={environ[names.rank]}, {names.size}={environ[names.size]}, {local}={environ[local]}",
    )


def _local_size(names: _Numbering, environ: Mapping[str, str]) -> int | None:
    told = first_number(environ, *names.local_size)
    if told is None and names.by in ("slurm", "pmi") and environ.get("SLURM_STEP_TASKS_PER_NODE"):
        return _tasks_here(environ)
    return told


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """SLURM_STEP_TASKS_PER_NODE=2(x3),1 and SLURM_NODEID=3 mean 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ["SLURM_STEP_TASKS_PER_NODE"]):
        counts += [int(count)] * int(times or 1)
    node = first_number(environ, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def number(environ: Mapping[str, str], name: str) -> int:
    """A variable's value, which must be a whole number."""
    text = environ[name]
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise ValueError(f"{name} must be a whole number, found {text!r}.")
    return int(text)


def first_number(environ: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is set."""
    return next((number(environ, name) for name in names if environ.get(name)), None)


# --- Kubeflow: its operators set torchrun's own variables, PET_* -------------------------------------------------


_OF_A_NODE = ("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR", "PET_STANDALONE")
_READ = {
    *_OF_A_NODE, "PET_NPROC_PER_NODE", "PET_MASTER_PORT", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_RDZV_CONF",
    "PET_MAX_RESTARTS",
}  # fmt: skip
# torch's own default for a rendezvous whose endpoint has no port.
_RENDEZVOUS_PORT = 29400


def _node(environ: Mapping[str, str]) -> Node | None:
    """PET_* (torchrun's own variables, set by Kubeflow), or RANK without LOCAL_RANK (a PyTorchJob with a Master)."""
    told = [name for name in _OF_A_NODE if name in environ]
    if not told and not environ.get("RANK"):
        return None
    if not told and not environ.get("WORLD_SIZE"):
        raise ValueError(
            f"RANK={environ['RANK']} says that there are others, but not how many: set WORLD_SIZE, and for a rank "
            "LOCAL_RANK, or unset RANK."
        )
    here = _processes_here(environ)
    machines, most = _machines(environ, here)
    rank = first_number(environ, "PET_NODE_RANK", "RANK")
    if most == 1:
        rank = 0
    if rank is not None and rank >= most:
        raise ValueError(f"machine {rank} can't be among {most}: check PET_NODE_RANK or RANK, which begin at 0.")
    reason = ", ".join(f"{name}={environ[name]}" for name in told) if told else "RANK without LOCAL_RANK"
    return Node(rank, machines, most, here, reason)


def _processes_here(environ: Mapping[str, str]) -> int | None:
    """A number; torchrun's words (auto, cpu) would mean a process for each CPU, and so mean nothing here."""
    text = environ.get("PET_NPROC_PER_NODE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _machines(environ: Mapping[str, str], here: int | None) -> tuple[int, int]:
    """The least and the most: PET_NNODES is 4, or 1:4."""
    text = environ.get("PET_NNODES")
    if stands_alone(environ):
        return 1, 1
    if text:
        least, _, most = text.partition(":")
        if not (least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least)):
            raise ValueError(f"PET_NNODES is {text!r}: write a number of machines, N, or the least and the most, N:M.")
        return int(least), int(most or least)
    machines = number(environ, "WORLD_SIZE") // (here or 1) if environ.get("WORLD_SIZE") else 1
    return machines, machines


def stands_alone(environ: Mapping[str, str]) -> bool:
    """torchrun --standalone. The operator sets the variable without a value."""
    return environ.get("PET_STANDALONE", "0").lower() not in ("0", "false")


class Count(NamedTuple):
    """Processes of each machine, whether they are as many as was asked for, and the numbers in words."""

    here: int
    fits: bool
    machines: str
    total: str


def count(size: int | None, here: int | None, least: int, most: int) -> Count:
    """`size`: processes in all, if a number was asked for; `here`: of each of `least` to `most` machines, if told."""
    here = here or max(1, (size or most) // max(1, most))
    fits = size is None or here * least <= size <= here * most
    return Count(here, fits, _span(least, most), _span(here * least, here * most))


def _span(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def processes_here(place: Node, ppn: int | None, size: int | None) -> int:
    """How many processes this machine starts; `size` is the number in all, if one was asked for."""
    found = count(size, ppn or place.processes_here, place.machines, place.most)
    if not found.fits:
        raise ValueError(
            f"{size} processes were asked for, but {found.machines} machines of {found.here} processes are "
            f"{found.total} ({place.reason}): change num_processes."
        )
    return found.here


def order_fields(place: Node, told: Mapping[str, str], config: Config) -> dict[str, Any]:
    """How this machine meets the others, and how often ranks start anew: fields of a `node.Order`."""
    if unread := sorted(name for name in told if name.startswith("PET_") and name not in _READ):
        logger.warning(f"{', '.join(unread)}: without effect, cputrain launch doesn't know of it")
    word = told.get("PET_NPROC_PER_NODE") or "1"
    if not word.isdecimal():
        logger.warning(
            f"PET_NPROC_PER_NODE={word} would be a process for each of the host's CPUs, and isn't followed: one "
            "process computes with all CPUs of this pod; nprocPerNode, or --ppn, says otherwise"
        )
    fields: dict[str, Any] = {"machines": place.machines, "most": place.most}
    if told.get("PET_MAX_RESTARTS"):
        fields["max_restarts"] = config.max_restarts or number(told, "PET_MAX_RESTARTS")
    if told.get("PET_RDZV_CONF"):
        fields["meeting"] = _settings(told["PET_RDZV_CONF"])
    if stands_alone(told) or (place.most == 1 and not told.get("PET_RDZV_ENDPOINT")):
        return fields
    return {**fields, **_meeting(place, told, config)}


def _meeting(place: Node, told: Mapping[str, str], config: Config) -> dict[str, Any]:
    endpoint = told.get("PET_RDZV_ENDPOINT")
    backend = told.get("PET_RDZV_BACKEND", "static")
    address = told.get("MASTER_ADDR") or told.get("PET_MASTER_ADDR") or config.main_process_ip
    port = told.get("MASTER_PORT") or told.get("PET_MASTER_PORT") or config.main_process_port or PORT
    if not endpoint and not address:
        raise ValueError(f"it is not said where {place.most} machines meet ({place.reason}): set PET_MASTER_ADDR.")
    if endpoint and not endpoint.rpartition(":")[2].isdecimal():
        endpoint = f"{endpoint}:{_RENDEZVOUS_PORT}"
    where = endpoint or f"{address}:{port}"
    if backend != "static":
        return {"backend": backend, "endpoint": where, "run_id": told.get("PET_RDZV_ID") or "none"}
    if place.machines != place.most:
        raise ValueError(
            f"PET_NNODES={told['PET_NNODES']}, and machines that may come and go need a rendezvous that numbers them: "
            "set PET_RDZV_BACKEND=c10d and PET_RDZV_ENDPOINT."
        )
    if place.rank is None:
        raise ValueError(
            f"it is not said which of {place.machines} machines this is ({place.reason}): set PET_NODE_RANK."
        )
    return {"backend": "static", "endpoint": where, "machine": place.rank}


def _settings(text: str) -> dict[str, str]:
    """join_timeout=3600,read_timeout=900."""
    pairs = [entry.partition("=") for entry in text.split(",") if entry.strip()]
    for name, _, value in pairs:
        if not name.strip() or not value.strip():
            raise ValueError(f"PET_RDZV_CONF is {text!r}: write NAME=VALUE,NAME=VALUE.")
    return {name.strip(): value.strip() for name, _, value in pairs}
