"""Every container of a job, wherever its kind keeps it, with what else decides how its ranks run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cputrain.cluster.manifest import Where, items, mapping, within

Manifest = dict[str, Any]
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
_POLICIES = ("torch", "mpi", "flux", "jax", "xgboost")
# What Kubeflow calls its own runtimes, which a TrainJob names without their standing in any file here.
_BY_NAME = {"mpi": "mpi", "deepspeed": "mpi", "mlx": "mpi", "flux": "flux", "jax": "jax", "xgboost": "xgboost"}
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
    # With a Master the operator tells each pod its RANK, and a script of one process needs no launcher.
    rank_is_told: bool = False
    # torch, mpi, flux, jax, xgboost, or "" for a runtime that leaves the ranks alone.
    started_by: str = "torch"
    # Which volume is mounted where; None if that stands in a runtime that isn't here.
    mounts: Mapping[str, dict[str, Any]] | None = None

    @property
    def has_gpus(self) -> bool:
        amounts = [mapping(self.resources.get(side)) for side in ("limits", "requests")]
        return any(re.search(r"gpu|tpu|gaudi|neuron", str(name)) for side in amounts for name in side)


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
    # Names of volumes that other parts of the job bring; None if those can't be seen.
    volumes_elsewhere: frozenset[str] | None = frozenset()
    # The words that start the ranks, and who starts them.
    command: Sequence[str] = ()
    started_by: str = "torch"
    # What a TrainJob gives its training in place of the runtime's.
    resources: Mapping[str, Any] = field(default_factory=dict)


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
            starter = within(spec, replicas, "Launcher", "template", "spec") if replicas == "mpiReplicaSpecs" else pod
            yield Pod(
                ("spec", replicas, name, "template", "spec"), pod, trains=name != "Launcher",
                command=words(_main(mapping(starter))), started_by=started_by(manifest),
            )  # fmt: skip
    if kind in _RUNTIMES:
        yield from _pods_of_runtime(manifest, _job_of(manifest, others))
    if kind == "TrainJob":
        yield from patches(manifest, runtime_of(manifest, others))


def _pods_of_runtime(runtime: Manifest, job: Manifest | None) -> Iterator[Pod]:
    parts = [part.spec for part in patches(job)] if job else []
    trainer = mapping(within(job, "spec", "trainer"))
    for where, name, template in _replicated_jobs(mapping(runtime.get("spec"))):
        pod = mapping(template.get("spec"))
        yield Pod(
            (*where, "spec"),
            pod,
            trains=name == "node",
            mounted_elsewhere=frozenset(path for part in parts for path in _mounts(part)),
            volumes_elsewhere=frozenset(_claim_templates(runtime)) | _volume_names(*parts),
            command=words(trainer) or words(_main(pod)),
            started_by=started_by(runtime),
            resources=mapping(trainer.get("resourcesPerNode")),
        )


def patches(manifest: Manifest, runtime: Manifest | None = None) -> Iterator[Pod]:
    """Parts that a TrainJob lays over its runtime's pods: runtimePatches, which older releases call otherwise."""
    spec = mapping(manifest.get("spec"))
    known = None
    if runtime is not None:
        whole = [mapping(template.get("spec")) for _, _, template in _replicated_jobs(mapping(runtime.get("spec")))]
        known = frozenset(_claim_templates(runtime)) | _volume_names(*whole)
    for number, patch in enumerate(items(spec.get("runtimePatches"))):
        here = ("spec", "runtimePatches", number, "trainingRuntimeSpec")
        for where, name, template in _replicated_jobs(mapping(within(patch, "trainingRuntimeSpec")), here):
            pod = mapping(template.get("spec"))
            yield Pod((*where, "spec"), pod, name == "node", is_part=True, volumes_elsewhere=known)
    for number, patch in enumerate(items(spec.get("podTemplateOverrides"))):
        targets = [mapping(target).get("name") for target in items(mapping(patch).get("targetJobs"))]
        pod, where = mapping(within(patch, "spec")), ("spec", "podTemplateOverrides", number, "spec")
        yield Pod(where, pod, "node" in targets, is_part=True, volumes_elsewhere=known)


def started_by(manifest: Manifest, others: Sequence[Manifest] = ()) -> str:
    """Who starts the ranks. A TrainJob's is its runtime's policy, or what the runtime's name tells."""
    kind = manifest.get("kind")
    if kind in ("PyTorchJob", "MPIJob"):
        return "torch" if kind == "PyTorchJob" else "mpi"
    runtime = runtime_of(manifest, others) if kind == "TrainJob" else manifest
    if runtime is not None:
        policy = mapping(within(runtime, "spec", "mlPolicy"))
        return next((name for name in _POLICIES if name in policy), "")
    parts = re.split(r"[^a-z0-9]+", str(within(manifest, "spec", "runtimeRef", "name")).lower())
    return next((_BY_NAME[part] for part in parts if part in _BY_NAME), "torch")


def _main(pod: dict[str, Any]) -> dict[str, Any]:
    """The container in which ranks run or are started."""
    return next((container for number, container in named(pod) if _is_main(pod, number)), {})


def _volume_names(*specs: dict[str, Any]) -> frozenset[str]:
    return frozenset(str(mapping(volume).get("name")) for spec in specs for volume in items(spec.get("volumes")))


def _claim_templates(runtime: Manifest) -> Iterator[str]:
    """Volumes for which a JobSet makes the claims itself; they have the templates' names."""
    for policy in items(within(runtime, "spec", "template", "spec", "volumeClaimPolicies")):
        for template in items(mapping(policy).get("templates")):
            yield str(within(template, "metadata", "name"))


def _mounted(container: dict[str, Any], *specs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volume at each path of a container; `specs` are the pods or parts of pods that may declare it."""
    volumes = {str(mapping(row).get("name")): mapping(row) for spec in specs for row in items(spec.get("volumes"))}
    mounts = map(mapping, items(container.get("volumeMounts")))
    return {str(mount.get("mountPath")): volumes.get(str(mount.get("name")), {}) for mount in mounts}


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
    told = "Master" in mapping(spec.get(key))
    for name, replica in mapping(spec.get(key)).items():
        here, pod = ("spec", key, name, "template", "spec"), mapping(within(replica, "template", "spec"))
        # The Launcher's command and variables are for the ranks, which run in the Workers.
        ranks_pod = worker if name == "Launcher" else pod
        for number, container in named(pod):
            holder = _main(worker) if name == "Launcher" else container
            ranks = Ranks(
                processes,
                pods_of(manifest),
                mapping(holder.get("resources")),
                chooses_nodes(ranks_pod),
                words(container),
                told,
                started_by(manifest),
                _mounted(holder, ranks_pod),
            )
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
        started_by=started_by(manifest, [runtime] if runtime else []),
        mounts=_mounts_of_node(manifest, runtime) if runtime else None,
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
                started_by=started_by(manifest),
                mounts=_mounts_of_node(job or {}, manifest),
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


def _mounts_of_node(job: Manifest, runtime: Manifest) -> dict[str, dict[str, Any]]:
    """What a runtime and a job's patches mount in the container of the training."""
    parts = [part.spec for part in patches(job)]
    whole = [mapping(template.get("spec")) for _, _, template in _replicated_jobs(mapping(runtime.get("spec")))]
    made = {"volumes": [{"name": name, "persistentVolumeClaim": {}} for name in _claim_templates(runtime)]}
    patched = [container for part in parts for _, container in named(part) if container.get("name") == "node"]
    found = [_mounted(container, made, *whole, *parts) for container in [_node(runtime), *patched]]
    return {path: volume for mounts in found for path, volume in mounts.items()}


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
