"""What will hurt in a job as a whole: restarts, and pods that are given no address to meet at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster import check_processes, job_containers
from cputrain.cluster.manifest import Problem, Where, hint, items, mapping, warning, within


def problems(manifest: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Problem]:
    """`others`: the manifests beside it, of which one may be a TrainJob's runtime."""
    kind, spec = manifest.get("kind"), mapping(manifest.get("spec"))
    yield from check_processes.problems(manifest, others)
    if kind == "PyTorchJob":
        yield from _pytorchjob(manifest, spec)
    elif kind == "MPIJob":
        # Its launcher is a Job of Kubernetes' own, which has a limit by itself.
        often = "a launcher that fails starts again 6 times, each time from the beginning"
        yield from _restarts(spec, "mpiReplicaSpecs", often)
    elif kind in ("TrainingRuntime", "ClusterTrainingRuntime"):
        yield from _runtime(spec)


def _pytorchjob(manifest: dict[str, Any], spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "pytorchReplicaSpecs")
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    yield from _restarts(spec, "pytorchReplicaSpecs", "a job that fails starts again for ever")
    if "Master" in replicas:
        yield hint(
            (*here, "Master"),
            "a Master makes the operator put an init container into every Worker that has no security context, so the "
            "restricted standard refuses the pods, and limits that differ from its requests, so they are never "
            "Guaranteed: use Workers only, with an elasticPolicy of minReplicas = maxReplicas = replicas",
        )
    elif job_containers.pods_of(manifest) > 1 and not isinstance(spec.get("elasticPolicy"), dict):
        workers = job_containers.pods_of(manifest)
        yield warning(
            (*here, "Worker"),
            f"{workers} Workers without an elasticPolicy are given no address to meet at: write elasticPolicy with "
            f"rdzvBackend: c10d and minReplicas = maxReplicas = {workers}",
        )


def _restarts(spec: dict[str, Any], key: str, often: str) -> Iterator[Problem]:
    replicas = mapping(spec.get(key))
    for name, replica in replicas.items():
        if "restartPolicy" in mapping(within(replica, "template", "spec")):
            used = mapping(replica).get("restartPolicy") or ("OnFailure" if key == "pytorchReplicaSpecs" else "Never")
            yield hint(
                ("spec", key, name, "template", "spec", "restartPolicy"),
                f"restartPolicy of the pod is overwritten by that of the replica ({used}): remove it here, and write "
                "what is meant beside replicas",
            )
    never = bool(replicas) and all(mapping(replica).get("restartPolicy") == "Never" for replica in replicas.values())
    # A Job makes new pods in place of those that failed, whatever the policy of the pod.
    forever = not never or key == "mpiReplicaSpecs"
    if within(spec, "runPolicy", "backoffLimit") is None and forever:
        where: Where = ("spec", "runPolicy") if "runPolicy" in spec else ("spec",)
        yield hint(where, f"backoffLimit is missing, so {often}: write runPolicy: {{backoffLimit: 3}}")


def _runtime(spec: dict[str, Any]) -> Iterator[Problem]:
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
