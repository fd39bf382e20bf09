"""Which pod's log holds what a rank wrote, and that alone where several ranks write into one log."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

from cputrain.cluster.cluster_job import ClusterJob
from cputrain.cluster.loose_values import mapping, within

# `cputrain launch` puts the rank before each line of a rank.
_LABEL = re.compile(r"\[(\d+)\] ")


def pod_of(job: ClusterJob, pods: list[dict[str, Any]], rank: int) -> str:
    """The name of the pod; `pods` are in the order of their numbers."""
    size = job.processes * (job.workers if job.kind == "MPIJob" else len(pods))
    found = _launchers(pods) if job.kind == "MPIJob" else _in_order_of_ranks(job, pods)[rank // job.processes :]
    if not found or not 0 <= rank < size:
        why = f"the ranks end at {size - 1}" if pods else "there are no pods yet"
        raise ValueError(f"rank {rank} has no pod: {why}.")
    return str(found[0]["metadata"]["name"])


def _launchers(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last one: a launcher that failed is followed by another."""
    started = [pod for pod in pods if "-launcher" in pod["metadata"]["name"]]
    return sorted(started, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))[-1:]


def _in_order_of_ranks(job: ClusterJob, pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """torch's rendezvous numbers machines by their addresses, compared as text, whatever the pods are called."""
    addresses = [mapping(pod.get("status")).get("podIP") for pod in pods]
    if not isinstance(within(job.value, "spec", "elasticPolicy"), dict) or not all(addresses):
        return pods
    return [pod for _, pod in sorted(zip(map(str, addresses), pods, strict=True), key=lambda pair: pair[0])]


def holds_several(job: ClusterJob) -> bool:
    return job.kind == "MPIJob" or job.processes > 1


def show(command: list[str], rank: int, say: Callable[[str], None]) -> int:
    """Runs a command and says its lines but those of other ranks; lines that no rank wrote are everybody's."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout
        for line in process.stdout:
            label = _LABEL.match(line)
            if label is None or int(label[1]) == rank:
                say(line)
    return process.returncode
