"""A machine of a Kubeflow job: the operators set torchrun's own variables, PET_*, and here they get their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cputrain.launch.config import PORT, Config
from cputrain.launch.ranks import Node, number, stands_alone
from cputrain.log import logger

# torch's own default for a rendezvous whose endpoint has no port.
_RENDEZVOUS_PORT = 29400
_READ = {
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_STANDALONE",
    "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_RDZV_CONF", "PET_MAX_RESTARTS",
}  # fmt: skip


def processes_here(place: Node, ppn: int | None, size: int | None) -> int:
    """How many processes this machine starts; `size` is the number in all, if one was asked for."""
    here = ppn or place.processes_here or max(1, (size or place.most) // place.most)
    least, most = here * place.machines, here * place.most
    if size is not None and not least <= size <= most:
        machines = str(place.most) if least == most else f"{place.machines} to {place.most}"
        raise ValueError(
            f"{size} processes were asked for, but {machines} machines of {here} processes are "
            f"{least if least == most else f'{least} to {most}'} ({place.reason}): change num_processes."
        )
    return here


def order_fields(place: Node, told: Mapping[str, str], config: Config) -> dict[str, Any]:
    """How this machine meets the others, and how often ranks start anew: fields of a `node.Order`."""
    unread = sorted(name for name in told if name.startswith("PET_") and name not in _READ)
    if unread:
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
    where = _with_port(endpoint) if endpoint else f"{address}:{port}"
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


def _with_port(endpoint: str) -> str:
    return endpoint if endpoint.rpartition(":")[2].isdecimal() else f"{endpoint}:{_RENDEZVOUS_PORT}"


def _settings(text: str) -> dict[str, str]:
    """join_timeout=3600,read_timeout=900."""
    pairs = [entry.partition("=") for entry in text.split(",") if entry.strip()]
    for name, _, value in pairs:
        if not name.strip() or not value.strip():
            raise ValueError(f"PET_RDZV_CONF is {text!r}: write NAME=VALUE,NAME=VALUE.")
    return {name.strip(): value.strip() for name, _, value in pairs}
