"""Every container of a job, wherever its kind keeps it, with what else decides how its ranks run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cputrain.cluster.loose_values import items, mapping, within
from cputrain.cluster.schema import Where

Manifest = dict[str, Any]
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
# Where a replicated job keeps its pod, from the job's own entry on.
_POD = ("template", "spec", "template")


@dataclass(frozen=True)
class Ranks:
    """What a job says about its ranks, in whatever place: None and empty where it says nothing."""

    processes: int | None
    pods: int
    resources: dict[str, Any]
    nodes_are_chosen: bool
    command: Sequence[str] = ()
    # With a Master the operator tells each pod its RANK, and a script of one process needs nobody to start it.
    rank_is_told: bool = False


@dataclass(frozen=True)
class Container:
    """One container: `where` it stands, its `value`, whether the ranks run or are started in it, and how."""

    where: Where
    value: dict[str, Any]
    ranks: Ranks
    trains: bool = True
    resources_key: str = "resources"
    needs_resources: bool = True

    @property
    def resources(self) -> dict[str, Any]:
        return mapping(self.value.get(self.resources_key))


@dataclass(frozen=True)
class Pod:
    """One pod's specification, or a part of it that is laid over a runtime's."""

    where: Where
    spec: dict[str, Any]
    trains: bool = True
    is_part: bool = False
    mounted_elsewhere: frozenset[str] = frozenset()


def containers(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]:
    """`others`: the manifests beside it; a TrainJob and its runtime are one job."""
    kind = manifest.get("kind")
    if kind == "PyTorchJob":
        yield from _of_replicas(manifest, "pytorchReplicaSpecs")
    elif kind == "MPIJob":
        yield from _of_replicas(manifest, "mpiReplicaSpecs")
    elif kind == "TrainJob":
        yield from _of_train_job(manifest, runtime_of(manifest, others))
    elif kind in _RUNTIMES:
        yield from _of_runtime(manifest, _job_of(manifest, others))


def pods(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Pod]:
    kind, spec = manifest.get("kind"), mapping(manifest.get("spec"))
    for replicas in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        for name, replica in mapping(spec.get(replicas)).items():
            pod = mapping(within(replica, "template", "spec"))
            yield Pod(("spec", replicas, name, "template", "spec"), pod, trains=name != "Launcher")
    if kind in _RUNTIMES:
        job = _job_of(manifest, others)
        patched = frozenset(path for part in patches(job) for path in _mounts(part.spec)) if job else frozenset()
        for where, name, template in _replicated_jobs(spec):
            pod = mapping(template.get("spec"))
            yield Pod((*where, "spec"), pod, trains=name == "node", mounted_elsewhere=patched)
    if kind == "TrainJob":
        yield from patches(manifest)


def patches(manifest: Manifest) -> Iterator[Pod]:
    """Parts that a TrainJob lays over its runtime's pods: runtimePatches, which older releases call otherwise."""
    spec = mapping(manifest.get("spec"))
    for number, patch in enumerate(items(spec.get("runtimePatches"))):
        here = ("spec", "runtimePatches", number, "trainingRuntimeSpec")
        for where, name, template in _replicated_jobs(mapping(within(patch, "trainingRuntimeSpec")), here):
            yield Pod((*where, "spec"), mapping(template.get("spec")), name == "node", is_part=True)
    for number, patch in enumerate(items(spec.get("podTemplateOverrides"))):
        targets = [mapping(target).get("name") for target in items(mapping(patch).get("targetJobs"))]
        pod = mapping(within(patch, "spec"))
        yield Pod(("spec", "podTemplateOverrides", number, "spec"), pod, "node" in targets, is_part=True)


def pods_of(manifest: Manifest, others: Sequence[Manifest] = ()) -> int:
    """How many pods train."""
    spec = mapping(manifest.get("spec"))
    if manifest.get("kind") == "TrainJob":
        nodes = within(spec, "trainer", "numNodes") or within(
            runtime_of(manifest, others), "spec", "mlPolicy", "numNodes"
        )
        return nodes if isinstance(nodes, int) else 1
    counts = []
    for replicas in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        rows = mapping(spec.get(replicas)).items()
        counts += [mapping(replica).get("replicas", 1) for name, replica in rows if name != "Launcher"]
    return sum(count for count in counts if isinstance(count, int))


def runtime_of(job: Manifest, others: Sequence[Manifest]) -> Manifest | None:
    """The runtime that a TrainJob names, if it stands in the same file."""
    reference = mapping(within(job, "spec", "runtimeRef"))
    wanted = (reference.get("kind") or "ClusterTrainingRuntime", reference.get("name"))
    return next((other for other in others if (other.get("kind"), within(other, "metadata", "name")) == wanted), None)


def _job_of(runtime: Manifest, others: Sequence[Manifest]) -> Manifest | None:
    jobs = (other for other in others if other.get("kind") == "TrainJob")
    return next((job for job in jobs if runtime_of(job, [runtime]) is runtime), None)


def named(spec: dict[str, Any], key: str = "containers") -> Iterator[tuple[int, dict[str, Any]]]:
    """The containers of a pod, with their numbers."""
    for number, container in enumerate(items(spec.get(key))):
        if isinstance(container, dict):
            yield number, container


def words(container: dict[str, Any]) -> list[str]:
    return [word for key in ("command", "args") for word in items(container.get(key)) if isinstance(word, str)]


