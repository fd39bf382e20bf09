"""What the operators' own admission webhooks demand beyond their schemas, and what they forget to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cputrain.cluster.schema import Problem, Where

_NAME = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_RESTART = ("Always", "OnFailure", "Never", "ExitCode")
_BACKENDS = ("c10d", "etcd", "etcd-v2", "static")


def problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    """Nothing for kinds that have no webhook. What isn't even of the right type is left to the schema."""
    kind, spec = manifest.get("kind"), _mapping(manifest.get("spec"))
    if kind in _RULES:
        yield from _name(manifest)
        yield from _RULES[kind](spec)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _name(manifest: dict[str, Any]) -> Iterator[Problem]:
    name = _mapping(manifest.get("metadata")).get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 63:
        sentence = f"the name must be lower-case letters, digits and hyphens beginning with a letter, found {name!r}"
        yield Problem(("metadata", "name"), sentence)


def _pytorchjob(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = _mapping(spec.get("pytorchReplicaSpecs"))
    here: Where = ("spec", "pytorchReplicaSpecs")
    yield from _replicas(replicas, here, {"Master", "Worker"})
    for name, replica in replicas.items():
        yield from _containers(_mapping(replica), (*here, name), "pytorch")
    master = _mapping(replicas.get("Master"))
    if "Master" in replicas and master.get("replicas") not in (None, 1):
        yield Problem((*here, "Master", "replicas"), "there can be one Master only")
    if "elasticPolicy" in spec:
        yield from _elastic(_mapping(spec.get("elasticPolicy")), replicas)
    process = spec.get("nprocPerNode")
    if isinstance(process, str) and process not in ("auto", "cpu", "gpu") and not re.fullmatch(r"[1-9]\d*", process):
        yield Problem(("spec", "nprocPerNode"), f"nprocPerNode must be a number in quotes, found {process!r}")


def _elastic(policy: dict[str, Any], replicas: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "elasticPolicy")
    if "Worker" not in replicas:
        yield Problem(here, "an elasticPolicy needs a Worker among pytorchReplicaSpecs")
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield Problem((*here, "minReplicas"), f"minReplicas {least} is more than maxReplicas {most}: swap them")
    count = _mapping(replicas.get("Worker")).get("replicas")
    if isinstance(count, int) and isinstance(most, int) and count > most:
        yield Problem((*here, "maxReplicas"), f"maxReplicas {most} is less than the Worker's {count} replicas")
    backend = policy.get("rdzvBackend")
    if isinstance(backend, str) and backend not in _BACKENDS:
        yield Problem((*here, "rdzvBackend"), f"torchrun knows no rendezvous backend {backend!r}: write c10d")


def _mpijob(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = _mapping(spec.get("mpiReplicaSpecs"))
    here: Where = ("spec", "mpiReplicaSpecs")
    yield from _replicas(replicas, here, {"Launcher", "Worker"})
    for name, replica in replicas.items():
        yield from _containers(_mapping(replica), (*here, name), None)
        policy = _mapping(replica).get("restartPolicy")
        if policy in ("Always", "ExitCode"):
            yield Problem((*here, name, "restartPolicy"), "an MPIJob takes Never or OnFailure only")
    if "Launcher" not in replicas:
        yield Problem(here, "an MPIJob needs a Launcher")
    elif _mapping(replicas["Launcher"]).get("replicas") not in (None, 1):
        yield Problem((*here, "Launcher", "replicas"), "there must be exactly one Launcher")
    if isinstance(spec.get("slotsPerWorker"), int) and spec["slotsPerWorker"] < 1:
        yield Problem(("spec", "slotsPerWorker"), "slotsPerWorker must be at least 1")
    clean = _mapping(spec.get("runPolicy")).get("cleanPodPolicy")
    if clean not in (None, "None", "Running", "All"):
        yield Problem(("spec", "runPolicy", "cleanPodPolicy"), "cleanPodPolicy must be None, Running or All")


def _trainjob(spec: dict[str, Any]) -> Iterator[Problem]:
    trainer = _mapping(spec.get("trainer"))
    for number, row in enumerate(_list(trainer.get("env"))):
        if str(_mapping(row).get("name", "")).startswith("PET_"):
            yield Problem(("spec", "trainer", "env", number), f"{row['name']} is the operator's: leave it out")


def _runtime(spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "template", "spec", "replicatedJobs")
    jobs = _list(_mapping(_mapping(spec.get("template")).get("spec")).get("replicatedJobs"))
    step = "trainer.kubeflow.org/trainjob-ancestor-step"
    found = False
    for number, job in enumerate(jobs):
        template = _mapping(_mapping(job).get("template"))
        if _mapping(_mapping(template.get("metadata")).get("labels")).get(step) != "trainer":
            continue
        found = True
        inner = _mapping(_mapping(_mapping(template.get("spec")).get("template")).get("spec"))
        called = [_mapping(container).get("name") for container in _list(inner.get("containers"))]
        if _mapping(job).get("name") != "node" or "node" not in called:
            yield Problem((*here, number), "the replicated job of the training and its container must be named node")
    if not found:
        yield Problem(here, f"no replicated job has the label {step}: trainer, so the operator finds none to run")
    policies = [name for name in ("torch", "mpi", "jax", "xgboost", "flux") if name in _mapping(spec.get("mlPolicy"))]
    if len(policies) > 1:
        yield Problem(("spec", "mlPolicy"), f"only one of {' and '.join(policies)} can be chosen")


def _replicas(replicas: dict[str, Any], where: Where, known: set[str]) -> Iterator[Problem]:
    for name, replica in replicas.items():
        if name not in known:
            near = next((key for key in known if key.lower() == name.lower()), None)
            remedy = f"write {near}" if near else f"the operator knows {' and '.join(sorted(known))}"
            yield Problem((*where, name), f"{name} is no kind of replica: {remedy}")
        policy, count = _mapping(replica).get("restartPolicy"), _mapping(replica).get("replicas")
        if isinstance(policy, str) and policy not in _RESTART:
            yield Problem((*where, name, "restartPolicy"), f"restartPolicy must be one of {', '.join(_RESTART)}")
        if isinstance(count, int) and count < 1:
            yield Problem((*where, name, "replicas"), f"replicas must be at least 1, found {count}")


def _containers(replica: dict[str, Any], where: Where, name: str | None) -> Iterator[Problem]:
    here: Where = (*where, "template", "spec", "containers")
    containers = _list(_mapping(_mapping(replica.get("template")).get("spec")).get("containers"))
    if not containers:
        yield Problem(where, "there is no container")
    elif name and name not in [_mapping(container).get("name") for container in containers]:
        yield Problem((*here, 0, "name"), f"the operator looks for a container called {name}: rename this one")
    for number, container in enumerate(containers):
        if not _mapping(container).get("image"):
            yield Problem((*here, number), "the container has no image")


_RULES = {
    "PyTorchJob": _pytorchjob,
    "MPIJob": _mpijob,
    "TrainJob": _trainjob,
    "TrainingRuntime": _runtime,
    "ClusterTrainingRuntime": _runtime,
}
