"""TrainJob, trainer.kubeflow.org/v1alpha1, with a runtime of its own: how pods look there, what runs here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cputrain import blame
from cputrain.cluster import pod, training_runtime
from cputrain.cluster.check_command import COUNT, counts_by_torchrun
from cputrain.cluster.containers import Container, Manifest, Pod, Ranks, count, idle, init_containers, named, words
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted, Problem, mapping, mappings, warning, within

API, KIND = "trainer.kubeflow.org/v1alpha1", "TrainJob"
POD_LABEL = "jobset.sigs.k8s.io/jobset-name"
ONE_LOG = False
RENDERED_BESIDE: tuple[str, ...] = ("trainingruntimes.trainer.kubeflow.org",)
PODS: tuple[tuple[str, ...], ...] = (("trainer", "numNodes"),)
PROCESSES: tuple[str, ...] = ("trainer", "numProcPerNode")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+", re.DOTALL)
# torchrun's variables that Trainer sets; it refuses a job that sets one of them itself.
_OPERATORS = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
# Containers of a runtime whose variables a TrainJob has a place of its own for.
_RESERVED = {"node": "trainer.env"} | {
    f"{name}-initializer": f"initializer.{name}.env" for name in ("dataset", "model")
}


def documents(job: Job) -> list[dict[str, Any]]:
    runtime = {"apiVersion": API, "kind": "TrainingRuntime", "metadata": pod.metadata(job), "spec": _runtime(job)}
    return [runtime, {"apiVersion": API, "kind": KIND, "metadata": pod.metadata(job), "spec": _train_job(job)}]


def _runtime(job: Job) -> dict[str, Any]:
    container = {**pod.container(job, "node"), "resources": pod.resources(job)}
    labels = Noted({training_runtime.STEP: "trainer"}, "the operator looks for this label and the two names `node`")
    ended = "a pod that is evicted, or whose ranks were told to end (143), is no failure of the training"
    told = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [blame.STOPPED]}},
    ]
    inner = {
        "backoffLimit": 0,
        "podFailurePolicy": Noted({"rules": told}, ended),
        "template": pod.template(job, container, restartPolicy="Never"),
    }
    restarts = Noted(job.backoff_limit, "all pods start anew together: ranks can't come back alone")
    uncounted = {"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "failurePolicy": {"maxRestarts": restarts, "rules": [{"name": "ended-from-outside", **uncounted}]},
        "replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": labels}, "spec": inner}}],
    }
    return {"mlPolicy": {"numNodes": job.workers, "torch": {}}, "template": {"spec": spec}}


def _train_job(job: Job) -> dict[str, Any]:
    note = "a whole number; without it the operator starts one for every CPU requested"
    return {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": {
            "numNodes": job.workers,
            "numProcPerNode": Noted(job.sizing.processes, note),
            "command": list(pod.COMMAND),
            "args": pod.arguments(job),
            "env": pod.variables(job),
            "resourcesPerNode": pod.resources(job),
        },
    }


def pods_with_logs(spec: dict[str, Any], pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return pods


def containers(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]:
    """Of the job itself: `others`, the manifests beside it, may hold its runtime."""
    runtime = training_runtime.runtime_of(manifest, others)
    trainer, node = mapping(within(manifest, "spec", "trainer")), training_runtime.node_container(runtime)
    beside = [runtime] if runtime else []
    own = trainer if trainer.get("command") else {**node, **{key: trainer[key] for key in ("args",) if key in trainer}}
    given = mapping(trainer.get("resourcesPerNode"))
    ranks = Ranks(
        count(trainer.get("numProcPerNode")),
        training_runtime.nodes_of(manifest, beside),
        given or mapping(node.get("resources")),
        training_runtime.chooses_nodes_anywhere(manifest, runtime),
        words(own),
        started_by=training_runtime.started_by(manifest, beside),
        mounts=training_runtime.mounts_of_node(manifest, runtime) if runtime else None,
    )
    needed = not node.get("resources")
    yield Container(("spec", "trainer"), trainer, ranks, resources_key="resourcesPerNode", needs_resources=needed)
    yield from _idle_containers(manifest)


def _idle_containers(manifest: Manifest) -> Iterator[Container]:
    """Initializers, and what is laid over the runtime's pods."""
    for name in ("dataset", "model"):
        yield idle(("spec", "initializer", name), mapping(within(manifest, "spec", "initializer", name)))
    for part in training_runtime.patches(manifest):
        for number, container in named(part.spec):
            yield idle((*part.where, "containers", number), container)
        yield from init_containers(part.spec, part.where)