def chooses_nodes(pod: dict[str, Any]) -> bool:
    return bool(pod.get("nodeSelector") or pod.get("affinity"))


def _of_replicas(manifest: Manifest, key: str) -> Iterator[Container]:
    spec = mapping(manifest.get("spec"))
    processes = _count(spec.get("nprocPerNode")) or _count(within(spec, "elasticPolicy", "nProcPerNode"))
    processes = processes or _count(spec.get("slotsPerWorker"))
    worker = mapping(within(spec, key, "Worker", "template", "spec"))
    for name, replica in mapping(spec.get(key)).items():
        here, pod = ("spec", key, name, "template", "spec"), mapping(within(replica, "template", "spec"))
        # The Launcher's command and variables are for the ranks, which run in the Workers.
        ranks_pod = worker if name == "Launcher" else pod
        for number, container in named(pod):
            limits = mapping(container.get("resources"))
            if name == "Launcher":
                limits = next((mapping(other.get("resources")) for _, other in named(worker)), {})
            told = "Master" in mapping(spec.get(key))
            ranks = Ranks(processes, pods_of(manifest), limits, chooses_nodes(ranks_pod), words(container), told)
            yield Container((*here, "containers", number), container, ranks, _is_main(pod, number))
        yield from _beside(pod, here)


def _of_train_job(manifest: Manifest, runtime: Manifest | None) -> Iterator[Container]:
    spec = mapping(manifest.get("spec"))
    trainer, node = mapping(spec.get("trainer")), _node(runtime)
    own = trainer if trainer.get("command") else {**node, **{key: trainer[key] for key in ("args",) if key in trainer}}
    given = mapping(trainer.get("resourcesPerNode"))
    ranks = Ranks(
        _count(trainer.get("numProcPerNode")),
        pods_of(manifest, [runtime] if runtime else []),
        given or mapping(node.get("resources")),
        _any_chooses(manifest, runtime),
        words(own),
    )
    yield Container(
        ("spec", "trainer"),
        trainer,
        ranks,
        resources_key="resourcesPerNode",
        needs_resources=not node.get("resources"),
    )
    for name in ("dataset", "model"):
        initializer = mapping(within(spec, "initializer", name))
        yield Container(("spec", "initializer", name), initializer, _NONE, trains=False, needs_resources=False)
    for part in patches(manifest):
        for number, container in named(part.spec):
            here = (*part.where, "containers", number)
            yield Container(here, container, _NONE, trains=False, needs_resources=False)
        yield from _beside(part.spec, part.where)


def _of_runtime(manifest: Manifest, job: Manifest | None) -> Iterator[Container]:
    trainer = mapping(within(job, "spec", "trainer"))
    started_there = bool(trainer.get("command"))
    for where, name, template in _replicated_jobs(mapping(manifest.get("spec"))):
        pod = mapping(template.get("spec"))
        for number, container in named(pod):
            ranks = Ranks(
                _count(trainer.get("numProcPerNode")),
                pods_of(job, [manifest]) if job else _count(within(manifest, "spec", "mlPolicy", "numNodes")) or 1,
                mapping(trainer.get("resourcesPerNode")) or mapping(container.get("resources")),
                _any_chooses(job, manifest),
                words(container),
            )
            trains = name == "node" and container.get("name") == "node" and not started_there
            here = (*where, "spec", "containers", number)
            yield Container(here, container, ranks, trains, needs_resources=False)
        yield from _beside(pod, (*where, "spec"))


_NONE = Ranks(None, 1, {}, True)


def _beside(pod: dict[str, Any], where: Where) -> Iterator[Container]:
    """Init containers: nothing trains in them, but a token may stand there."""
    for number, container in named(pod, "initContainers"):
        yield Container((*where, "initContainers", number), container, _NONE, trains=False, needs_resources=False)


def _replicated_jobs(spec: dict[str, Any], here: Where = ("spec",)) -> Iterator[tuple[Where, str, dict[str, Any]]]:
    """(path of the pod's template, the job's name, the template) of a runtime, or of a patch of one."""
    for number, job in enumerate(items(within(spec, "template", "spec", "replicatedJobs"))):
        where = (*here, "template", "spec", "replicatedJobs", number, *_POD)
        yield where, str(mapping(job).get("name")), mapping(within(job, *_POD))


def _node(runtime: Manifest | None) -> dict[str, Any]:
    """The container of a runtime in which the training runs."""
    for _, name, template in _replicated_jobs(mapping(within(runtime, "spec"))):
        for _, container in named(mapping(template.get("spec"))):
            if name == "node" and container.get("name") == "node":
                return container
    return {}


def _any_chooses(job: Manifest | None, runtime: Manifest | None) -> bool:
    parts = [part.spec for part in patches(job or {})]
    own = [mapping(template.get("spec")) for _, _, template in _replicated_jobs(mapping(within(runtime, "spec")))]
    return any(map(chooses_nodes, parts + own))


def _is_main(pod: dict[str, Any], number: int) -> bool:
    """The operators train in the container that they know by name, and else in the first."""
    known = [place for place, container in named(pod) if container.get("name") == "pytorch"]
    return number == (known[0] if known else 0)


def _mounts(pod: dict[str, Any]) -> Iterator[str]:
    for _, container in named(pod):
        for mount in items(container.get("volumeMounts")):
            yield str(mapping(mount).get("mountPath"))


def _count(value: Any) -> int | None:
    if isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"\d{1,6}", value, re.ASCII)):
        return int(value)
    return None
