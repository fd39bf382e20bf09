"""Reads any manifest and says what is wrong or will hurt, with the line and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cputrain import secrets_in_clear
from cputrain.cluster import check_pod, kinds, manifest, schema, syntax, trainjob
from cputrain.cluster.containers import Manifest
from cputrain.cluster.kubectl import Kubectl, Refused
from cputrain.cluster.manifest import (
    ERROR,
    WARNING,
    Document,
    Problem,
    Where,
    items,
    mapping,
    mappings,
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
# Kubernetes' own objects that may stand beside a job.
_VERSIONS = {
    "ConfigMap": "v1",
    "Namespace": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Secret": "v1",
    "ServiceAccount": "v1",
}
_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")


@dataclass(frozen=True, order=True)
class Finding:
    """One thing to fix: the line, the path within the document, a sentence with its remedy, and how grave it is."""

    line: int
    path: str
    sentence: str
    severity: str = ERROR


@dataclass(frozen=True)
class Unknown:
    """An object of a kind that no rule here knows. It is reported: without a finding it would seem to be right."""

    line: int
    kind: str

    @property
    def sentence(self) -> str:
        near = difflib.get_close_matches(
            self.kind.lower(), [kind.lower() for kind in _kinds_checked()], n=1, cutoff=0.8
        )
        meant = [kind for kind in _kinds_checked() if kind.lower() in near]
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
        rows += [*unread, *_of_claims(documents, values)]
        found[name] = sorted({replace(row, path=quoted(row.path), sentence=quoted(row.sentence)) for row in rows})
    return found


def _read(text: str) -> tuple[list[Document], list[Finding]]:
    """The documents of a file; a finding if it has none."""
    try:
        documents = manifest.parse(text)
    except YamlError as error:
        return [], [Finding(error.line, "", f"this is not YAML: {error}")]
    empty = Finding(1, "", "the file holds no Kubernetes object: was the right one given?")
    return documents, [] if documents else [empty]


def unknown_kinds(text: str) -> list[Unknown]:
    found = [(document.line(("kind",)), mapping(document.value).get("kind")) for document in _read(text)[0]]
    return [Unknown(line, kind) for line, kind in found if isinstance(kind, str) and kind not in _kinds_checked()]


def _kinds_checked() -> list[str]:
    return [*_VERSIONS, *(name.rpartition("/")[2] for name in schema.of_operators().kinds)]


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
    for problem in [*(known or ()), *problems(value, others)]:
        path = ".".join(map(str, problem.where))
        yield Finding(document.line(problem.where), path, problem.sentence, problem.severity)


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    """What is wrong beyond the schemas; `others`: the manifests beside it."""
    yield from _of_core_object(manifest)
    for rule in (kinds.problems, check_pod.problems, _out_of_namespace):
        yield from rule(manifest, others)


def _of_claims(documents: list[Document], values: list[dict[str, Any]]) -> Iterator[Finding]:
    """What only shows when a claim and the jobs that mount it are seen together."""
    jobs = [value for value in values if value.get("kind") in kinds.NAMES]
    has_job = any(within(document.value, "kind") in kinds.NAMES for document in documents)
    for document in documents:
        value = mapping(document.value)
        if value.get("kind") != "PersistentVolumeClaim":
            continue
        if has_job:
            sentence = "`kubectl delete -f` of this file deletes the volume with all that was trained: give it its own"
            yield Finding(document.line(("kind",)), "kind", sentence, WARNING)
        name = str(within(value, "metadata", "name"))
        users = [job for job in jobs if name in _claims_of(job, values)]
        several = any(kinds.pods_that_train(job, values) > 1 for job in users)
        if within(value, "spec", "accessModes") == ["ReadWriteOnce"] and several:
            sentence = "several pods on several nodes can't all mount a ReadWriteOnce volume: write ReadWriteMany"
            yield Finding(document.line(("spec", "accessModes")), "spec.accessModes", sentence, WARNING)


def _out_of_namespace(manifest: Manifest, others: Sequence[Manifest]) -> Iterator[Problem]:
    """What a job refers to by name, and finds only in its own namespace: claims, config maps, secrets, runtimes."""
    own = within(manifest, "metadata", "namespace")
    if manifest.get("kind") == "ClusterTrainingRuntime":
        return  # its pods run in the namespace of the job that names it
    for where, kind, name in _references(manifest, others):
        metadata = [mapping(other.get("metadata")) for other in others if other.get("kind") == kind]
        spaces = [each.get("namespace") for each in metadata if each.get("name") == name]
        if spaces and own not in spaces:
            yield _elsewhere(where, f"{kind} {name}", own, spaces[0])


def _claims_of(job: Manifest, others: Sequence[Manifest]) -> set[str]:
    """The claims that a job's pods mount, a TrainJob's runtime included."""
    runtime = runtime_of(job, others)
    parts = [job, runtime] if runtime else [job]
    rows = [row for part in parts for row in _references(part, others)]
    return {name for _, kind, name in rows if kind == "PersistentVolumeClaim"}


def _elsewhere(where: Where, called: str, own: Any, other: Any) -> Problem:
    if own is not None and other is not None:
        said = f"{called} is in namespace {other}, and nothing in {own} can use it: write the same namespace in both"
        return Problem(where, said)
    here, there = (f"in namespace {space}" if space else "in kubectl's namespace" for space in (own, other))
    return warning(where, f"{called} is {there}, and this is {here}: write the same namespace in both, or in neither")


def _references(manifest: Manifest, others: Sequence[Manifest]) -> Iterator[tuple[Where, str, str]]:
    """(place, kind, name) of everything that is referred to."""
    for pod in kinds.pods(manifest, others):
        for number, volume in enumerate(mappings(pod.spec, "volumes")):
            for (key, field), kind in _VOLUMES.items():
                name = within(volume, key, field)
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


def of_cluster(kubectl: Kubectl) -> schema.Schemas:
    """The schemas that a cluster has, instead of those that are shipped."""
    definitions = []
    for name in [*map(kinds.resource, kinds.JOBS.values()), *trainjob.RENDERED_BESIDE]:
        try:
            definitions.append(kubectl.json("get", "customresourcedefinitions", name))
        except Refused as refusal:
            if refusal.reason != "NotFound":
                raise
    if not definitions:
        raise ValueError("the cluster has none of Kubeflow's definitions: ask for an operator to be installed.")
    made = schema.compact(definitions)
    return schema.Schemas(made["kinds"], made["schemas"])


# --- Kubernetes' own objects ---------------------------------------------------------------------------------------


def _of_core_object(manifest: Manifest) -> Iterator[Problem]:
    kind = str(manifest.get("kind"))
    if kind not in _VERSIONS:
        return
    if manifest.get("apiVersion") != _VERSIONS[kind]:
        said = f"{kind} is served as {_VERSIONS[kind]}, found {manifest.get('apiVersion')}: write that"
        yield Problem(("apiVersion",), said)
    name = within(manifest, "metadata", "name")
    if isinstance(name, str):
        yield from _refused(syntax.subdomain, name, "the name", ("metadata", "name"))
    elif not within(manifest, "metadata", "generateName"):
        yield Problem(("metadata",), "the name is missing: write metadata: {name: …}")
    yield from _of_claim(mapping(manifest.get("spec"))) if kind == "PersistentVolumeClaim" else ()
    yield from _of_config_map(manifest) if kind == "ConfigMap" else ()


def _refused(check: Callable[[str, str], Any], value: str, what: str, where: Where) -> Iterator[Problem]:
    try:
        check(value, what)
    except ValueError as error:
        yield Problem(where, str(error).rstrip("."))


def _of_claim(spec: dict[str, Any]) -> Iterator[Problem]:
    modes, size = items(spec.get("accessModes")), within(spec, "resources", "requests", "storage")
    if not modes:
        yield Problem(("spec",), "accessModes is missing: write accessModes: [ReadWriteMany]")
    for number, mode in enumerate(modes):
        if mode not in _MODES:
            said = f"there is no access mode {mode!r}: write one of {', '.join(_MODES)}"
            yield Problem(("spec", "accessModes", number), said)
    if size is None:
        yield Problem(("spec",), "resources.requests.storage, the volume's size, is missing: write it")
    else:
        where = ("spec", "resources", "requests", "storage")
        yield from _refused(syntax.bytes_of, str(size), "the volume's size", where)


def _of_config_map(manifest: Manifest) -> Iterator[Problem]:
    """A script that is put into a ConfigMap takes its tokens with it."""
    for key, text in mapping(manifest.get("data")).items():
        if not isinstance(text, str):
            said = "it must be a string: write it in quotes, or `|` after the key and the text below it"
            yield Problem(("data", key), said)
        elif secrets_in_clear.looks_secret(text):
            sentence = "a token stands in it in clear, for everyone who can read ConfigMaps: read it from a variable"
            yield Problem(("data", key), f"{sentence}, and set that from a Secret by secretKeyRef")
