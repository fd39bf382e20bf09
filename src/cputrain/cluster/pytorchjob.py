"""PyTorchJob, kubeflow.org/v1: workers only, with an elastic policy even where the size is fixed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster import pod
from cputrain.cluster.check_command import counts_by_torchrun
from cputrain.cluster.containers import Container, Manifest, check_replicas, check_restarts, of_replicas, replicas_of
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted, Problem, Where, hint, mapping, warning, within

API, KIND = "kubeflow.org/v1", "PyTorchJob"
POD_LABEL = "training.kubeflow.org/job-name"
ONE_LOG = False
RENDERED_BESIDE: tuple[str, ...] = ()
PODS: tuple[tuple[str, ...], ...] = (("elasticPolicy", "minReplicas"), ("pytorchReplicaSpecs", "Worker", "replicas"))
PROCESSES: tuple[str, ...] = ("nprocPerNode",)
_BACKENDS = ("c10d", "etcd", "etcd-v2", "static")


def documents(job: Job) -> list[dict[str, Any]]:
    counted = "a string; without it the operator starts a process for every CPU of the node"
    kept = "the first worker to end makes the job succeed; others may still be saving, and logs stay"
    ended = "without it a job that fails starts again for ever"
    alone = "no Master: the init container that it brings is neither restricted nor Guaranteed"
    spec = {
        "nprocPerNode": Noted(str(job.sizing.processes), counted),
        "elasticPolicy": _elastic_policy(job),
        "runPolicy": {"cleanPodPolicy": Noted("None", kept), "backoffLimit": Noted(job.backoff_limit, ended)},
        "pytorchReplicaSpecs": Noted({"Worker": _worker(job)}, alone),
    }
    return [{"apiVersion": API, "kind": KIND, "metadata": pod.metadata(job), "spec": spec}]


def _elastic_policy(job: Job) -> Any:
    least, most = job.elastic or (job.workers, job.workers)
    fixed = "least = most = workers: training starts when all are there, never with only those that came first"
    policy = {
        "rdzvBackend": "c10d",
        "rdzvId": Noted(f"{job.name}-{job.rendezvous}", "of this job alone: two jobs never meet"),
        "minReplicas": least,
        "maxReplicas": most,
        "maxRestarts": job.max_restarts,
        "rdzvConf": Noted(
            [{"key": "join_timeout", "value": "3600"}, {"key": "read_timeout", "value": "900"}],
            "seconds: pods come up when images are pulled and nodes are free, not all at once",
        ),
    }
    return policy if job.elastic else Noted(policy, fixed)


def _worker(job: Job) -> dict[str, Any]:
    container = {
        **pod.container(job, "pytorch"),
        "command": list(pod.COMMAND),
        "args": pod.arguments(job),
        "env": pod.variables(job),
        "resources": pod.resources(job),
    }
    return {
        "replicas": job.workers,
        "restartPolicy": Noted("ExitCode", "143, of ranks that were told to end, is started anew; 1 to 127 is final"),
        "template": pod.template(job, container),
    }


def pods_with_logs(spec: dict[str, Any], pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """torch's rendezvous numbers machines by their addresses, compared as text, whatever the pods are called."""
    if isinstance(spec.get("elasticPolicy"), dict) and all(within(pod, "status", "podIP") for pod in pods):
        return sorted(pods, key=lambda pod: str(within(pod, "status", "podIP")))
    return pods


def containers(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]:
    return of_replicas(manifest, "pytorchReplicaSpecs", "torch")


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    spec = mapping(manifest.get("spec"))
    yield from _webhook(spec)
    yield from _restarts_and_rendezvous(manifest, spec)
    yield from _uncounted(spec, [each for each in containers(manifest) if each.trains])


def _webhook(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    here: Where = ("spec", "pytorchReplicaSpecs")
    yield from check_replicas(spec, "pytorchReplicaSpecs", {"Master", "Worker"}, "pytorch")
    if "Master" in replicas and mapping(replicas["Master"]).get("replicas") != 1:
        yield Problem((*here, "Master", "replicas"), "there must be exactly one Master: write replicas: 1")
    if "elasticPolicy" in spec:
        policy = mapping(spec.get("elasticPolicy"))
        yield from _check_elastic_policy(policy, replicas)
        if policy.get("nProcPerNode") is not None and spec.get("nprocPerNode") is not None:
            said = "nProcPerNode can't be used together with nprocPerNode: remove it here"
            yield Problem(("spec", "elasticPolicy", "nProcPerNode"), said)
    process = spec.get("nprocPerNode")
    if isinstance(process, str) and process not in ("auto", "cpu", "gpu") and not re.fullmatch(r"[1-9]\d*", process):
        yield Problem(("spec", "nprocPerNode"), f"nprocPerNode must be a number in quotes, found {process!r}")


def _check_elastic_policy(policy: dict[str, Any], replicas: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "elasticPolicy")
    if "Worker" not in replicas:
        yield Problem(here, "an elasticPolicy needs a Worker among pytorchReplicaSpecs: add it")
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield Problem((*here, "minReplicas"), f"minReplicas {least} is more than maxReplicas {most}: swap them")
    count = mapping(replicas.get("Worker")).get("replicas")
    if isinstance(count, int) and isinstance(most, int) and count > most:
        said = f"maxReplicas {most} is less than the Worker's {count} replicas: raise it"
        yield warning((*here, "maxReplicas"), said)
    backend = policy.get("rdzvBackend")
    if isinstance(backend, str) and backend not in _BACKENDS:
        yield Problem((*here, "rdzvBackend"), f"torchrun knows no rendezvous backend {backend!r}: write c10d")
    elif str(backend).startswith("etcd") and not policy.get("rdzvHost"):
        said = f"rdzvBackend {backend} without rdzvHost looks for an etcd server in the first Worker, which has none"
        yield Problem((*here, "rdzvBackend"), f"{said}: write c10d, or the server's name as rdzvHost")


def _restarts_and_rendezvous(manifest: dict[str, Any], spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "pytorchReplicaSpecs")
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    yield from check_restarts(spec, "pytorchReplicaSpecs", "a job that fails starts again for ever")
    if "Master" in replicas:
        yield hint(
            (*here, "Master"),
            "a Master makes the operator put an init container into every Worker that has no security context, so the "
            "restricted standard refuses the pods, and limits that differ from its requests, so they are never "
            "Guaranteed: use Workers only, with an elasticPolicy of minReplicas = maxReplicas = replicas",
        )
    elif (workers := replicas_of(manifest)) > 1 and not isinstance(spec.get("elasticPolicy"), dict):
        said = f"{workers} Workers without an elasticPolicy are given no address to meet at"
        remedy = f"write elasticPolicy with rdzvBackend: c10d and minReplicas = maxReplicas = {workers}"
        yield warning((*here, "Worker"), f"{said}: {remedy}")


def _uncounted(spec: dict[str, Any], containers: list[Container]) -> Iterator[Problem]:
    """The operator then sets `auto`, which torchrun, and only torchrun, takes for the node's GPUs or else its CPUs."""
    counted = within(spec, "elasticPolicy", "nProcPerNode") is not None
    counting = [each for each in containers if counts_by_torchrun(each) and not each.ranks.has_gpus]
    if counting and spec.get("nprocPerNode") in (None, "auto", "cpu") and not counted:
        said = "nprocPerNode is missing, and torchrun then starts one process for every CPU of the node"
        where = ("spec", "nprocPerNode") if "nprocPerNode" in spec else ("spec",)
        yield warning(where, f'{said}, until memory ends: write nprocPerNode: "1", in quotes')
