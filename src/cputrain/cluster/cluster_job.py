"""A job that is on the cluster: found by its name, with its pods, its volumes, its logs and how far it is."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cputrain.cluster import kinds, names
from cputrain.cluster.kubectl import Kubectl
from cputrain.cluster.manifest import items, mapping

_ENDS = {"Succeeded": "Succeeded", "Complete": "Succeeded", "Failed": "Failed"}


@dataclass(frozen=True)
class ClusterJob:
    """The job as the API server has it."""

    value: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.value.get("kind"))

    @property
    def _module(self) -> kinds.JobKind:
        return kinds.BY_NAME[self.kind]

    @property
    def _spec(self) -> dict[str, Any]:
        return mapping(self.value.get("spec"))

    @property
    def name(self) -> str:
        return str(mapping(self.value.get("metadata")).get("name"))

    @property
    def selector(self) -> str:
        """The label that the operator gives all pods of the job."""
        return f"{self._module.POD_LABEL}={self.name}"

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
        return self._module.pods_wanted(self._spec)

    @property
    def processes(self) -> int:
        """Ranks of each pod."""
        count = self._module.processes_per_pod(self._spec) or 1
        return int(count) if str(count).isdecimal() else 1

    @property
    def shares_logs(self) -> bool:
        """Whether several ranks write into one log."""
        return self._module.ONE_LOG or self.processes > 1

    @property
    def rendered_beside(self) -> tuple[str, ...]:
        return self._module.RENDERED_BESIDE

    def templates(self, kubectl: Kubectl) -> list[dict[str, Any]]:
        """The templates of its pods."""
        return self._module.templates(self._spec, kubectl)

    def pod_of_rank(self, pods: list[dict[str, Any]], rank: int) -> str:
        """The name of the pod whose log has what a rank wrote; `pods` are in the order of their numbers."""
        size = self.processes * (self.pods_wanted if self._module.ONE_LOG else len(pods))
        found = self._module.pods_of_rank(self._spec, pods, rank, self.processes)
        if not found or not 0 <= rank < size:
            why = f"the ranks end at {size - 1}" if pods else "there are no pods yet"
            raise ValueError(f"rank {rank} has no pod: {why}.")
        return str(found[0]["metadata"]["name"])


def find(kubectl: Kubectl, name: str) -> ClusterJob:
    """The job of this name, whatever its kind. The kinds that a cluster lacks aren't asked for."""
    names.subdomain(name, "the job's name")
    known = {(version.partition("/")[0], kind) for version, kind in kubectl.kinds()}
    wanted = [(module.API.partition("/")[0], module.KIND) for module in kinds.JOBS.values()]
    asked = [one for one in wanted if one in known]
    if not asked:
        raise ValueError("the cluster knows no PyTorchJob, TrainJob or MPIJob: Kubeflow's operator isn't installed.")
    for group, kind in asked:
        resource = f"{kind.lower()}s.{group}"
        text = kubectl.run("get", resource, name, "--ignore-not-found", "--output=json")
        if text.strip():
            return ClusterJob(json.loads(text))
    missing = ", ".join(kind for _, kind in asked)
    raise ValueError(f"there is no {missing} called {name!r} here: see kubectl get, or give --namespace.")


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


# `cputrain launch` puts the rank before each line of a rank.
_RANK_LABEL = re.compile(r"\[(\d+)\] ")


def show_log(command: list[str], rank: int, say: Callable[[str], None]) -> int:
    """Runs a command and says its lines but those of other ranks; lines that no rank wrote are everybody's."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout
        for line in process.stdout:
            label = _RANK_LABEL.match(line)
            if label is None or int(label[1]) == rank:
                say(line)
    return process.returncode
