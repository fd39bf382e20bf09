"""The kinds of Kubeflow's that are known here. A new kind of job is a module with what JobKind lists, and an entry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from cputrain.cluster import mpijob, pytorchjob, training_runtime, trainjob
from cputrain.cluster.containers import Container, Manifest, Pod, pods_of_replicas, replicas_of
from cputrain.cluster.job import Job
from cputrain.cluster.kubectl import Kubectl
from cputrain.cluster.manifest import Problem, mapping, within


class JobKind(Protocol):
    """What the module of a kind has: how a job of it is rendered, checked, and found on a cluster."""

    API: str  # group/version
    KIND: str
    POD_LABEL: str  # the operator gives it to all pods of a job, with the job's name
    ONE_LOG: bool  # whether all ranks write through one pod
    RENDERED_BESIDE: tuple[str, ...]  # resources of the operator's that are made and deleted with a job
    PODS: tuple[tuple[str, ...], ...]  # where in a spec the number of pods may stand before ranks can meet
    PROCESSES: tuple[str, ...]  # where the number of processes of a pod stands

    def documents(self, job: Job) -> list[dict[str, Any]]: ...
    def containers(self, manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]: ...
    def problems(self, manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]: ...
    # In the order of the ranks.
    def pods_with_logs(self, spec: dict[str, Any], pods: list[dict[str, Any]]) -> list[dict[str, Any]]: ...


# By the word for --kind, in the order in which `auto` takes them.
JOBS: dict[str, JobKind] = {"trainjob": trainjob, "pytorchjob": pytorchjob, "mpijob": mpijob}
BY_NAME = {module.KIND: module for module in JOBS.values()}
NAMES = tuple(BY_NAME)
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
_CHECKED: dict[str, Any] = {**BY_NAME, **dict.fromkeys(_RUNTIMES, training_runtime)}
_JOB_NAME = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_RUNTIME_NAME = re.compile(r"[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?")


def resource(module: JobKind) -> str:
    """What kubectl calls it, such as pytorchjobs.kubeflow.org; its definition has the same name."""
    return f"{module.KIND.lower()}s.{module.API.partition('/')[0]}"


def choose(kubectl: Kubectl, elastic: bool) -> tuple[str, str]:
    """The kind of job for this cluster, and why."""
    found = {(version.rpartition("/")[0], kind): version for version, kind in kubectl.kinds()}
    allowed = {"pytorchjob": JOBS["pytorchjob"]} if elastic else JOBS
    for word, module in allowed.items():
        version = found.get((module.API.partition("/")[0], module.KIND))
        # The training operator has an MPIJob of its own, v1, which starts ranks otherwise.
        if version and (module is not mpijob or version == module.API):
            return word, f"the cluster has {module.KIND} in {version}"
    wanted = " or ".join(module.KIND for module in allowed.values())
    raise ValueError(f"the cluster knows no {wanted}: ask for Kubeflow's Trainer or training operator to be installed.")


def containers(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]:
    """`others`: the manifests beside it; a TrainJob and its runtime are one job."""
    module = _CHECKED.get(str(manifest.get("kind")))
    yield from module.containers(manifest, others) if module else ()


def pods(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Pod]:
    yield from pods_of_replicas(manifest)
    module = _CHECKED.get(str(manifest.get("kind")))
    yield from module.pods(manifest, others) if module in (trainjob, training_runtime) else ()


def pod_specs(job: Manifest, kubectl: Kubectl) -> list[dict[str, Any]]:
    """The specifications of a job's pods. Those of a TrainJob stand in its runtime."""
    if job.get("kind") != "TrainJob":
        return [pod.spec for pod in pods_of_replicas(job)]
    reference = mapping(within(job, "spec", "runtimeRef"))
    resource = f"{str(reference.get('kind')).lower()}s.trainer.kubeflow.org"
    return training_runtime.pod_specs(kubectl.json("get", resource, str(reference.get("name"))))


def pods_that_train(manifest: Manifest, others: Sequence[Manifest] = ()) -> int:
    is_train_job = manifest.get("kind") == "TrainJob"
    return training_runtime.nodes_of(manifest, others) if is_train_job else replicas_of(manifest)


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    """What the operators' admission webhooks demand beyond their schemas, and what they forget to.

    Nothing for other kinds. What isn't even of the right type is left to the schema.
    """
    module = _CHECKED.get(str(manifest.get("kind")))
    if module:
        yield from _name(manifest)
        yield from module.problems(manifest, others)


def _name(manifest: dict[str, Any]) -> Iterator[Problem]:
    where, name = ("metadata", "name"), within(manifest, "metadata", "name")
    form, others, said = _JOB_NAME, r"[^-a-z0-9]", "letters, digits and hyphens, a letter first"
    if manifest.get("kind") in _RUNTIMES:
        form, others, said = _RUNTIME_NAME, r"[^-.a-z0-9]", "letters, digits, hyphens and dots"
    if name is None:
        if not within(manifest, "metadata", "generateName"):
            yield Problem(("metadata",), "the name is missing: write metadata: {name: …}")
    elif not isinstance(name, str):
        yield Problem(where, "the name must be a string: write it in quotes")
    elif not form.fullmatch(name):
        likely = re.sub(others, "-", name.lower()).strip("-.")
        remedy = f": write {likely}" if form.fullmatch(likely) else ""
        yield Problem(where, f"the name must be lower-case {said}, found {name!r}{remedy}")
    else:
        yield from _length(manifest, name)


def _length(manifest: dict[str, Any], name: str) -> Iterator[Problem]:
    """Pods and services are called after the job, and such a name has at most 63 characters."""
    last = max(0, pods_that_train(manifest) - 1)
    ending = f"-node-0-{last}-abcde" if manifest.get("kind") == "TrainJob" else f"-worker-{last}"
    most, why = 63 - len(ending), f" ({name[:10]}…{ending} must fit in 63)"
    if manifest.get("kind") in _RUNTIMES:
        most, why = 253, ""
    if len(name) > most:
        yield Problem(("metadata", "name"), f"the name is too long: it has {len(name)} characters{why}; use {most}")
