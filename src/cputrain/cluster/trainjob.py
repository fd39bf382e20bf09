"""TrainJob, trainer.kubeflow.org/v1alpha1, with a runtime of its own: how pods look there, what runs here."""

from __future__ import annotations

from typing import Any

from cputrain.cluster import pod
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted

API = "trainer.kubeflow.org/v1alpha1"
# The operator finds the pods of the training by this label, and the container by the name `node`.
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def documents(job: Job) -> list[dict[str, Any]]:
    runtime = {"apiVersion": API, "kind": "TrainingRuntime", "metadata": pod.metadata(job), "spec": _runtime(job)}
    return [runtime, {"apiVersion": API, "kind": "TrainJob", "metadata": pod.metadata(job), "spec": _train_job(job)}]


def _runtime(job: Job) -> dict[str, Any]:
    container = {**pod.container(job, "node"), "resources": pod.resources(job)}
    pods = {"metadata": pod.pod_metadata(job), "spec": {"restartPolicy": "Never", **pod.spec(job, [container])}}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": Noted(dict(_STEP), "the operator looks for this label and the two names `node`")},
            "spec": {"backoffLimit": 0, "template": pods},
        },
    }
    return {
        "mlPolicy": {"numNodes": job.workers, "torch": {}},
        "template": {
            "spec": {
                "failurePolicy": {
                    "maxRestarts": Noted(job.backoff_limit, "all pods start anew together: ranks can't come back alone")
                },
                "replicatedJobs": [node],
            }
        },
    }


def _train_job(job: Job) -> dict[str, Any]:
    return {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": {
            "numNodes": job.workers,
            "numProcPerNode": Noted(
                job.sizing.processes, "a whole number; without it the operator starts one for every CPU requested"
            ),
            "command": list(pod.COMMAND),
            "args": pod.arguments(job),
            "env": pod.variables(job),
            "resourcesPerNode": pod.resources(job),
        },
    }
