"""What the operators' own admission webhooks demand beyond their schemas, and what they forget to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cputrain.cluster import job_containers
from cputrain.cluster.loose_values import items, mapping, within
from cputrain.cluster.schema import Problem, Where

_NAME = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_RESTART = ("Always", "OnFailure", "Never", "ExitCode")
_BACKENDS = ("c10d", "etcd", "etcd-v2", "static")
# Containers of a runtime whose variables a TrainJob has a place of its own for.
_RESERVED = {
    "node": "trainer.env",
    "dataset-initializer": "initializer.dataset.env",
    "model-initializer": "initializer.model.env",
}


def problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    """Nothing for kinds that have no webhook. What isn't even of the right type is left to the schema."""
    kind, spec = manifest.get("kind"), mapping(manifest.get("spec"))
    if kind in _RULES:
        yield from _name(manifest)
        yield from _RULES[kind](spec)
    if kind == "TrainJob":
        yield from _patches(manifest)


def _name(manifest: dict[str, Any]) -> Iterator[Problem]:
    name = mapping(manifest.get("metadata")).get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 63:
        sentence = f"the name must be lower-case letters, digits and hyphens beginning with a letter, found {name!r}"
        yield Problem(("metadata", "name"), sentence)


def _pytorchjob(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    here: Where = ("spec", "pytorchReplicaSpecs")
    yield from _replicas(replicas, here, {"Master", "Worker"})
    for name, replica in replicas.items():
        yield from _containers(mapping(replica), (*here, name), "pytorch")
    master = mapping(replicas.get("Master"))
    if "Master" in replicas and master.get("replicas") not in (None, 1):
        yield Problem((*here, "Master", "replicas"), "there can be one Master only: write replicas: 1")
    if "elasticPolicy" in spec:
        yield from _elastic(mapping(spec.get("elasticPolicy")), replicas)
    process = spec.get("nprocPerNode")
    if isinstance(process, str) and process not in ("auto", "cpu", "gpu") and not re.fullmatch(r"[1-9]\d*", process):
        yield Problem(("spec", "nprocPerNode"), f"nprocPerNode must be a number in quotes, found {process!r}")


def _elastic(policy: dict[str, Any], replicas: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "elasticPolicy")
    if "Worker" not in replicas:
        yield Problem(here, "an elasticPolicy needs a Worker among pytorchReplicaSpecs: add it")
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield Problem((*here, "minReplicas"), f"minReplicas {least} is more than maxReplicas {most}: swap them")
    count = mapping(replicas.get("Worker")).get("replicas")
    if isinstance(count, int) and isinstance(most, int) and count > most:
        yield Problem(
            (*here, "maxReplicas"), f"maxReplicas {most} is less than the Worker's {count} replicas: raise it"
        )
    backend = policy.get("rdzvBackend")
    if isinstance(backend, str) and backend not in _BACKENDS:
        yield Problem((*here, "rdzvBackend"), f"torchrun knows no rendezvous backend {backend!r}: write c10d")


def _mpijob(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = mapping(spec.get("mpiReplicaSpecs"))
    here: Where = ("spec", "mpiReplicaSpecs")
    yield from _replicas(replicas, here, {"Launcher", "Worker"})
    for name, replica in replicas.items():
        yield from _containers(mapping(replica), (*here, name), None)
        policy = mapping(replica).get("restartPolicy")
        if policy in ("Always", "ExitCode"):
            yield Problem((*here, name, "restartPolicy"), "an MPIJob takes Never or OnFailure only")
    if "Launcher" not in replicas:
        yield Problem(here, "an MPIJob needs a Launcher, which runs mpirun: add it")
    elif mapping(replicas["Launcher"]).get("replicas") not in (None, 1):
        yield Problem((*here, "Launcher", "replicas"), "there must be exactly one Launcher: write replicas: 1")
    if isinstance(spec.get("slotsPerWorker"), int) and spec["slotsPerWorker"] < 1:
        yield Problem(
            ("spec", "slotsPerWorker"), "slotsPerWorker must be at least 1: write the number of ranks of a Worker"
        )
    clean = mapping(spec.get("runPolicy")).get("cleanPodPolicy")
    if clean not in (None, "None", "Running", "All"):
        yield Problem(("spec", "runPolicy", "cleanPodPolicy"), "cleanPodPolicy must be None, Running or All")


def _trainjob(spec: dict[str, Any]) -> Iterator[Problem]:
    trainer = mapping(spec.get("trainer"))
    for number, row in enumerate(items(trainer.get("env"))):
        if str(mapping(row).get("name", "")).startswith("PET_"):
            yield Problem(("spec", "trainer", "env", number), f"{row['name']} is the operator's: leave it out")


def _patches(manifest: dict[str, Any]) -> Iterator[Problem]:
    for part in job_containers.patches(manifest):
        for number, container in job_containers.named(part.spec):
            place = _RESERVED.get(str(container.get("name")))
            if place and container.get("env"):
                sentence = f"the operator refuses variables of {container['name']} here: move them to {place}"
                yield Problem((*part.where, "containers", number, "env"), sentence)


def _runtime(spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "template", "spec", "replicatedJobs")
    jobs = items(within(spec, "template", "spec", "replicatedJobs"))
    # With MPI the ranks are started by a job of its own.
    known = ("node", "launcher") if "mpi" in mapping(spec.get("mlPolicy")) else ("node",)
    step = "trainer.kubeflow.org/trainjob-ancestor-step"
    found = False
    for number, job in enumerate(jobs):
        template = mapping(mapping(job).get("template"))
        if mapping(within(template, "metadata", "labels")).get(step) != "trainer":
            continue
        found = True
        inner = within(template, "spec", "template", "spec", "containers")
        called = [mapping(container).get("name") for container in items(inner)]
        if mapping(job).get("name") not in known or "node" not in called:
            sentence = (
                f"the replicated job of the training must be named {' or '.join(known)}, its container node: rename"
            )
            yield Problem((*here, number), f"{sentence} them")
    if not found:
        yield Problem(
            here, f"no replicated job has the label {step}: trainer, so the operator finds none to run: write it"
        )
    policies = [name for name in ("torch", "mpi", "jax", "xgboost", "flux") if name in mapping(spec.get("mlPolicy"))]
    if len(policies) > 1:
        yield Problem(("spec", "mlPolicy"), f"only one of {' and '.join(policies)} can be chosen: remove the others")


def _replicas(replicas: dict[str, Any], where: Where, known: set[str]) -> Iterator[Problem]:
    for name, replica in replicas.items():
        if name not in known:
            near = next((key for key in known if key.lower() == name.lower()), None)
            remedy = f"write {near}" if near else f"the operator knows {' and '.join(sorted(known))}"
            yield Problem((*where, name), f"{name} is no kind of replica: {remedy}")
        policy, count = mapping(replica).get("restartPolicy"), mapping(replica).get("replicas")
        if isinstance(policy, str) and policy not in _RESTART:
            yield Problem((*where, name, "restartPolicy"), f"restartPolicy must be one of {', '.join(_RESTART)}")
        if isinstance(count, int) and count < 1:
            yield Problem((*where, name, "replicas"), f"replicas must be at least 1, found {count}")


def _containers(replica: dict[str, Any], where: Where, name: str | None) -> Iterator[Problem]:
    here: Where = (*where, "template", "spec", "containers")
    containers = items(within(replica, "template", "spec", "containers"))
    if not containers:
        yield Problem(where, "there is no container: write template.spec.containers")
    elif name and name not in [mapping(container).get("name") for container in containers]:
        yield Problem((*here, 0, "name"), f"the operator looks for a container called {name}: rename this one")
    for number, container in enumerate(containers):
        if not mapping(container).get("image"):
            yield Problem((*here, number), "the container has no image: write one")


_RULES = {
    "PyTorchJob": _pytorchjob,
    "MPIJob": _mpijob,
    "TrainJob": _trainjob,
    "TrainingRuntime": _runtime,
    "ClusterTrainingRuntime": _runtime,
}
