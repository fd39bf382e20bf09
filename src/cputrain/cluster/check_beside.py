"""Kubernetes' own objects that stand beside a job: their version, their name, and what of them a job depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cputrain import secrets_in_clear
from cputrain.cluster import names, quantity
from cputrain.cluster.manifest import Problem, items, mapping, within

VERSIONS = {
    "ConfigMap": "v1",
    "Namespace": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Secret": "v1",
    "ServiceAccount": "v1",
}
_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")


def problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    kind = str(manifest.get("kind"))
    if kind not in VERSIONS:
        return
    if manifest.get("apiVersion") != VERSIONS[kind]:
        said = f"{kind} is served as {VERSIONS[kind]}, found {manifest.get('apiVersion')}: write that"
        yield Problem(("apiVersion",), said)
    name = within(manifest, "metadata", "name")
    if isinstance(name, str):
        try:
            names.subdomain(name, "the name")
        except ValueError as error:
            yield Problem(("metadata", "name"), str(error).rstrip("."))
    elif not within(manifest, "metadata", "generateName"):
        yield Problem(("metadata",), "the name is missing: write metadata: {name: …}")
    yield from _claim(mapping(manifest.get("spec"))) if kind == "PersistentVolumeClaim" else ()
    yield from _config_map(manifest) if kind == "ConfigMap" else ()


def _claim(spec: dict[str, Any]) -> Iterator[Problem]:
    modes, size = spec.get("accessModes"), within(spec, "resources", "requests", "storage")
    if not items(modes):
        yield Problem(("spec",), "accessModes is missing: write accessModes: [ReadWriteMany]")
    for number, mode in enumerate(items(modes)):
        if mode not in _MODES:
            said = f"there is no access mode {mode!r}: write one of {', '.join(_MODES)}"
            yield Problem(("spec", "accessModes", number), said)
    where = ("spec", "resources", "requests", "storage")
    if size is None:
        yield Problem(("spec",), "resources.requests.storage, the volume's size, is missing: write it")
    else:
        try:
            quantity.bytes_of(str(size), "the volume's size")
        except ValueError as error:
            yield Problem(where, str(error).rstrip("."))


def _config_map(manifest: dict[str, Any]) -> Iterator[Problem]:
    """A script that is put into a ConfigMap takes its tokens with it."""
    for key, text in mapping(manifest.get("data")).items():
        if not isinstance(text, str):
            said = "it must be a string: write it in quotes, or `|` after the key and the text below it"
            yield Problem(("data", key), said)
        elif secrets_in_clear.looks_secret(text):
            sentence = "a token stands in it in clear, for everyone who can read ConfigMaps: read it from a variable"
            yield Problem(("data", key), f"{sentence}, and set that from a Secret by secretKeyRef")
