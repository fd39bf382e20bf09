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
    mounted,
    named,
    volumes_of,
    words,
)
from cputrain.cluster.manifest import Problem, Where, hint, mapping, mappings, within

_POLICIES = ("torch", "mpi", "flux", "jax", "xgboost")
# What Kubeflow calls its own runtimes, which a TrainJob names without their standing in any file here.
_BY_NAME = {"mpi": "mpi", "deepspeed": "mpi", "mlx": "mpi", "flux": "flux", "jax": "jax", "xgboost": "xgboost"}
# Where a runtime keeps its replicated jobs, and each of them its pod.
JOBS = ("template", "spec", "replicatedJobs")
_POD = ("template", "spec", "template", "spec")
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
# The container that each step of a runtime must have.
_CONTAINERS = {"trainer": "node"} | {name: name for name in ("dataset-initializer", "model-initializer")}


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


def replicated_jobs(spec: Any, here: Where = ("spec",)) -> Iterator[tuple[Where, str, dict[str, Any]]]:
    """(path of the pod, the job's name, the pod) of a runtime's specification, or of a patch of one."""
    for number, job in enumerate(mappings(spec, *JOBS)):
        yield (*here, *JOBS, number, *_POD), str(job.get("name")), mapping(within(job, *_POD))


def pod_specs(runtime: Manifest | None) -> list[dict[str, Any]]:
    return [pod for _, _, pod in replicated_jobs(within(runtime, "spec"))]


def patches(manifest: Manifest, runtime: Manifest | None = None) -> Iterator[Pod]:
    """Parts that a TrainJob lays over its runtime's pods: runtimePatches, which older releases call otherwise."""
    spec = manifest.get("spec")
    known = None if runtime is None else _claim_templates(runtime) | set(volumes_of(*pod_specs(runtime)))
    for number, patch in enumerate(mappings(spec, "runtimePatches")):
        here = ("spec", "runtimePatches", number, "trainingRuntimeSpec")
        for where, name, pod in replicated_jobs(patch.get("trainingRuntimeSpec"), here):
            yield Pod(where, pod, name == "node", is_part=True, volumes_elsewhere=known)
    for number, patch in enumerate(mappings(spec, "podTemplateOverrides")):
        targets = [target.get("name") for target in mappings(patch, "targetJobs")]
        pod, where = mapping(patch.get("spec")), ("spec", "podTemplateOverrides", number, "spec")
        yield Pod(where, pod, "node" in targets, is_part=True, volumes_elsewhere=known)


def _claim_templates(runtime: Manifest) -> frozenset[str]:
    """Volumes for which a JobSet makes the claims itself; they have the templates' names."""
    policies = mappings(runtime, "spec", "template", "spec", "volumeClaimPolicies")
    templates = [template for policy in policies for template in mappings(policy, "templates")]
    return frozenset(str(within(template, "metadata", "name")) for template in templates)


def node_container(runtime: Manifest | None) -> dict[str, Any]:
    """The container of a runtime in which the training runs."""
    for _, name, pod in replicated_jobs(within(runtime, "spec")):
        for _, container in named(pod):
            if name == "node" and container.get("name") == "node":
                return container
    return {}


def mounts_of_node(job: Manifest, runtime: Manifest) -> dict[str, dict[str, Any]]:
    """What a runtime and a job's patches mount in the container of the training."""
    parts = [part.spec for part in patches(job)]
    made = {"volumes": [{"name": name, "persistentVolumeClaim": {}} for name in _claim_templates(runtime)]}
    patched = [container for part in parts for _, container in named(part) if container.get("name") == "node"]
    whole = [made, *pod_specs(runtime), *parts]
    found = [mounted(container, *whole) for container in [node_container(runtime), *patched]]
    return {path: volume for mounts in found for path, volume in mounts.items()}


def chooses_nodes_anywhere(job: Manifest | None, runtime: Manifest | None) -> bool:
    parts = [part.spec for part in patches(job or {})]
    return chooses_nodes(*parts, *pod_specs(runtime))


def pods(runtime: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Pod]:
    job = _job_of(runtime, others)
    trainer, parts = mapping(within(job, "spec", "trainer")), [part.spec for part in patches(job or {})]
    patched = [mounted(container) for part in parts for _, container in named(part)]
    for where, name, pod in replicated_jobs(runtime.get("spec")):
        yield Pod(
            where,
            pod,
            trains=name == "node",
            mounted_elsewhere=frozenset(path for mounts in patched for path in mounts),
            volumes_elsewhere=_claim_templates(runtime) | set(volumes_of(*parts)),
            command=words(trainer) or words(main_container(pod)),
            started_by=started_by(runtime),
            resources=mapping(trainer.get("resourcesPerNode")),
        )


def containers(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]:
    job = _job_of(manifest, others)
    trainer = mapping(within(job, "spec", "trainer"))
    for where, name, pod in replicated_jobs(manifest.get("spec")):
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
            trains = name == "node" and container.get("name") == "node" and not trainer.get("command")
            yield Container((*where, "containers", number), container, ranks, trains, needs_resources=False)
        yield from init_containers(pod, where)


def _webhook(spec: dict[str, Any]) -> Iterator[Problem]:
    here, jobs = ("spec", *JOBS), mappings(spec, *JOBS)
    # With MPI the ranks are started by a job of its own.
    known = ("node", "launcher") if "mpi" in mapping(spec.get("mlPolicy")) else ("node",)
    steps = [within(job, "template", "metadata", "labels", STEP) for job in jobs]
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
    if _CONTAINERS[step] not in [container.get("name") for container in mappings(job, *_POD, "containers")]:
        said = f"the container of the step {step} must be named {_CONTAINERS[step]}: rename it"
        yield Problem((*where, *_POD, "containers"), said)


def _backoff_limit(spec: dict[str, Any]) -> Iterator[Problem]:
    """Ranks can't come back alone: a pod that fails has to end its Job, and the JobSet starts all anew."""
    for number, job in enumerate(mappings(spec, *JOBS)):
        inner, where = mapping(within(job, "template", "spec")), ("spec", *JOBS, number)
        if job.get("name") == "node" and inner.get("backoffLimit") is None:
            yield hint(
                (*where, "template", "spec") if inner else where,
                "backoffLimit is missing, so a pod that fails is started 6 times again alone, while the others wait "
                "for it: write backoffLimit: 0 here, and failurePolicy: {maxRestarts: 3} beside replicatedJobs",
            )
