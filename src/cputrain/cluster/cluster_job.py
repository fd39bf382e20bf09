"""A job that is on the cluster: found by its name, with its pods, its volumes, its logs and how far it is."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cputrain.cluster import names
from cputrain.cluster.kubectl import TRAINING_KINDS, Kubectl
from cputrain.cluster.manifest import items, mapping, within

_POD_LABELS = {
    "PyTorchJob": "training.kubeflow.org/job-name",
    "MPIJob": "training.kubeflow.org/job-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
}
_ENDS = {"Succeeded": "Succeeded", "Complete": "Succeeded", "Failed": "Failed"}


@dataclass(frozen=True)
class ClusterJob:
    """The job as the API server has it."""

    value: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.value.get("kind"))

    @property
    def name(self) -> str:
        return str(mapping(self.value.get("metadata")).get("name"))

    @property
    def selector(self) -> str:
        """The label that the operator gives all pods of the job."""
        return f"{_POD_LABELS[self.kind]}={self.name}"

    @property
    def conditions(self) -> list[dict[str, Any]]:
        return [mapping(row) for row in items(mapping(self.value.get("status")).get("conditions"))]

    @property
    def state(self) -> str:
        """Kubeflow's word for where it is: the last condition that holds."""
        holding = [str(row.get("type")) for row in self.conditions if row.get("status") == "True"]
        ended = [_ENDS[word] for word in holding if word in _ENDS]
        return ended[-1] if ended else holding[-1] if holding else "not seen by its operator"

    @property
    def is_over(self) -> bool:
        return self.state in ("Succeeded", "Failed")

    @property
    def pods_wanted(self) -> int:
        """How many pods must run before ranks can meet."""
        spec = mapping(self.value.get("spec"))
        counts = [mapping(spec.get("elasticPolicy")).get("minReplicas"), mapping(spec.get("trainer")).get("numNodes")]
        for replicas in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
            counts.append(mapping(mapping(spec.get(replicas)).get("Worker")).get("replicas"))
        return next((count for count in counts if isinstance(count, int)), 1)

    @property
    def workers(self) -> int:
        """How many pods an MPIJob's ranks run in."""
        count = within(self.value, "spec", "mpiReplicaSpecs", "Worker", "replicas")
        return count if isinstance(count, int) else 1

    @property
    def processes(self) -> int:
        """Ranks of each pod."""
        spec = mapping(self.value.get("spec"))
        count = spec.get("nprocPerNode") or within(spec, "trainer", "numProcPerNode") or spec.get("slotsPerWorker") or 1
        return int(count) if str(count).isdecimal() else 1


def find(kubectl: Kubectl, name: str) -> ClusterJob:
    """The job of this name, whatever its kind. The kinds that a cluster lacks aren't asked for."""
    names.subdomain(name, "the job's name")
    known = {(version.partition("/")[0], kind) for version, kind in kubectl.kinds()}
    asked = [(group, kind) for group, kind in TRAINING_KINDS.values() if (group, kind) in known]
    if not asked:
        raise ValueError("the cluster knows no PyTorchJob, TrainJob or MPIJob: Kubeflow's operator isn't installed.")
    for group, kind in asked:
        resource = f"{kind.lower()}s.{group}"
        text = kubectl.run("get", resource, name, "--ignore-not-found", "--output=json")
        if text.strip():
            return ClusterJob(json.loads(text))
    kinds = ", ".join(kind for _, kind in asked)
    raise ValueError(f"there is no {kinds} called {name!r} here: see kubectl get, or give --namespace.")


def pods(kubectl: Kubectl, job: ClusterJob) -> list[dict[str, Any]]:
    """The job's pods, workers in the order of their numbers."""
    found = kubectl.json("get", "pods", f"--selector={job.selector}")["items"]
    return sorted(found, key=lambda pod: _order(pod["metadata"]["name"]))


def _order(name: str) -> list[tuple[int, str]]:
    """worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split("-")]


def claims(pod_or_template: dict[str, Any]) -> list[tuple[str, str]]:
    """(claim, mount path) of every claim that a pod mounts."""
    spec = mapping(pod_or_template.get("spec"))
    by_volume = {
        mapping(volume).get("name"): mapping(mapping(volume).get("persistentVolumeClaim")).get("claimName")
        for volume in items(spec.get("volumes"))
    }
    found = []
    for container in items(spec.get("containers")):
        for mount in items(mapping(container).get("volumeMounts")):
            claim = by_volume.get(mapping(mount).get("name"))
            if claim:
                found.append((str(claim), str(mapping(mount).get("mountPath"))))
    return list(dict.fromkeys(found))


def has_claim(kubectl: Kubectl, name: str, *where: str) -> bool:
    """Whether a claim exists: a job may wait for ever for one that was never made."""
    return bool(
        kubectl.run("get", "persistentvolumeclaims", name, "--ignore-not-found", "--output=name", *where).strip()
    )


def templates(kubectl: Kubectl, job: ClusterJob) -> list[dict[str, Any]]:
    """The pod templates of a job; a TrainJob's are in its runtime."""
    spec = mapping(job.value.get("spec"))
    if job.kind == "TrainJob":
        reference = mapping(spec.get("runtimeRef"))
        resource = f"{str(reference.get('kind')).lower()}s.trainer.kubeflow.org"
        runtime = kubectl.json("get", resource, str(reference.get("name")))
        jobs = items(within(runtime, "spec", "template", "spec", "replicatedJobs"))
        return [mapping(within(row, "template", "spec", "template")) for row in jobs]
    rows = [*mapping(spec.get("pytorchReplicaSpecs")).values(), *mapping(spec.get("mpiReplicaSpecs")).values()]
    return [mapping(mapping(row).get("template")) for row in rows]


# `cputrain launch` puts the rank before each line of a rank.
_RANK_LABEL = re.compile(r"\[(\d+)\] ")


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


def show_log(command: list[str], rank: int, say: Callable[[str], None]) -> int:
    """Runs a command and says its lines but those of other ranks; lines that no rank wrote are everybody's."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout
        for line in process.stdout:
            label = _RANK_LABEL.match(line)
            if label is None or int(label[1]) == rank:
                say(line)
    return process.returncode
