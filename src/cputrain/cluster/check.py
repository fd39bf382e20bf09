"""Reads any manifest and says what is wrong or will hurt, with the line and what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cputrain.cluster import (
    check_job,
    check_pod,
    check_references,
    core_objects,
    job_containers,
    manifest,
    schema,
    webhooks,
)
from cputrain.cluster.manifest import ERROR, WARNING, Document, YamlError, mapping, within
from cputrain.text_files import quoted

# What the operators' custom resource definitions are called.
DEFINITIONS = (
    "pytorchjobs.kubeflow.org",
    "mpijobs.kubeflow.org",
    "trainjobs.trainer.kubeflow.org",
    "trainingruntimes.trainer.kubeflow.org",
)


JOBS = ("PyTorchJob", "TrainJob", "MPIJob")


@dataclass(frozen=True, order=True)
class Finding:
    """One thing to mend: the line, the path within the document, a sentence with its remedy, and how grave it is."""

    line: int
    path: str
    sentence: str
    severity: str = ERROR


@dataclass(frozen=True)
class Unknown:
    """An object of a kind that no rule here knows: said, so that silence isn't taken for praise."""

    line: int
    kind: str

    @property
    def sentence(self) -> str:
        near = difflib.get_close_matches(self.kind.lower(), [kind.lower() for kind in _kinds()], n=1, cutoff=0.8)
        meant = [kind for kind in _kinds() if kind.lower() in near]
        return f"{self.kind} is not a kind that cputrain checks{f'; did you mean {meant[0]}?' if meant else '.'}"


def findings(text: str, schemas: schema.Schemas | None = None) -> list[Finding]:
    """All that is to be said about a file, in the order of its lines."""
    return of_files({"": text}, schemas)[""]


def of_files(texts: Mapping[str, str], schemas: schema.Schemas | None = None) -> dict[str, list[Finding]]:
    """The findings of each file. Files are seen together: a job's claim or runtime may stand in another one."""
    known = schemas or schema.of_operators()
    found: dict[str, list[Finding]] = {name: [] for name in texts}
    files: dict[str, list[Document]] = {}
    for name, text in texts.items():
        try:
            files[name] = manifest.parse(text)
        except YamlError as error:
            found[name].append(Finding(error.line, "", f"this is not YAML: {error}"))
        else:
            if not files[name]:
                found[name].append(Finding(1, "", "the file holds no Kubernetes object: was the right one given?"))
    values = [mapping(document.value) for documents in files.values() for document in documents]
    for name, documents in files.items():
        found[name] += [finding for document in documents for finding in _of_document(document, known, values)]
        found[name] += _of_claims(documents, values)
    return {name: sorted({_printable(row) for row in rows}) for name, rows in found.items()}


def _printable(finding: Finding) -> Finding:
    return replace(finding, path=quoted(finding.path), sentence=quoted(finding.sentence))


def unknown_kinds(text: str) -> list[Unknown]:
    try:
        documents = manifest.parse(text)
    except YamlError:
        return []
    kinds = [(document.line(("kind",)), mapping(document.value).get("kind")) for document in documents]
    return [Unknown(line, kind) for line, kind in kinds if isinstance(kind, str) and kind not in _kinds()]


def _kinds() -> list[str]:
    """All that is checked here."""
    return [*core_objects.VERSIONS, *(name.rpartition("/")[2] for name in schema.of_operators().kinds)]


def _of_document(document: Document, schemas: schema.Schemas, others: list[dict[str, Any]]) -> Iterator[Finding]:
    value = document.value
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("apiVersion", "kind")):
        said = "this is no Kubernetes object: apiVersion and kind are missing; write both"
        yield Finding(document.line(()), "", said)
        return
    known = schemas.problems(value, document.spelt)
    if known is None and value["kind"] in {name.rpartition("/")[2] for name in schemas.kinds}:
        versions = [name for name in schemas.kinds if name.endswith(f"/{value['kind']}")]
        wanted = " or ".join(name.rpartition("/")[0] for name in versions)
        said = f"{value['kind']} is served as {wanted}, found {value['apiVersion']}: write that"
        yield Finding(document.line(("apiVersion",)), "apiVersion", said)
    rules = (webhooks.problems, check_job.problems, check_pod.problems, check_references.problems)
    for problems in (known or (), core_objects.problems(value), *(rule(value, others) for rule in rules)):
        for problem in problems:
            path = ".".join(map(str, problem.where))
            yield Finding(document.line(problem.where), path, problem.sentence, problem.severity)


def _of_claims(documents: list[Document], values: list[dict[str, Any]]) -> Iterator[Finding]:
    """What only shows when a claim and the jobs that mount it are seen together."""
    jobs = [value for value in values if value.get("kind") in JOBS]
    here = [mapping(document.value).get("kind") for document in documents]
    for document in documents:
        value = mapping(document.value)
        if value.get("kind") != "PersistentVolumeClaim":
            continue
        if any(kind in JOBS for kind in here):
            sentence = "`kubectl delete -f` of this file deletes the volume with all that was trained: give it its own"
            yield Finding(document.line(("kind",)), "kind", sentence, WARNING)
        name = within(value, "metadata", "name")
        users = [job for job in jobs if str(name) in check_references.claims_of(job, values)]
        several = any(job_containers.pods_of(job, values) > 1 for job in users)
        if within(value, "spec", "accessModes") == ["ReadWriteOnce"] and several:
            sentence = "several pods on several nodes can't all mount a ReadWriteOnce volume: write ReadWriteMany"
            yield Finding(document.line(("spec", "accessModes")), "spec.accessModes", sentence, WARNING)


def of_cluster(kubectl: Any) -> schema.Schemas:
    """The schemas that a cluster has, instead of those that are shipped."""
    from cputrain.cluster import schema
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
    made = schema.compact(definitions)
    return schema.Schemas(made["kinds"], made["schemas"])
