"""The state of a job as a table: its pods, their restarts, and in words why it doesn't train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cputrain.cluster import cluster_job, diagnosis
from cputrain.cluster.cluster_job import ClusterJob
from cputrain.cluster.kubectl import Kubectl, Refused
from cputrain.cluster.loose_values import items, mapping

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Row:
    """One pod."""

    name: str
    phase: str
    restarts: int
    node: str
    trouble: str


@dataclass(frozen=True)
class Status:
    """A job at one moment."""

    job: ClusterJob
    rows: list[Row]
    notes: list[str]


def read(kubectl: Kubectl, name: str) -> Status:
    job = cluster_job.find(kubectl, name)
    pods = cluster_job.pods(kubectl, job)
    names = {claim for pod in pods for claim, _ in cluster_job.claims(pod)}
    claims = [_claim(kubectl, claim) for claim in sorted(names)]
    return Status(job, [_row(pod) for pod in pods], list(diagnosis.of_job(job, pods, claims)))


def _claim(kubectl: Kubectl, name: str) -> dict[str, Any]:
    try:
        return kubectl.json("get", "persistentvolumeclaims", name)
    except Refused as refusal:
        if refusal.reason == "NotFound":
            return {"metadata": {"name": name}}
        raise


def _row(pod: dict[str, Any]) -> Row:
    status = mapping(pod.get("status"))
    restarts = sum(int(mapping(row).get("restartCount") or 0) for row in items(status.get("containerStatuses")))
    return Row(
        name=pod["metadata"]["name"],
        phase=str(status.get("phase") or "Pending"),
        restarts=restarts,
        node=str(mapping(pod.get("spec")).get("nodeName") or "–"),
        trouble=diagnosis.of_pod(pod),
    )


def table(status: Status) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table("pod", "phase", "restarts", "node", "what is wrong", title=f"{status.job.kind} {status.job.name}")
    for row in status.rows:
        # Text, not markup: what a cluster says may hold brackets.
        made.add_row(*map(Text, (row.name, row.phase, str(row.restarts), row.node, row.trouble)))
    colour = {"Succeeded": "green", "Failed": "red"}.get(status.job.state, "yellow")
    lines = [Text(f"state: {status.job.state}", style=colour), *map(Text, _conditions(status.job))]
    lines += [Text(f"! {note}") for note in status.notes]
    return Group(*([made] if status.rows else [Text(f"{status.job.kind} {status.job.name}: no pods")]), *lines)


def _conditions(job: ClusterJob) -> list[str]:
    """What the operator says of the job, with the time: a line each."""
    rows = []
    for row in job.conditions:
        said = " ".join(str(row.get(key) or "") for key in ("reason", "message")).strip()
        holds = "" if row.get("status") == "True" else " no longer"
        rows.append(f"{row.get('lastTransitionTime') or '–'} {row.get('type')}{holds}{': ' if said else ''}{said}")
    return rows
