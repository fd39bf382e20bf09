"""The claim for the volume: a file of its own, so that deleting the job's file never deletes the trained model."""

from __future__ import annotations

from typing import Any

from cputrain.cluster import pod
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted


def claim(job: Job) -> dict[str, Any]:
    assert job.volume and job.volume.size
    several = job.workers > 1 or (job.elastic is not None and job.elastic[1] > 1)
    mode: Any = "ReadWriteMany" if several else "ReadWriteOnce"
    spec: dict[str, Any] = {
        "accessModes": [Noted(mode, "workers on several nodes write to it") if several else mode],
        "resources": {"requests": {"storage": job.volume.size}},
    }
    if job.volume.storage_class is not None:
        spec["storageClassName"] = job.volume.storage_class
    metadata = {key: value for key, value in pod.metadata(job, job.volume.claim).items() if key != "labels"}
    labels = {"app.kubernetes.io/managed-by": "cputrain"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {**metadata, "labels": labels},
        "spec": spec,
    }