def pods(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Pod]:
    yield from training_runtime.patches(manifest, training_runtime.runtime_of(manifest, others))


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    yield from _webhook(mapping(manifest.get("spec")))
    yield from _variables_of_operator(manifest, others)
    yield from _patches(manifest)
    runtime = training_runtime.runtime_of(manifest, others)
    yield from _against_runtime(manifest, runtime) if runtime else ()
    yield from _uncounted(manifest, others, [each for each in containers(manifest, others) if each.trains])


def _webhook(spec: dict[str, Any]) -> Iterator[Problem]:
    for name in ("dataset", "model"):
        address = within(spec, "initializer", name, "storageUri")
        if isinstance(address, str) and address and not _URI.fullmatch(address):
            said = f"{address!r} has no scheme: write hf://{address.lstrip('/')} or s3://…"
            yield Problem(("spec", "initializer", name, "storageUri"), said)


def _variables_of_operator(manifest: dict[str, Any], others: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    rows = mappings(manifest, "spec", "trainer", "env")
    for number, row in enumerate(rows if training_runtime.started_by(manifest, others) == "torch" else []):
        if row.get("name") in _OPERATORS:
            yield Problem(("spec", "trainer", "env", number), f"{row['name']} is the operator's: leave it out")


def _against_runtime(manifest: dict[str, Any], runtime: dict[str, Any]) -> Iterator[Problem]:
    """A TrainJob can change only what its runtime has."""
    known = [str(job.get("name")) for job in mappings(runtime, "spec", *training_runtime.JOBS)]
    for name in ("dataset", "model"):
        if within(manifest, "spec", "initializer", name) is not None and f"{name}-initializer" not in known:
            said = f"the runtime has no replicated job {name}-initializer to do it: add one there, or remove this"
            yield Problem(("spec", "initializer", name), said)
    for number, patch in enumerate(mappings(manifest, "spec", "runtimePatches")):
        here = ("spec", "runtimePatches", number, "trainingRuntimeSpec", *training_runtime.JOBS)
        for row, job in enumerate(mappings(patch, "trainingRuntimeSpec", *training_runtime.JOBS)):
            if job.get("name") not in known:
                said = f"the runtime has no replicated job {job.get('name')}: write {' or '.join(known)}"
                yield Problem((*here, row, "name"), said)


def _patches(manifest: dict[str, Any]) -> Iterator[Problem]:
    for part in training_runtime.patches(manifest):
        for number, container in named(part.spec):
            place = _RESERVED.get(str(container.get("name")))
            if place and container.get("env"):
                sentence = f"the operator refuses variables of {container['name']} here: move them to {place}"
                yield Problem((*part.where, "containers", number, "env"), sentence)


def _uncounted(
    manifest: dict[str, Any], others: Sequence[dict[str, Any]], containers: list[Container]
) -> Iterator[Problem]:
    trainer = within(manifest, "spec", "trainer")
    if not isinstance(trainer, dict):
        if training_runtime.started_by(manifest, others) == "torch":
            said = "the operator then sets no variable at all: ranks can't find each other; write it"
            yield warning(("spec",), f"trainer is missing, and {said}")
        return
    policy = within(training_runtime.runtime_of(manifest, others), "spec", "mlPolicy", "torch", "numProcPerNode")
    if trainer.get("numProcPerNode") is not None or (policy is not None and COUNT.fullmatch(str(policy))):
        return
    for container in containers:
        ours = "cputrain" in container.ranks.programs
        launched = counts_by_torchrun(container) or (ours and trainer.get("resourcesPerNode"))
        if container.ranks.started_by == "torch" and launched and not container.ranks.has_gpus:
            said = "numProcPerNode is missing, and the operator then asks for one process for every CPU"
            yield warning(("spec", "trainer"), f"{said}: write numProcPerNode: 1")
