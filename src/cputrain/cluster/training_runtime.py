"""TrainingRuntime and ClusterTrainingRuntime, trainer.kubeflow.org/v1alpha1: the pods on which TrainJobs are laid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster.containers import (
    Container,
    Manifest,
    Pod,
    Ranks,
    chooses_nodes,
    count,
    init_containers,
    main_container,
    mount_paths,
    mounted,
    named,
    volume_names,
    words,
)
from cputrain.cluster.manifest import Problem, Where, hint, items, mapping, within

_POLICIES = ("torch", "mpi", "flux", "jax", "xgboost")
# What Kubeflow calls its own runtimes, which a TrainJob names without their standing in any file here.
_BY_NAME = {"mpi": "mpi", "deepspeed": "mpi", "mlx": "mpi", "flux": "flux", "jax": "jax", "xgboost": "xgboost"}
# Where a replicated job keeps its pod, from the job's own entry on.
_POD = ("template", "spec", "template")
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
# The container that each step of a runtime must have.
_CONTAINERS = {
    "trainer": "node",
    "dataset-initializer": "dataset-initializer",
    "model-initializer": "model-initializer",
}


def containers(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]:
    yield from _containers(manifest, _job_of(manifest, others))


def pods(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Pod]:
    yield from _pods(manifest, _job_of(manifest, others))


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    """What the operator's webhook demands, and what it forgets to."""
    spec = mapping(manifest.get("spec"))
    yield from _webhook(spec)
    yield from _backoff_limit(spec)


def started_by(manifest: Manifest, others: Sequence[Manifest] = ()) -> str:
    """Who starts the ranks. A TrainJob's is its runtime's policy, or what the runtime's name tells."""
    runtime = runtime_of(manifest, others) if manifest.get("kind") == "TrainJob" else manifest
    if runtime is not None:
        policy = mapping(within(runtime, "spec", "mlPolicy"))
        return next((name for name in _POLICIES if name in policy), "")
    parts = re.split(r"[^a-z0-9]+", str(within(manifest, "spec", "runtimeRef", "name")).lower())
    return next((_BY_NAME[part] for part in parts if part in _BY_NAME), "torch")


def runtime_of(job: Manifest, others: Sequence[Manifest]) -> Manifest | None:
    """The runtime that a TrainJob names, if it stands in the same file."""
    reference = mapping(within(job, "spec", "runtimeRef"))
    wanted = (reference.get("kind") or "ClusterTrainingRuntime", reference.get("name"))
    return next((other for other in others if (other.get("kind"), within(other, "metadata", "name")) == wanted), None)


def _job_of(runtime: Manifest, others: Sequence[Manifest]) -> Manifest | None:
    jobs = (other for other in others if other.get("kind") == "TrainJob")
    return next((job for job in jobs if runtime_of(job, [runtime]) is runtime), None)


def nodes_of(job: Manifest, others: Sequence[Manifest] = ()) -> int:
    """How many pods a TrainJob trains in."""
    nodes = within(job, "spec", "trainer", "numNodes")
    nodes = nodes or within(runtime_of(job, others), "spec", "mlPolicy", "numNodes")
    return nodes if isinstance(nodes, int) else 1


def replicated_jobs(spec: dict[str, Any], here: Where = ("spec",)) -> Iterator[tuple[Where, str, dict[str, Any]]]:
    """(path of the pod's template, the job's name, the template) of a runtime, or of a patch of one."""
    for number, job in enumerate(items(within(spec, "template", "spec", "replicatedJobs"))):
        where = (*here, "template", "spec", "replicatedJobs", number, *_POD)
        yield where, str(mapping(job).get("name")), mapping(within(job, *_POD))


def patches(manifest: Manifest, runtime: Manifest | None = None) -> Iterator[Pod]:
    """Parts that a TrainJob lays over its runtime's pods: runtimePatches, which older releases call otherwise."""
    spec = mapping(manifest.get("spec"))
    known = None
    if runtime is not None:
        whole = [mapping(template.get("spec")) for _, _, template in replicated_jobs(mapping(runtime.get("spec")))]
        known = frozenset(_claim_templates(runtime)) | volume_names(*whole)
    for number, patch in enumerate(items(spec.get("runtimePatches"))):
        here = ("spec", "runtimePatches", number, "trainingRuntimeSpec")
        for where, name, template in replicated_jobs(mapping(within(patch, "trainingRuntimeSpec")), here):
            pod = mapping(template.get("spec"))
            yield Pod((*where, "spec"), pod, name == "node", is_part=True, volumes_elsewhere=known)
    for number, patch in enumerate(items(spec.get("podTemplateOverrides"))):
        targets = [mapping(target).get("name") for target in items(mapping(patch).get("targetJobs"))]
        pod, where = mapping(within(patch, "spec")), ("spec", "podTemplateOverrides", number, "spec")
        yield Pod(where, pod, "node" in targets, is_part=True, volumes_elsewhere=known)


def _claim_templates(runtime: Manifest) -> Iterator[str]:
    """Volumes for which a JobSet makes the claims itself; they have the templates' names."""
    for policy in items(within(runtime, "spec", "template", "spec", "volumeClaimPolicies")):
        for template in items(mapping(policy).get("templates")):
            yield str(within(template, "metadata", "name"))


def node_container(runtime: Manifest | None) -> dict[str, Any]:
    """The container of a runtime in which the training runs."""
    for _, name, template in replicated_jobs(mapping(within(runtime, "spec"))):
        for _, container in named(mapping(template.get("spec"))):
            if name == "node" and container.get("name") == "node":
                return container
    return {}


