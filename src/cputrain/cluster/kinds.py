"""The kinds of Kubeflow's that are known here. A new kind of job is a module with what JobKind lists, and an entry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from cputrain.cluster import mpijob, pytorchjob, training_runtime, trainjob
from cputrain.cluster.containers import Container, Manifest, Pod, pods_of_replicas, replicas_of
from cputrain.cluster.job import Job
from cputrain.cluster.kubectl import Kubectl
from cputrain.cluster.manifest import Problem, mapping


class JobKind(Protocol):
    """What the module of a kind has: how a job of it is rendered, checked, and found on a cluster."""

    API: str  # group/version
    KIND: str
    POD_LABEL: str  # the operator gives it to all pods of a job, with the job's name
    ONE_LOG: bool  # whether all ranks write through one pod
    RENDERED_BESIDE: tuple[str, ...]  # resources of the operator's that are made and deleted with a job

    def documents(self, job: Job) -> list[dict[str, Any]]: ...
    def containers(self, manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]: ...
    def problems(self, manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]: ...
    def pods_wanted(self, spec: dict[str, Any]) -> int: ...  # before ranks can meet
    def processes_per_pod(self, spec: dict[str, Any]) -> Any: ...  # as the manifest has it
    def pods_of_rank(
        self, spec: dict[str, Any], pods: list[dict[str, Any]], rank: int, processes: int
    ) -> list[dict[str, Any]]: ...  # the first one has the rank's log
    def templates(self, spec: dict[str, Any], kubectl: Kubectl) -> list[dict[str, Any]]: ...


# By the word for --kind, in the order in which `auto` takes them.
JOBS: dict[str, JobKind] = {"trainjob": trainjob, "pytorchjob": pytorchjob, "mpijob": mpijob}
BY_NAME = {module.KIND: module for module in JOBS.values()}
NAMES = tuple(BY_NAME)
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
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
    kind = str(manifest.get("kind"))
    if kind in BY_NAME:
        yield from BY_NAME[kind].containers(manifest, others)
    elif kind in _RUNTIMES:
        yield from training_runtime.containers(manifest, others)


def pods(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Pod]:
    yield from pods_of_replicas(manifest)
    if manifest.get("kind") == "TrainJob":
        yield from trainjob.pods(manifest, others)
    elif manifest.get("kind") in _RUNTIMES:
        yield from training_runtime.pods(manifest, others)


def pods_of(manifest: Manifest, others: Sequence[Manifest] = ()) -> int:
    """How many pods train."""
    is_train_job = manifest.get("kind") == "TrainJob"
    return training_runtime.nodes_of(manifest, others) if is_train_job else replicas_of(manifest)


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    """What the operators' admission webhooks demand beyond their schemas, and what they forget to.

    Nothing for other kinds. What isn't even of the right type is left to the schema.
    """
    kind = str(manifest.get("kind"))
    if kind in BY_NAME:
        yield from _name(manifest)
        yield from BY_NAME[kind].problems(manifest, others)
    elif kind in _RUNTIMES:
        yield from _name(manifest)
        yield from training_runtime.problems(manifest, others)


def _name(manifest: dict[str, Any]) -> Iterator[Problem]:
    metadata, is_runtime = mapping(manifest.get("metadata")), manifest.get("kind") in _RUNTIMES
    where, name = ("metadata", "name"), metadata.get("name")
    form = _RUNTIME_NAME if is_runtime else _JOB_NAME
    if name is None:
        if not metadata.get("generateName"):
            yield Problem(("metadata",), "the name is missing: write metadata: {name: …}")
    elif not isinstance(name, str):
        yield Problem(where, "the name must be a string: write it in quotes")
    elif not form.fullmatch(name):
        said = "letters, digits, hyphens and dots" if is_runtime else "letters, digits and hyphens, a letter first"
        likely = re.sub(r"[^-.a-z0-9]" if is_runtime else r"[^-a-z0-9]", "-", name.lower()).strip("-.")
        remedy = f": write {likely}" if form.fullmatch(likely) else ""
        yield Problem(where, f"the name must be lower-case {said}, found {name!r}{remedy}")
    else:
        yield from _length(manifest, name)


def _length(manifest: dict[str, Any], name: str) -> Iterator[Problem]:
    """Pods and services are called after the job, and such a name has at most 63 characters."""
    kind, last = manifest.get("kind"), max(0, pods_of(manifest) - 1)
    ending = {"TrainJob": f"-node-0-{last}-abcde"}.get(str(kind), f"-worker-{last}")
    most = 253 if kind in _RUNTIMES else 63 - len(ending)
    if len(name) > most:
        why = "" if kind in _RUNTIMES else f" ({name[:10]}…{ending} must fit in 63)"
        yield Problem(("metadata", "name"), f"the name is too long: it has {len(name)} characters{why}; use {most}")
