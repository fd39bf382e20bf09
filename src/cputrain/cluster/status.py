"""The state of a job as a table: its pods, their restarts, and in words why it doesn't train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cputrain.cluster import cluster_job
from cputrain.cluster.cluster_job import ClusterJob
from cputrain.cluster.kubectl import Kubectl, Refused
from cputrain.cluster.manifest import items, mapping

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
    return Status(job, [_row(pod) for pod in pods], list(troubles_of_job(job, pods, claims)))


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
        trouble=trouble_of_pod(pod),
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


_PULLING = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")


def trouble_of_pod(pod: dict[str, Any]) -> str:
    """One pod's trouble, or nothing."""
    status = mapping(pod.get("status"))
    for container in [*items(status.get("initContainerStatuses")), *items(status.get("containerStatuses"))]:
        said = _of_container(mapping(container), pod)
        if said:
            return said
    if status.get("reason") == "Evicted":
        return f"evicted by its node: {status.get('message') or 'without a reason'}"
    if status.get("phase") == "Pending":
        return _pending(items(status.get("conditions")))
    return ""


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> str:
    state, last = mapping(container.get("state")), mapping(container.get("lastState"))
    waiting = mapping(state.get("waiting"))
    ended = mapping(state.get("terminated")) or mapping(last.get("terminated"))
    reason = waiting.get("reason")
    if ended.get("reason") == "OOMKilled":
        return f"killed for using more memory than its limit{_limit(pod)}: raise --memory, or take smaller batches"
    if reason in _PULLING:
        why = str(waiting.get("message") or "").rstrip(".") or "no reason given"
        return f"the image {container.get('image')} can't be pulled ({why}): check its name, and --pull-secret"
    if reason == "CrashLoopBackOff":
        code, count = ended.get("exitCode", "?"), container.get("restartCount", 0)
        return f"ends with exit code {code} and was started {count} times again: see cputrain k8s logs"
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return f"the container can't be made: {waiting.get('message') or reason}"
    code = mapping(state.get("terminated")).get("exitCode")
    return f"ended with exit code {code}: see cputrain k8s logs" if code else ""


def _limit(pod: dict[str, Any]) -> str:
    for container in items(mapping(pod.get("spec")).get("containers")):
        limit = mapping(mapping(mapping(container).get("resources")).get("limits")).get("memory")
        if limit:
            return f" of {limit}"
    return ""


def _pending(conditions: list[Any]) -> str:
    scheduled = next((row for row in map(mapping, conditions) if row.get("type") == "PodScheduled"), {})
    message = str(scheduled.get("message") or "")
    if scheduled.get("status") != "False":
        return ""
    short = sorted(set(re.findall(r"(?:\d+ )?Insufficient ([\w./-]+)", message)))
    if short:
        return f"no node has enough {' and '.join(short)} left ({message.rstrip('.')}): ask for less, or wait"
    if "PersistentVolumeClaim" in message or "persistentvolumeclaim" in message:
        return f"its volume isn't there ({message.rstrip('.')}): create the claim, or see why it isn't bound"
    if "untolerated taint" in message:
        return f"nodes are kept for others ({message.rstrip('.')}): give --toleration"
    if "node affinity/selector" in message or "node selector" in message:
        return f"no node has the labels that were asked for ({message.rstrip('.')}): check --node-selector"
    return f"no node takes it: {message.rstrip('.')}" if message else "no node has taken it yet"


def troubles_of_job(job: ClusterJob, pods: list[dict[str, Any]], claims: list[dict[str, Any]]) -> Iterator[str]:
    """What concerns the job as a whole."""
    if not job.conditions and not pods:
        yield f"no operator has looked at this {job.kind} yet: if that stays so, the operator isn't running"
    for row in job.conditions:
        if row.get("type") == "Failed" and row.get("status") == "True" and row.get("message"):
            yield f"failed: {row['message']}"
    for claim in claims:
        phase = mapping(claim.get("status")).get("phase")
        if phase != "Bound":
            name = mapping(claim.get("metadata")).get("name")
            yield f"the volume claim {name} is {phase or 'not there'}, not Bound: check its storage class and size"
    running = sum(mapping(pod.get("status")).get("phase") == "Running" for pod in pods)
    if pods and 0 < running < job.pods_wanted and not job.is_over:
        yield f"the rendezvous isn't formed: {running} of {job.pods_wanted} pods run, and wait for the others"
