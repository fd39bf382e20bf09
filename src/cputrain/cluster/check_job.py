"""What will hurt in a job as a whole: process counts, restarts, and ranks that can't find each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cputrain.cluster.check_pod import containers_of, mapping, variables, words
from cputrain.cluster.schema import Problem, Where

_LAUNCHERS = ("torchrun", "cputrain", "accelerate", "mpirun", "mpiexec", "horovodrun", "deepspeed")


def problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    spec = mapping(manifest.get("spec"))
    rules = {"PyTorchJob": _pytorchjob, "TrainJob": _trainjob, "MPIJob": _mpijob}
    rule = rules.get(str(manifest.get("kind")))
    if rule:
        yield from rule(spec)


def pods_of(manifest: dict[str, Any]) -> int:
    """How many pods train."""
    spec = mapping(manifest.get("spec"))
    counts = [mapping(spec.get("trainer")).get("numNodes")]
    for replicas in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        rows = mapping(spec.get(replicas)).items()
        counts += [mapping(replica).get("replicas", 1) for name, replica in rows if name != "Launcher"]
    return sum(count for count in counts if isinstance(count, int))


def _pytorchjob(spec: dict[str, Any]) -> Iterator[Problem]:
    here: Where = ("spec", "pytorchReplicaSpecs")
    replicas = mapping(spec.get("pytorchReplicaSpecs"))
    policy = mapping(spec.get("elasticPolicy"))
    if spec.get("nprocPerNode") in (None, "auto", "cpu") and policy.get("nProcPerNode") is None:
        yield Problem(
            ("spec", "nprocPerNode") if "nprocPerNode" in spec else ("spec",),
            "nprocPerNode is missing, and the operator then starts one process for every CPU of the node, until memory "
            'ends: write nprocPerNode: "1", in quotes',
        )
    yield from _restarts(spec, replicas, here)
    if "Master" in replicas:
        yield Problem(
            (*here, "Master"),
            "a Master makes the operator put an init container into every Worker that has no security context, so the "
            "restricted standard refuses the pods, and limits that differ from its requests, so they are never "
            "Guaranteed: use Workers only, with an elasticPolicy of minReplicas = maxReplicas = replicas",
        )
    yield from _meeting(spec, replicas, here)


def _restarts(spec: dict[str, Any], replicas: dict[str, Any], here: Where) -> Iterator[Problem]:
    for name, replica in replicas.items():
        inner = mapping(mapping(mapping(replica).get("template")).get("spec"))
        if "restartPolicy" in inner:
            used = mapping(replica).get("restartPolicy") or "Never"
            yield Problem(
                (*here, name, "template", "spec", "restartPolicy"),
                f"restartPolicy of the pod is overwritten by that of the replica ({used}): remove it here, and write "
                "what is meant beside replicas",
            )
    if mapping(spec.get("runPolicy")).get("backoffLimit") is None:
        where: Where = ("spec", "runPolicy") if "runPolicy" in spec else ("spec",)
        yield Problem(
            where,
            "backoffLimit is missing, so a job that fails starts again for ever: write runPolicy: {backoffLimit: 3}",
        )


def _meeting(spec: dict[str, Any], replicas: dict[str, Any], here: Where) -> Iterator[Problem]:
    """Ranks of several pods that would never find each other."""
    workers = mapping(replicas.get("Worker")).get("replicas", 1)
    elastic = isinstance(spec.get("elasticPolicy"), dict)
    several = isinstance(workers, int) and workers + ("Master" in replicas) > 1
    if several and not elastic and "Master" not in replicas:
        yield Problem(
            (*here, "Worker"),
            f"{workers} Workers without an elasticPolicy are given no address to meet at: write elasticPolicy with "
            f"rdzvBackend: c10d and minReplicas = maxReplicas = {workers}",
        )
    if not several:
        return
    for name, replica in replicas.items():
        for where, container in containers_of(mapping(replica).get("template"), (*here, name, "template")):
            yield from _alone(container, where)


def _alone(container: dict[str, Any], where: Where) -> Iterator[Problem]:
    """A command that makes a world of its own pod."""
    command = words(container)
    names = [word.rsplit("/", 1)[-1] for word in command]
    place: Where = (*where, "command") if "command" in container else where
    if (
        command
        and not any(name in _LAUNCHERS for name in names)
        and not {"torch.distributed.run", "bash", "sh"} & set(names)
    ):
        yield Problem(
            place, f"{names[0]} starts one process that trains alone in every pod: start it with cputrain launch"
        )
    for number, word in enumerate(command):
        following = command[number + 1] if number + 1 < len(command) else ""
        if word in ("--standalone", "--nnodes=1") or (word == "--nnodes" and following == "1"):
            yield Problem(place, f"{word} makes every pod train alone, whatever the operator says: remove it")
    for row, (name, value) in variables(container):
        if name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1", "::1"):
            yield Problem((*where, "env", row), f"MASTER_ADDR is {value}, so every pod meets only itself: remove it")


def _trainjob(spec: dict[str, Any]) -> Iterator[Problem]:
    trainer = spec.get("trainer")
    if not isinstance(trainer, dict):
        yield Problem(
            ("spec",), "trainer is missing, and the operator then sets no variable at all: ranks can't find each other"
        )
        return
    if trainer.get("numProcPerNode") is None:
        yield Problem(
            ("spec", "trainer"),
            "numProcPerNode is missing, and the operator then starts one process for every CPU requested: write "
            "numProcPerNode: 1",
        )
    nodes = trainer.get("numNodes")
    if isinstance(nodes, int) and nodes > 1 and trainer.get("command"):
        yield from _alone(trainer, ("spec", "trainer"))


def _mpijob(spec: dict[str, Any]) -> Iterator[Problem]:
    yield from _restarts(spec, mapping(spec.get("mpiReplicaSpecs")), ("spec", "mpiReplicaSpecs"))
