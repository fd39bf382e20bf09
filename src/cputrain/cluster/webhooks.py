"""What the operators' own admission webhooks demand beyond their schemas, and what they forget to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster import job_containers
from cputrain.cluster.manifest import Problem, Where, items, mapping, warning, within

_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+", re.DOTALL)
_RESTART = ("Always", "OnFailure", "Never", "ExitCode")
_BACKENDS = ("c10d", "etcd", "etcd-v2", "static")
# torchrun's variables that Trainer sets; it refuses a job that sets one of them itself.
_OPERATORS = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
# Containers of a runtime whose variables a TrainJob has a place of its own for.
_RESERVED = {
    "node": "trainer.env",
    "dataset-initializer": "initializer.dataset.env",
    "model-initializer": "initializer.model.env",
}
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
# The container that each step of a runtime must have.
_CONTAINERS = {
    "trainer": "node",
    "dataset-initializer": "dataset-initializer",
    "model-initializer": "model-initializer",
}
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")


def problems(manifest: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Problem]:
    """Nothing for kinds that have no webhook. What isn't even of the right type is left to the schema.

    `others`: the manifests beside it, of which one may be a TrainJob's runtime.
    """
    kind, spec = manifest.get("kind"), mapping(manifest.get("spec"))
    if kind in _RULES:
        yield from _name(manifest)
        yield from _RULES[kind](spec)
    if kind == "TrainJob":
        yield from _variables_of_operator(manifest, others)
        yield from _patches(manifest)
        runtime = job_containers.runtime_of(manifest, others)
        yield from _against_runtime(manifest, runtime) if runtime else ()


def _name(manifest: dict[str, Any]) -> Iterator[Problem]:
    metadata, is_runtime = mapping(manifest.get("metadata")), manifest.get("kind") in _RUNTIMES
    where, name = ("metadata", "name"), metadata.get("name")
    form = _SUBDOMAIN if is_runtime else _LABEL
    if name is None:
        if not metadata.get("generateName"):
            yield Problem(("metadata",), "the name is missing: write metadata: {name: …}")
    elif not isinstance(name, str):
        yield Problem(where, "the name must be a string: write it in quotes")
    elif not form.fullmatch(name):
        said = "letters, digits, hyphens and dots" if is_runtime else "letters, digits and hyphens, a letter first"
        likely = re.sub(r"[^-.a-z0-9]" if is_runtime else r"[^-a-z0-9]", "-", name.lower()).strip("-.")
        remedy = f": write {likely}" if form.fullmatch(likely) else ""
        yield Problem(where, f"the name must be lower-case {said}, found {name!r}{remedy}")
    else:
        yield from _length(manifest, name)


def _length(manifest: dict[str, Any], name: str) -> Iterator[Problem]:
    """Pods and services are called after the job, and such a name has at most 63 characters."""
    kind, last = manifest.get("kind"), max(0, job_containers.pods_of(manifest) - 1)
    ending = {"TrainJob": f"-node-0-{last}-abcde"}.get(str(kind), f"-worker-{last}")
    most = 253 if kind in _RUNTIMES else 63 - len(ending)
    if len(name) > most:
        why = "" if kind in _RUNTIMES else f" ({name[:10]}…{ending} must fit in 63)"
        yield Problem(("metadata", "name"), f"the name is too long: it has {len(name)} characters{why}; use {most}")


def _pytorchjob(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    here: Where = ("spec", "pytorchReplicaSpecs")
    yield from _replicas(replicas, here, {"Master", "Worker"})
    for name, replica in replicas.items():
        yield from _containers(mapping(replica), (*here, name), "pytorch")
    master = mapping(replicas.get("Master"))
    if "Master" in replicas and master.get("replicas") != 1:
        yield Problem((*here, "Master", "replicas"), "there must be exactly one Master: write replicas: 1")
    if "elasticPolicy" in spec:
        yield from _elastic(mapping(spec.get("elasticPolicy")), replicas)
        if within(spec, "elasticPolicy", "nProcPerNode") is not None and spec.get("nprocPerNode") is not None:
            said = "nProcPerNode can't be used together with nprocPerNode: remove it here"
            yield Problem(("spec", "elasticPolicy", "nProcPerNode"), said)
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
        yield warning(
            (*here, "maxReplicas"), f"maxReplicas {most} is less than the Worker's {count} replicas: raise it"
        )
    backend = policy.get("rdzvBackend")
    if isinstance(backend, str) and backend not in _BACKENDS:
        yield Problem((*here, "rdzvBackend"), f"torchrun knows no rendezvous backend {backend!r}: write c10d")
    elif str(backend).startswith("etcd") and not policy.get("rdzvHost"):
        said = f"rdzvBackend {backend} without rdzvHost looks for an etcd server in the first Worker, which has none"
        yield Problem((*here, "rdzvBackend"), f"{said}: write c10d, or the server's name as rdzvHost")


def _mpijob(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = mapping(spec.get("mpiReplicaSpecs"))
    here: Where = ("spec", "mpiReplicaSpecs")
    yield from _replicas(replicas, here, {"Launcher", "Worker"})
    for name, replica in replicas.items():
        yield from _containers(mapping(replica), (*here, name), None)
        policy = mapping(replica).get("restartPolicy")
        if policy in ("Always", "ExitCode"):
            yield Problem((*here, name, "restartPolicy"), f"an MPIJob doesn't take {policy}: write Never or OnFailure")
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
        yield Problem(("spec", "runPolicy", "cleanPodPolicy"), f"there is no {clean!r}: write None, Running or All")


def _trainjob(spec: dict[str, Any]) -> Iterator[Problem]:
    for name in ("dataset", "model"):
        address = within(spec, "initializer", name, "storageUri")
        if isinstance(address, str) and address and not _URI.fullmatch(address):
            said = f"{address!r} has no scheme: write hf://{address.lstrip('/')} or s3://…"
            yield Problem(("spec", "initializer", name, "storageUri"), said)


def _variables_of_operator(manifest: dict[str, Any], others: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    rows = items(within(manifest, "spec", "trainer", "env"))
    for number, row in enumerate(rows if job_containers.started_by(manifest, others) == "torch" else []):
        if mapping(row).get("name") in _OPERATORS:
            yield Problem(("spec", "trainer", "env", number), f"{row['name']} is the operator's: leave it out")


def _against_runtime(manifest: dict[str, Any], runtime: dict[str, Any]) -> Iterator[Problem]:
    """A TrainJob can change only what its runtime has."""
    jobs = [mapping(job) for job in items(within(runtime, "spec", "template", "spec", "replicatedJobs"))]
    known = [str(job.get("name")) for job in jobs]
    for name in ("dataset", "model"):
        if within(manifest, "spec", "initializer", name) is not None and f"{name}-initializer" not in known:
            said = f"the runtime has no replicated job {name}-initializer to do it: add one there, or remove this"
            yield Problem(("spec", "initializer", name), said)
    for number, patch in enumerate(items(within(manifest, "spec", "runtimePatches"))):
        here: Where = ("spec", "runtimePatches", number, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
        rows = items(within(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"))
        for row, job in enumerate(rows):
            if mapping(job).get("name") not in known:
                said = f"the runtime has no replicated job {mapping(job).get('name')}: write {' or '.join(known)}"
                yield Problem((*here, row, "name"), said)


def _patches(manifest: dict[str, Any]) -> Iterator[Problem]:
    for part in job_containers.patches(manifest):
        for number, container in job_containers.named(part.spec):
            place = _RESERVED.get(str(container.get("name")))
            if place and container.get("env"):
                sentence = f"the operator refuses variables of {container['name']} here: move them to {place}"
                yield Problem((*part.where, "containers", number, "env"), sentence)


def _runtime(spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "template", "spec", "replicatedJobs")
    jobs = [mapping(job) for job in items(within(spec, "template", "spec", "replicatedJobs"))]
    # With MPI the ranks are started by a job of its own.
    known = ("node", "launcher") if "mpi" in mapping(spec.get("mlPolicy")) else ("node",)
    steps = [mapping(within(job, "template", "metadata", "labels")).get(_STEP) for job in jobs]
    for number, (job, step) in enumerate(zip(jobs, steps, strict=True)):
        if not isinstance(step, str) or step not in _CONTAINERS:
            continue
        yield from _step(job, (*here, number), step)
        if step == "trainer" and job.get("name") not in known:
            said = f"the replicated job of the training must be named {' or '.join(known)}: rename it"
            yield Problem((*here, number, "name"), said)
    if jobs and "trainer" not in steps:
        said = f"no replicated job has the label {_STEP}: trainer, so the operator finds none to run: write it"
        yield Problem(here, said)
    policies = [name for name in ("torch", "mpi", "jax", "xgboost", "flux") if name in mapping(spec.get("mlPolicy"))]
    if len(policies) > 1:
        yield Problem(("spec", "mlPolicy"), f"only one of {' and '.join(policies)} can be chosen: remove the others")


def _step(job: dict[str, Any], where: Where, step: str) -> Iterator[Problem]:
    """One step of a TrainJob: a single replica, with a container of the step's name."""
    if job.get("replicas") not in (None, 1):
        said = "replicas must be 1 here: the number of pods is mlPolicy.numNodes, or a job's trainer.numNodes"
        yield Problem((*where, "replicas"), said)
    called = [
        mapping(each).get("name") for each in items(within(job, "template", "spec", "template", "spec", "containers"))
    ]
    if _CONTAINERS[step] not in called:
        said = f"the container of the step {step} must be named {_CONTAINERS[step]}: rename it"
        yield Problem((*where, "template", "spec", "template", "spec", "containers"), said)


def _replicas(replicas: dict[str, Any], where: Where, known: set[str]) -> Iterator[Problem]:
    for name, replica in replicas.items():
        if name not in known:
            near = next((key for key in known if key.lower() == name.lower()), None)
            remedy = f"write {near}" if near else f"the operator knows {' and '.join(sorted(known))}"
            yield Problem((*where, name), f"{name} is no kind of replica: {remedy}")
        policy, count = mapping(replica).get("restartPolicy"), mapping(replica).get("replicas")
        if isinstance(policy, str) and policy not in _RESTART:
            yield Problem(
                (*where, name, "restartPolicy"), f"restartPolicy must be one of {', '.join(_RESTART)}, found {policy}"
            )
        if isinstance(count, int) and count < 1:
            yield Problem((*where, name, "replicas"), f"replicas must be at least 1, found {count}: write 1")


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
