"""All the manifests of a job: the job's own file, and the volume's."""

from __future__ import annotations

from typing import Any

from cputrain.cluster import core_objects, kinds, manifest
from cputrain.cluster.job import Job


def of_job(job: Job) -> list[dict[str, Any]]:
    """What `kubectl delete -f` may delete: the job, its runtime, its script, its token; never the volume."""
    return [*core_objects.documents(job), *kinds.JOBS[job.kind].documents(job)]


def of_volume(job: Job) -> list[dict[str, Any]]:
    return [core_objects.claim(job)] if job.volume and job.volume.size else []


def job_text(job: Job) -> str:
    heading = (
        "Made by `cputrain k8s render`; `cputrain k8s check` explains what an edit breaks.\n"
        "`$$(` in a value is Kubernetes' spelling of `$(`."
    )
    return manifest.to_text(of_job(job), heading)


def volume_text(job: Job) -> str:
    heading = "The volume, in a file of its own: deleting the job's file never deletes what was trained."
    return manifest.to_text(of_volume(job), heading)