def mounts_of_node(job: Manifest, runtime: Manifest) -> dict[str, dict[str, Any]]:
    """What a runtime and a job's patches mount in the container of the training."""
    parts = [part.spec for part in patches(job)]
    whole = [mapping(template.get("spec")) for _, _, template in replicated_jobs(mapping(runtime.get("spec")))]
    made = {"volumes": [{"name": name, "persistentVolumeClaim": {}} for name in _claim_templates(runtime)]}
    patched = [container for part in parts for _, container in named(part) if container.get("name") == "node"]
    found = [mounted(container, made, *whole, *parts) for container in [node_container(runtime), *patched]]
    return {path: volume for mounts in found for path, volume in mounts.items()}


def chooses_nodes_anywhere(job: Manifest | None, runtime: Manifest | None) -> bool:
    parts = [part.spec for part in patches(job or {})]
    own = [mapping(template.get("spec")) for _, _, template in replicated_jobs(mapping(within(runtime, "spec")))]
    return any(map(chooses_nodes, parts + own))


def _pods(runtime: Manifest, job: Manifest | None) -> Iterator[Pod]:
    parts = [part.spec for part in patches(job)] if job else []
    trainer = mapping(within(job, "spec", "trainer"))
    for where, name, template in replicated_jobs(mapping(runtime.get("spec"))):
        pod = mapping(template.get("spec"))
        yield Pod(
            (*where, "spec"),
            pod,
            trains=name == "node",
            mounted_elsewhere=frozenset(path for part in parts for path in mount_paths(part)),
            volumes_elsewhere=frozenset(_claim_templates(runtime)) | volume_names(*parts),
            command=words(trainer) or words(main_container(pod)),
            started_by=started_by(runtime),
            resources=mapping(trainer.get("resourcesPerNode")),
        )


def _containers(manifest: Manifest, job: Manifest | None) -> Iterator[Container]:
    trainer = mapping(within(job, "spec", "trainer"))
    started_there = bool(trainer.get("command"))
    for where, name, template in replicated_jobs(mapping(manifest.get("spec"))):
        pod = mapping(template.get("spec"))
        for number, container in named(pod):
            ranks = Ranks(
                count(trainer.get("numProcPerNode")),
                nodes_of(job, [manifest]) if job else count(within(manifest, "spec", "mlPolicy", "numNodes")) or 1,
                mapping(trainer.get("resourcesPerNode")) or mapping(container.get("resources")),
                chooses_nodes_anywhere(job, manifest),
                words(container),
                started_by=started_by(manifest),
                mounts=mounts_of_node(job or {}, manifest),
            )
            trains = name == "node" and container.get("name") == "node" and not started_there
            here = (*where, "spec", "containers", number)
            yield Container(here, container, ranks, trains, needs_resources=False)
        yield from init_containers(pod, (*where, "spec"))


def _webhook(spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "template", "spec", "replicatedJobs")
    jobs = [mapping(job) for job in items(within(spec, "template", "spec", "replicatedJobs"))]
    # With MPI the ranks are started by a job of its own.
    known = ("node", "launcher") if "mpi" in mapping(spec.get("mlPolicy")) else ("node",)
    steps = [mapping(within(job, "template", "metadata", "labels")).get(STEP) for job in jobs]
    for number, (job, step) in enumerate(zip(jobs, steps, strict=True)):
        if not isinstance(step, str) or step not in _CONTAINERS:
            continue
        yield from _step(job, (*here, number), step)
        if step == "trainer" and job.get("name") not in known:
            said = f"the replicated job of the training must be named {' or '.join(known)}: rename it"
            yield Problem((*here, number, "name"), said)
    if jobs and "trainer" not in steps:
        said = f"no replicated job has the label {STEP}: trainer, so the operator finds none to run: write it"
        yield Problem(here, said)
    policies = [name for name in ("torch", "mpi", "jax", "xgboost", "flux") if name in mapping(spec.get("mlPolicy"))]
    if len(policies) > 1:
        yield Problem(("spec", "mlPolicy"), f"only one of {' and '.join(policies)} can be chosen: remove the others")


def _step(job: dict[str, Any], where: Where, step: str) -> Iterator[Problem]:
    """One step of a TrainJob: a single replica, with a container of the step's name."""
    if job.get("replicas") not in (None, 1):
        said = "replicas must be 1 here: the number of pods is mlPolicy.numNodes, or a job's trainer.numNodes"
        yield Problem((*where, "replicas"), said)
    called = [
        mapping(each).get("name") for each in items(within(job, "template", "spec", "template", "spec", "containers"))
    ]
    if _CONTAINERS[step] not in called:
        said = f"the container of the step {step} must be named {_CONTAINERS[step]}: rename it"
        yield Problem((*where, "template", "spec", "template", "spec", "containers"), said)


def _backoff_limit(spec: dict[str, Any]) -> Iterator[Problem]:
    """Ranks can't come back alone: a pod that fails has to end its Job, and the JobSet starts all anew."""
    here: Where = ("spec", "template", "spec", "replicatedJobs")
    for number, job in enumerate(items(within(spec, "template", "spec", "replicatedJobs"))):
        inner = mapping(within(job, "template", "spec"))
        if mapping(job).get("name") == "node" and inner.get("backoffLimit") is None:
            yield hint(
                (*here, number, "template", "spec") if inner else (*here, number),
                "backoffLimit is missing, so a pod that fails is started 6 times again alone, while the others wait "
                "for it: write backoffLimit: 0 here, and failurePolicy: {maxRestarts: 3} beside replicatedJobs",
            )
