"""Creates and deletes what a job consists of. All is tried without effect first, so that nothing is created by half."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cputrain.cluster import check, cluster_job, kinds, manifest
from cputrain.cluster.kubectl import Kubectl, Refused
from cputrain.cluster.manifest import ERROR, WARNING, within

Say = Callable[[str], None]


def documents_of(texts: dict[str, str], warn: Say) -> list[dict[str, Any]]:
    """The objects of checked files. The first error is the refusal; warnings are said, hints are left to `check`."""
    found: list[dict[str, Any]] = []
    for name, findings in check.of_files(texts).items():
        errors = [finding for finding in findings if finding.severity == ERROR]
        if errors:
            more = f" (and {len(errors) - 1} more: cputrain k8s check {name})" if len(errors) > 1 else ""
            raise ValueError(f"{name}, line {errors[0].line}: {errors[0].sentence}{more}.")
        for finding in findings:
            if finding.severity == WARNING:
                warn(f"{name}, line {finding.line}: warning: {finding.sentence}.")
        found += [document.value for document in manifest.parse(texts[name])]
    # A volume, a script and a token come before the pods that need them, and a policy before the ports that it guards.
    order = {"PersistentVolumeClaim": 0, "ConfigMap": 1, "Secret": 1, "NetworkPolicy": 1, "TrainingRuntime": 2}
    return sorted(found, key=lambda document: order.get(document["kind"], 3))


def submit(kubectl: Kubectl, documents: list[dict[str, Any]], say: Say) -> list[str]:
    """Creates what isn't there yet, and returns what was created. A volume that exists is used as it is."""
    missing = [document for document in documents if not _is_kept_volume(kubectl, document, say)]
    for document in missing:
        _create(kubectl, document, "--dry-run=server")
    created: list[str] = []
    for document in missing:
        try:
            _create(kubectl, document)
        except Refused as refusal:
            before = f" Created before that: {', '.join(created)}." if created else ""
            raise Refused(refusal.reason, f"{refusal}{before}") from None
        created.append(called(document))
        say(f"created {called(document)}")
    return created


def called(document: dict[str, Any]) -> str:
    name = within(document, "metadata", "name") or within(document, "metadata", "generateName")
    return f"{document['kind']} {name}"


def _is_kept_volume(kubectl: Kubectl, document: dict[str, Any], say: Say) -> bool:
    namespace = within(document, "metadata", "namespace")
    where = [f"--namespace={namespace}"] if namespace else []
    is_claim = document["kind"] == "PersistentVolumeClaim"
    if not is_claim or not cluster_job.has_claim(kubectl, document["metadata"]["name"], *where):
        return False
    say(f"{called(document)} exists already, and is used with what it holds")
    return True


def _create(kubectl: Kubectl, document: dict[str, Any], *words: str) -> None:
    try:
        # JSON: what arrives is the data, for any reader.
        kubectl.run("create", "--filename=-", "--output=name", *words, given=json.dumps(document))
    except Refused as refusal:
        name = called(document)
        if refusal.reason == "AlreadyExists":
            sentence = f"{name} exists already: delete it (cputrain k8s delete), or choose another --name."
            raise Refused(refusal.reason, sentence) from None
        if "no matches for kind" in str(refusal):
            sentence = f"the cluster doesn't know {document['kind']}: its operator isn't installed; try --kind auto."
            raise Refused("NoKind", sentence) from None
        raise


def delete(kubectl: Kubectl, name: str, with_data: bool, say: Say, warn: Say) -> None:
    """The job, and what was rendered with it; the volume claims only `with_data`."""
    job = cluster_job.find(kubectl, name)
    named = sorted({claim for pod in job.pod_specs(kubectl) for claim, _ in cluster_job.claims(pod)})
    claims = [claim for claim in named if cluster_job.has_claim(kubectl, claim)]
    kubectl.run("delete", kinds.resource(job.module), name)
    ours = f"--selector=app.kubernetes.io/managed-by=cputrain,app.kubernetes.io/instance={name}"
    kubectl.run("delete", ",".join(["configmaps", *job.module.RENDERED_BESIDE]), ours)
    say(f"deleted {job.kind} {name}")
    for resource in ("secrets", "networkpolicies.networking.k8s.io"):
        _delete_if_allowed(kubectl, resource, ours, warn)
    for claim in claims:
        if with_data:
            kubectl.run("delete", "persistentvolumeclaims", claim)
        said = f"the volume claim {claim}"
        say(f"deleted {said} with its data" if with_data else f"{said} stays with its data")


def _delete_if_allowed(kubectl: Kubectl, resource: str, ours: str, warn: Say) -> None:
    """A user who may not delete these may not create them either, so the job had none."""
    try:
        kubectl.run("delete", resource, ours)
    except Refused as refusal:
        if refusal.reason not in ("Forbidden", "NotFound"):
            raise
        warn(f"{resource} were not looked for: {refusal}")
