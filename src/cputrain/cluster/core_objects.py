"""Kubernetes' own objects beside a job: ConfigMap, Secret, NetworkPolicy, PersistentVolumeClaim, made and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from posixpath import basename
from typing import Any

from cputrain import secrets_in_clear
from cputrain.cluster import names, pod, quantity
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted, Problem, Where, items, mapping, within

VERSIONS = {
    "ConfigMap": "v1",
    "Namespace": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Secret": "v1",
    "ServiceAccount": "v1",
}
_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")


def documents(job: Job) -> list[dict[str, Any]]:
    """What is created and deleted with the job. The volume's claim isn't: the trained model outlives the job."""
    made = {_script: job.script_text is not None, _secret: job.makes_token, _network_policy: job.network_policy}
    return [make(job) for make, wanted in made.items() if wanted]


def _script(job: Job) -> dict[str, Any]:
    """The script itself, for users who have no image of their own yet."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": pod.metadata(job, pod.script_map_name(job)),
        "data": {basename(job.script): job.script_text},
    }


def _secret(job: Job) -> dict[str, Any]:
    note = "drawn for this run: ranks show each other that they know it; read access to it is access to the run"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": pod.metadata(job, pod.token_name(job)),
        "stringData": {pod.TOKEN_KEY: Noted(job.token, note)},
    }


def _network_policy(job: Job) -> dict[str, Any]:
    own = {"matchLabels": pod.labels(job)}
    note = "only the job's own pods: torch's store and gloo have no authentication of their own"
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pod.metadata(job),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": Noted([{"from": [{"podSelector": own}]}], note),
        },
    }


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
    # Without the label of the job, by which `k8s delete` finds what belongs to it.
    metadata = {**pod.metadata(job, job.volume.claim), "labels": {"app.kubernetes.io/managed-by": "cputrain"}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    kind = str(manifest.get("kind"))
    if kind not in VERSIONS:
        return
    if manifest.get("apiVersion") != VERSIONS[kind]:
        said = f"{kind} is served as {VERSIONS[kind]}, found {manifest.get('apiVersion')}: write that"
        yield Problem(("apiVersion",), said)
    name = within(manifest, "metadata", "name")
    if isinstance(name, str):
        yield from _refused(names.subdomain, name, "the name", ("metadata", "name"))
    elif not within(manifest, "metadata", "generateName"):
        yield Problem(("metadata",), "the name is missing: write metadata: {name: …}")
    yield from _check_claim(mapping(manifest.get("spec"))) if kind == "PersistentVolumeClaim" else ()
    yield from _check_config_map(manifest) if kind == "ConfigMap" else ()


def _refused(check: Callable[[str, str], Any], value: str, what: str, where: Where) -> Iterator[Problem]:
    try:
        check(value, what)
    except ValueError as error:
        yield Problem(where, str(error).rstrip("."))


def _check_claim(spec: dict[str, Any]) -> Iterator[Problem]:
    modes, size = spec.get("accessModes"), within(spec, "resources", "requests", "storage")
    if not items(modes):
        yield Problem(("spec",), "accessModes is missing: write accessModes: [ReadWriteMany]")
    for number, mode in enumerate(items(modes)):
        if mode not in _MODES:
            said = f"there is no access mode {mode!r}: write one of {', '.join(_MODES)}"
            yield Problem(("spec", "accessModes", number), said)
    if size is None:
        yield Problem(("spec",), "resources.requests.storage, the volume's size, is missing: write it")
    else:
        where = ("spec", "resources", "requests", "storage")
        yield from _refused(quantity.bytes_of, str(size), "the volume's size", where)


def _check_config_map(manifest: dict[str, Any]) -> Iterator[Problem]:
    """A script that is put into a ConfigMap takes its tokens with it."""
    for key, text in mapping(manifest.get("data")).items():
        if not isinstance(text, str):
            said = "it must be a string: write it in quotes, or `|` after the key and the text below it"
            yield Problem(("data", key), said)
        elif secrets_in_clear.looks_secret(text):
            sentence = "a token stands in it in clear, for everyone who can read ConfigMaps: read it from a variable"
            yield Problem(("data", key), f"{sentence}, and set that from a Secret by secretKeyRef")
