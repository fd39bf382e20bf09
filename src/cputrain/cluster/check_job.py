"""What will hurt in a job as a whole: process counts, restarts, and pods that are given no address to meet at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster import check_command, job_containers
from cputrain.cluster.loose_values import items, mapping, within
from cputrain.cluster.schema import Problem, Where


def problems(manifest: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Problem]:
    """`others`: the manifests beside it, of which one may be a TrainJob's runtime."""
    kind, spec = manifest.get("kind"), mapping(manifest.get("spec"))
    if kind == "PyTorchJob":
        yield from _pytorchjob(manifest, spec)
    elif kind == "TrainJob":
        yield from _trainjob(spec, job_containers.runtime_of(manifest, others))
    elif kind == "MPIJob":
        # Its launcher is a Job of Kubernetes' own, which has a limit by itself.
        often = "a launcher that fails starts again 6 times, each time from the beginning"
        yield from _restarts(spec, "mpiReplicaSpecs", often)
    elif kind in ("TrainingRuntime", "ClusterTrainingRuntime"):
        yield from _runtime(spec)


def _pytorchjob(manifest: dict[str, Any], spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "pytorchReplicaSpecs")
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    said = [check_command.processes_of_torchrun(container) for container in job_containers.containers(manifest)]
    counted = within(spec, "elasticPolicy", "nProcPerNode") is not None or any(map(_is_count, said))
    if spec.get("nprocPerNode") in (None, "auto", "cpu") and not counted:
        yield Problem(
            ("spec", "nprocPerNode") if "nprocPerNode" in spec else ("spec",),
            "nprocPerNode is missing, and the operator then starts one process for every CPU of the node, until memory "
            'ends: write nprocPerNode: "1", in quotes',
        )
    yield from _restarts(spec, "pytorchReplicaSpecs", "a job that fails starts again for ever")
    if "Master" in replicas:
        yield Problem(
            (*here, "Master"),
            "a Master makes the operator put an init container into every Worker that has no security context, so the "
            "restricted standard refuses the pods, and limits that differ from its requests, so they are never "
            "Guaranteed: use Workers only, with an elasticPolicy of minReplicas = maxReplicas = replicas",
        )
    elif job_containers.pods_of(manifest) > 1 and not isinstance(spec.get("elasticPolicy"), dict):
        workers = job_containers.pods_of(manifest)
        yield Problem(
            (*here, "Worker"),
            f"{workers} Workers without an elasticPolicy are given no address to meet at: write elasticPolicy with "
            f"rdzvBackend: c10d and minReplicas = maxReplicas = {workers}",
        )


def _is_count(text: str | None) -> bool:
    return text is not None and text.isdecimal()


def _restarts(spec: dict[str, Any], key: str, often: str) -> Iterator[Problem]:
    for name, replica in mapping(spec.get(key)).items():
        if "restartPolicy" in mapping(within(replica, "template", "spec")):
            used = mapping(replica).get("restartPolicy") or "Never"
            yield Problem(
                ("spec", key, name, "template", "spec", "restartPolicy"),
                f"restartPolicy of the pod is overwritten by that of the replica ({used}): remove it here, and write "
                "what is meant beside replicas",
            )
    if within(spec, "runPolicy", "backoffLimit") is None:
        where: Where = ("spec", "runPolicy") if "runPolicy" in spec else ("spec",)
        yield Problem(where, f"backoffLimit is missing, so {often}: write runPolicy: {{backoffLimit: 3}}")


def _trainjob(spec: dict[str, Any], runtime: dict[str, Any] | None) -> Iterator[Problem]:
    trainer = spec.get("trainer")
    if not isinstance(trainer, dict):
        said = (
            "trainer is missing, and the operator then sets no variable at all: ranks can't find each other; write it"
        )
        yield Problem(("spec",), said)
    elif trainer.get("numProcPerNode") is None and "mpi" not in mapping(within(runtime, "spec", "mlPolicy")):
        yield Problem(
            ("spec", "trainer"),
            "numProcPerNode is missing, and the operator then starts one process for every CPU requested: write "
            "numProcPerNode: 1",
        )


def _runtime(spec: dict[str, Any]) -> Iterator[Problem]:
    """Ranks can't come back alone: a pod that fails has to end its Job, and the JobSet starts all anew."""
    here: Where = ("spec", "template", "spec", "replicatedJobs")
    for number, job in enumerate(items(within(spec, "template", "spec", "replicatedJobs"))):
        inner = mapping(within(job, "template", "spec"))
        if mapping(job).get("name") == "node" and inner.get("backoffLimit") is None:
            yield Problem(
                (*here, number, "template", "spec") if inner else (*here, number),
                "backoffLimit is missing, so a pod that fails is started 6 times again alone, while the others wait "
                "for it: write backoffLimit: 0 here, and failurePolicy: {maxRestarts: 3} beside replicatedJobs",
            )
