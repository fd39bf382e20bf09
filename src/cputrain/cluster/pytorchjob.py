"""PyTorchJob, kubeflow.org/v1: workers only, with an elastic policy even where the size is fixed."""

from __future__ import annotations

from typing import Any

from cputrain.cluster import pod
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted


def documents(job: Job) -> list[dict[str, Any]]:
    spec = {
        "nprocPerNode": Noted(
            str(job.sizing.processes), "a string; without it the operator starts a process for every CPU of the node"
        ),
        "elasticPolicy": _elastic_policy(job),
        "runPolicy": {
            "cleanPodPolicy": Noted(
                "None", "the first worker to end makes the job succeed; others may still be saving, and logs stay"
            ),
            "backoffLimit": Noted(job.backoff_limit, "without it a job that fails starts again for ever"),
        },
        "pytorchReplicaSpecs": Noted(
            {"Worker": _worker(job)},
            "no Master: the init container that it brings is neither restricted nor Guaranteed",
        ),
    }
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": pod.metadata(job), "spec": spec}]


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
        "restartPolicy": Noted("OnFailure", "here, not in the pod's spec, where the operator overwrites it"),
        "template": {"metadata": pod.pod_metadata(job), "spec": pod.spec(job, [container])},
    }
