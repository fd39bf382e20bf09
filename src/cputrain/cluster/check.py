"""Reads any manifest and says what is wrong or will hurt, with the line and what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cputrain.cluster import check_pod, core_objects, kinds, manifest, schema, trainjob
from cputrain.cluster.containers import Manifest
from cputrain.cluster.manifest import (
    ERROR,
    WARNING,
    Document,
    Problem,
    Where,
    items,
    mapping,
    warning,
    within,
)
from cputrain.cluster.training_runtime import runtime_of
from cputrain.text_files import YamlError, quoted

# In which field of a volume the name of which kind stands.
_VOLUMES = {
    ("persistentVolumeClaim", "claimName"): "PersistentVolumeClaim",
    ("configMap", "name"): "ConfigMap",
    ("secret", "secretName"): "Secret",
}
_VARIABLES = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}


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
    read = {name: _read(text) for name, text in texts.items()}
    values = [mapping(document.value) for documents, _ in read.values() for document in documents]
    found: dict[str, list[Finding]] = {}
    for name, (documents, unread) in read.items():
        rows = [finding for document in documents for finding in _of_document(document, known, values)]
        found[name] = sorted(set(map(_printable, [*unread, *rows, *_of_claims(documents, values)])))
    return found


def _read(text: str) -> tuple[list[Document], list[Finding]]:
    """The documents of a file; a finding if it has none."""
    try:
        documents = manifest.parse(text)
    except YamlError as error:
        return [], [Finding(error.line, "", f"this is not YAML: {error}")]
    empty = Finding(1, "", "the file holds no Kubernetes object: was the right one given?")
    return documents, [] if documents else [empty]


def _printable(finding: Finding) -> Finding:
    return replace(finding, path=quoted(finding.path), sentence=quoted(finding.sentence))


def unknown_kinds(text: str) -> list[Unknown]:
    found = [(document.line(("kind",)), mapping(document.value).get("kind")) for document in _read(text)[0]]
    return [Unknown(line, kind) for line, kind in found if isinstance(kind, str) and kind not in _kinds()]


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
    versions = [name for name in schemas.kinds if name.rpartition("/")[2] == value["kind"]]
    if known is None and versions:
        wanted = " or ".join(name.rpartition("/")[0] for name in versions)
        said = f"{value['kind']} is served as {wanted}, found {value['apiVersion']}: write that"
        yield Finding(document.line(("apiVersion",)), "apiVersion", said)
    rules = (kinds.problems, check_pod.problems, references)
    for problems in (known or (), core_objects.problems(value), *(rule(value, others) for rule in rules)):
        for problem in problems:
            path = ".".join(map(str, problem.where))
            yield Finding(document.line(problem.where), path, problem.sentence, problem.severity)


def _of_claims(documents: list[Document], values: list[dict[str, Any]]) -> Iterator[Finding]:
    """What only shows when a claim and the jobs that mount it are seen together."""
    jobs = [value for value in values if value.get("kind") in kinds.NAMES]
    has_job = any(mapping(document.value).get("kind") in kinds.NAMES for document in documents)
    claims = [each for each in documents if mapping(each.value).get("kind") == "PersistentVolumeClaim"]
    for document in claims:
        value = mapping(document.value)
        if has_job:
            sentence = "`kubectl delete -f` of this file deletes the volume with all that was trained: give it its own"
            yield Finding(document.line(("kind",)), "kind", sentence, WARNING)
        name = str(within(value, "metadata", "name"))
        users = [job for job in jobs if name in _claims_of(job, values)]
        several = any(kinds.pods_of(job, values) > 1 for job in users)
        if within(value, "spec", "accessModes") == ["ReadWriteOnce"] and several:
            sentence = "several pods on several nodes can't all mount a ReadWriteOnce volume: write ReadWriteMany"
            yield Finding(document.line(("spec", "accessModes")), "spec.accessModes", sentence, WARNING)


def references(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    """What a job refers to by name, and finds only in its own namespace: claims, config maps, secrets, runtimes."""
    own = within(manifest, "metadata", "namespace")
    if manifest.get("kind") == "ClusterTrainingRuntime":
        return  # its pods run in the namespace of the job that names it
    for where, kind, name in _references(manifest, others):
        found = [other for other in others if (other.get("kind"), within(other, "metadata", "name")) == (kind, name)]
        spaces = [within(other, "metadata", "namespace") for other in found]
        if found and own not in spaces:
            yield _elsewhere(where, f"{kind} {name}", own, spaces[0])


def _claims_of(job: Manifest, others: Sequence[Manifest]) -> set[str]:
    """The claims that a job's pods mount, a TrainJob's runtime included."""
    runtime = runtime_of(job, others)
    parts = [job, runtime] if runtime else [job]
    rows = [row for part in parts for row in _references(part, others)]
    return {name for _, kind, name in rows if kind == "PersistentVolumeClaim"}


def _elsewhere(where: Where, called: str, own: Any, other: Any) -> Problem:
    if own is None or other is None:
        here, there = (f"in namespace {space}" if space else "in kubectl's namespace" for space in (own, other))
        said = f"{called} is {there}, and this is {here}: write the same namespace in both, or in neither"
        return warning(where, said)
    said = f"{called} is in namespace {other}, and nothing in {own} can use it: write the same namespace in both"
    return Problem(where, said)


def _references(manifest: Manifest, others: Sequence[Manifest]) -> Iterator[tuple[Where, str, str]]:
    """(place, kind, name) of everything that is referred to."""
    for pod in kinds.pods(manifest, others):
        for number, volume in enumerate(map(mapping, items(pod.spec.get("volumes")))):
            for (key, field), kind in _VOLUMES.items():
                name = mapping(volume.get(key)).get(field)
                if isinstance(name, str):
                    yield (*pod.where, "volumes", number, key, field), kind, name
    for container in kinds.containers(manifest, others):
        for where, row in container.variables:
            for key, kind in _VARIABLES.items():
                name = within(row, "valueFrom", key, "name")
                if isinstance(name, str):
                    yield (*where, "valueFrom", key, "name"), kind, name
    reference = mapping(within(manifest, "spec", "runtimeRef"))
    if reference.get("kind") == "TrainingRuntime" and isinstance(reference.get("name"), str):
        yield ("spec", "runtimeRef", "name"), "TrainingRuntime", reference["name"]


def of_cluster(kubectl: Any) -> schema.Schemas:
    """The schemas that a cluster has, instead of those that are shipped."""
    from cputrain.cluster import schema
    from cputrain.cluster.kubectl import Refused

    definitions = []
    for name in [*map(kinds.resource, kinds.JOBS.values()), *trainjob.RENDERED_BESIDE]:
        try:
            definitions.append(json.loads(kubectl.run("get", "customresourcedefinitions", name, "--output=json")))
        except Refused as refusal:
            if refusal.reason != "NotFound":
                raise
    if not definitions:
        raise ValueError("the cluster has none of Kubeflow's definitions: ask for an operator to be installed.")
    made = schema.compact(definitions)
    return schema.Schemas(made["kinds"], made["schemas"])
