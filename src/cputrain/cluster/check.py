"""Reads any manifest and says what is wrong or will hurt, with the line and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cputrain.cluster import check_job, check_pod, job_containers, manifest_reader, schema, secrets_in_clear, webhooks
from cputrain.cluster.loose_values import mapping, within
from cputrain.cluster.manifest_reader import Document, YamlError

# What the operators' custom resource definitions are called.
DEFINITIONS = (
    "pytorchjobs.kubeflow.org",
    "mpijobs.kubeflow.org",
    "trainjobs.trainer.kubeflow.org",
    "trainingruntimes.trainer.kubeflow.org",
)


@dataclass(frozen=True, order=True)
class Finding:
    """One thing to mend: the line, the path within the document, and a sentence with its remedy."""

    line: int
    path: str
    sentence: str


def findings(text: str, schemas: schema.Schemas | None = None) -> list[Finding]:
    """All that is to be said about a file, in the order of its lines."""
    try:
        documents = manifest_reader.parse(text)
    except YamlError as error:
        return [Finding(error.line, "", f"this is not YAML: {error}")]
    if not documents:
        return [Finding(1, "", "the file holds no Kubernetes object")]
    known = schemas or schema.of_operators()
    values = [mapping(document.value) for document in documents]
    found = [finding for document in documents for finding in _of_document(document, known, values)]
    found += _of_file(documents, values)
    return sorted(set(found))


def unchecked_kinds(text: str) -> list[str]:
    """Kinds in a file that no rule here knows: said, so that silence isn't taken for praise."""
    try:
        values = [document.value for document in manifest_reader.parse(text)]
    except YamlError:
        return []
    known = {"ConfigMap", "PersistentVolumeClaim", "Secret", "Namespace"}
    shipped = {name.rpartition("/")[2] for name in schema.of_operators().kinds}
    kinds = [value.get("kind") for value in values if isinstance(value, dict)]
    return sorted({kind for kind in kinds if isinstance(kind, str)} - known - shipped)


def _of_document(document: Document, schemas: schema.Schemas, others: list[dict[str, Any]]) -> Iterator[Finding]:
    value = document.value
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("apiVersion", "kind")):
        yield Finding(document.line(()), "", "this is no Kubernetes object: apiVersion and kind are missing")
        return
    known = schemas.problems(value)
    if known is None and value["kind"] in {name.rpartition("/")[2] for name in schemas.kinds}:
        versions = [name for name in schemas.kinds if name.endswith(f"/{value['kind']}")]
        wanted = " or ".join(name.rpartition("/")[0] for name in versions)
        yield Finding(document.line(("apiVersion",)), "apiVersion", f"{value['kind']} is served as {wanted}")
    hurting = (check_job.problems(value, others), check_pod.problems(value, others), _in_config_map(value))
    for problems in (known or (), webhooks.problems(value), *hurting):
        for problem in problems:
            path = ".".join(map(str, problem.where))
            yield Finding(document.line(problem.where), path, problem.sentence)


def _in_config_map(value: dict[str, Any]) -> Iterator[schema.Problem]:
    """A script that is put into a ConfigMap takes its tokens with it."""
    for key, text in mapping(value.get("data")).items() if value["kind"] == "ConfigMap" else ():
        if isinstance(text, str) and secrets_in_clear.looks_secret(text):
            sentence = "a token stands in it in clear, for everyone who can read ConfigMaps: read it from a variable"
            yield schema.Problem(("data", key), f"{sentence}, and set that from a Secret by secretKeyRef")


def _of_file(documents: list[Document], values: list[dict[str, Any]]) -> Iterator[Finding]:
    """What only shows when the documents of a file are seen together."""
    jobs = [value for value in values if value.get("kind") in ("PyTorchJob", "TrainJob", "MPIJob")]
    for document, value in zip(documents, values, strict=True):
        if value.get("kind") == "PersistentVolumeClaim":
            if jobs:
                sentence = (
                    "`kubectl delete -f` of this file deletes the volume with all that was trained: give it its own"
                )
                yield Finding(document.line(("kind",)), "kind", sentence)
            several = any(job_containers.pods_of(job, values) > 1 for job in jobs)
            if within(value, "spec", "accessModes") == ["ReadWriteOnce"] and several:
                sentence = "several pods on several nodes can't all mount a ReadWriteOnce volume: write ReadWriteMany"
                yield Finding(document.line(("spec", "accessModes")), "spec.accessModes", sentence)


def of_cluster(kubectl: Any) -> schema.Schemas:
    """The schemas that a cluster has, instead of those that are shipped."""
    from cputrain.cluster import derive_schemas
    from cputrain.cluster.kubectl import Refused

    definitions = []
    for name in DEFINITIONS:
        try:
            definitions.append(json.loads(kubectl.run("get", "customresourcedefinitions", name, "--output=json")))
        except Refused as refusal:
            if refusal.reason != "NotFound":
                raise
    if not definitions:
        raise ValueError("the cluster has none of Kubeflow's definitions: ask for an operator to be installed.")
    made = derive_schemas.compact(definitions)
    return schema.Schemas(made["kinds"], made["schemas"])
