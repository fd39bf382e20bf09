"""The manifests of a job: Kubernetes' own objects beside it, the job itself, and in a file of its own the volume."""

from __future__ import annotations

from posixpath import basename
from typing import Any

from cputrain.cluster import kinds, manifest, pod
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted

Manifest = dict[str, Any]


def job_text(job: Job) -> str:
    heading = (
        "Made by `cputrain k8s render`; `cputrain k8s check` explains what an edit breaks.\n"
        "`$$(` in a value is Kubernetes' spelling of `$(`."
    )
    return manifest.to_text(of_job(job), heading)


def volume_text(job: Job) -> str:
    """Empty if the job makes no volume."""
    heading = "The volume, in a file of its own: deleting the job's file never deletes what was trained."
    return manifest.to_text(of_volume(job), heading) if of_volume(job) else ""


def of_job(job: Job) -> list[Manifest]:
    """What `kubectl delete -f` may delete: the job, its runtime, its script, its token; never the volume."""
    return [*objects_beside(job), *kinds.JOBS[job.kind].documents(job)]


def objects_beside(job: Job) -> list[Manifest]:
    made = {_script: job.script_text is not None, _secret: job.makes_token, _network_policy: job.network_policy}
    return [make(job) for make, wanted in made.items() if wanted]


def _script(job: Job) -> Manifest:
    """The script itself, for users who have no image of their own yet."""
    metadata = pod.metadata(job, pod.script_map_name(job))
    data = {basename(job.script): job.script_text}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _secret(job: Job) -> Manifest:
    note = "drawn for this run: ranks show each other that they know it; read access to it is access to the run"
    data = {pod.TOKEN_KEY: Noted(job.token, note)}
    metadata = pod.metadata(job, pod.token_name(job))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}


def _network_policy(job: Job) -> Manifest:
    own = {"matchLabels": pod.labels(job)}
    note = "only the job's own pods: torch's store and gloo have no authentication of their own"
    ingress = Noted([{"from": [{"podSelector": own}]}], note)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pod.metadata(job),
        "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def of_volume(job: Job) -> list[Manifest]:
    """The claim, if it is to be made. It isn't created and deleted with the job, which the trained model outlives."""
    if job.volume is None or not job.volume.size:
        return []
    mode: Any = (
        "ReadWriteOnce" if job.most_pods == 1 else Noted("ReadWriteMany", "workers on several nodes write to it")
    )
    spec: Manifest = {"accessModes": [mode], "resources": {"requests": {"storage": job.volume.size}}}
    if job.volume.storage_class is not None:
        spec["storageClassName"] = job.volume.storage_class
    # Without the label of the job, by which `k8s delete` finds what belongs to it.
    metadata = {**pod.metadata(job, job.volume.claim), "labels": {"app.kubernetes.io/managed-by": "cputrain"}}
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}]
