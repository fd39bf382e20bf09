"""What a job refers to by name, and finds only in its own namespace: claims, config maps, secrets, runtimes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster import job_containers
from cputrain.cluster.manifest import Problem, Where, items, mapping, warning, within

Manifest = dict[str, Any]
# In which field of a volume the name of which kind stands.
_VOLUMES = {
    ("persistentVolumeClaim", "claimName"): "PersistentVolumeClaim",
    ("configMap", "name"): "ConfigMap",
    ("secret", "secretName"): "Secret",
}
_VARIABLES = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    own = within(manifest, "metadata", "namespace")
    if manifest.get("kind") == "ClusterTrainingRuntime":
        return  # its pods run in the namespace of whichever job names it
    for where, kind, name in _references(manifest, others):
        found = [other for other in others if (other.get("kind"), within(other, "metadata", "name")) == (kind, name)]
        spaces = [within(other, "metadata", "namespace") for other in found]
        if found and own not in spaces:
            yield _elsewhere(where, f"{kind} {name}", own, spaces[0])


def claims_of(job: Manifest, others: Sequence[Manifest]) -> set[str]:
    """The claims that a job's pods mount, a TrainJob's runtime included."""
    runtime = job_containers.runtime_of(job, others)
    parts = [job, runtime] if runtime else [job]
    rows = [row for part in parts for row in _references(part, others)]
    return {name for _, kind, name in rows if kind == "PersistentVolumeClaim"}


def _elsewhere(where: Where, called: str, own: Any, other: Any) -> Problem:
    if own is None or other is None:
        here, there = (f"in namespace {space}" if space else "in kubectl's namespace" for space in (own, other))
        said = f"{called} is {there}, and this is {here}: write the same namespace in both, or in neither"
        return warning(where, said)
    said = f"{called} is in namespace {other}, and nothing in {own} can use it: write the same namespace in both"
    return Problem(where, said)


def _references(manifest: Manifest, others: Sequence[Manifest]) -> Iterator[tuple[Where, str, str]]:
    """(place, kind, name) of everything that is referred to."""
    for pod in job_containers.pods(manifest, others):
        for number, volume in enumerate(map(mapping, items(pod.spec.get("volumes")))):
            for (key, field), kind in _VOLUMES.items():
                name = mapping(volume.get(key)).get(field)
                if isinstance(name, str):
                    yield (*pod.where, "volumes", number, key, field), kind, name
    for container in job_containers.containers(manifest, others):
        for number, variable in enumerate(items(container.value.get("env"))):
            for key, kind in _VARIABLES.items():
                name = within(variable, "valueFrom", key, "name")
                if isinstance(name, str):
                    yield (*container.where, "env", number, "valueFrom", key, "name"), kind, name
    reference = mapping(within(manifest, "spec", "runtimeRef"))
    if reference.get("kind") == "TrainingRuntime" and isinstance(reference.get("name"), str):
        yield ("spec", "runtimeRef", "name"), "TrainingRuntime", reference["name"]
