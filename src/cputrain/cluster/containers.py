"""Containers and pods of a job as checks see them, and the replica specs in which PyTorchJob and MPIJob keep them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cputrain.cluster.manifest import Problem, Where, hint, items, mapping, mappings, within

Manifest = dict[str, Any]
_REPLICAS = ("pytorchReplicaSpecs", "mpiReplicaSpecs")
_RESTART = ("Always", "OnFailure", "Never", "ExitCode")


@dataclass(frozen=True)
class Ranks:
    """What a job says about its ranks, in whatever place: None and empty where it says nothing."""

    processes: int | None
    pods: int
    resources: dict[str, Any]
    nodes_are_chosen: bool
    command: Sequence[str] = ()
    # With a Master the operator tells each pod its RANK, and a script of one process needs no launcher.
    rank_is_told: bool = False
    # torch, mpi, flux, jax, xgboost, or "" for a runtime that leaves the ranks alone.
    started_by: str = "torch"
    # The least and the most pods of an elastic job; None where the number is fixed.
    elastic: tuple[int, int] | None = None
    # Which volume is mounted where; None if that stands in a runtime that isn't here.
    mounts: Mapping[str, dict[str, Any]] | None = None

    @property
    def programs(self) -> set[str]:
        """The words of the command without their folders."""
        return {word.rsplit("/", 1)[-1] for word in self.command}

    @property
    def has_gpus(self) -> bool:
        amounts = [mapping(self.resources.get(side)) for side in ("limits", "requests")]
        return any(re.search(r"gpu|tpu|gaudi|neuron", str(name)) for side in amounts for name in side)


@dataclass(frozen=True)
class Container:
    """One container: `where` it stands, its `value`, whether the ranks run or are started in it, and how."""

    where: Where
    value: dict[str, Any]
    ranks: Ranks
    trains: bool = True
    resources_key: str = "resources"
    needs_resources: bool = True

    @property
    def resources(self) -> dict[str, Any]:
        return mapping(self.value.get(self.resources_key))

    @property
    def variables(self) -> list[tuple[Where, dict[str, Any]]]:
        """The place of each entry of `env`, and the entry."""
        rows = enumerate(items(self.value.get("env")))
        return [((*self.where, "env", number), mapping(row)) for number, row in rows]


@dataclass(frozen=True)
class Pod:
    """One pod's specification, or a part of it that is laid over a runtime's."""

    where: Where
    spec: dict[str, Any]
    trains: bool = True
    is_part: bool = False
    mounted_elsewhere: frozenset[str] = frozenset()
    # Names of volumes that other parts of the job bring; None if those can't be seen.
    volumes_elsewhere: frozenset[str] | None = frozenset()
    # The words that start the ranks, and who starts them.
    command: Sequence[str] = ()
    started_by: str = "torch"
    # What a TrainJob gives its training in place of the runtime's.
    resources: dict[str, Any] = field(default_factory=dict)


_NO_RANKS = Ranks(None, 1, {}, True)


def named(spec: dict[str, Any], key: str = "containers") -> Iterator[tuple[int, dict[str, Any]]]:
    """The containers of a pod, with their numbers."""
    for number, container in enumerate(items(spec.get(key))):
        if isinstance(container, dict):
            yield number, container


def words(container: dict[str, Any]) -> list[str]:
    return [word for key in ("command", "args") for word in items(container.get(key)) if isinstance(word, str)]


def main_container(pod: dict[str, Any]) -> dict[str, Any]:
    """Where ranks run or are started: in the container that the operators know by name, and else in the first."""
    found = items(pod.get("containers"))
    known = [container for container in found if mapping(container).get("name") == "pytorch"]
    return mapping((known or found or [None])[0])


def chooses_nodes(*pods: dict[str, Any]) -> bool:
    return any(pod.get("nodeSelector") or pod.get("affinity") for pod in pods)


def volumes_of(*specs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volumes by their names; `specs` are pods or parts of pods."""
    return {str(volume.get("name")): volume for spec in specs for volume in mappings(spec, "volumes")}


def mounted(container: dict[str, Any], *specs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volume at each path of a container; `specs` are the pods or parts of pods that may declare it."""
    volumes, mounts = volumes_of(*specs), mappings(container, "volumeMounts")
    return {str(mount.get("mountPath")): volumes.get(str(mount.get("name")), {}) for mount in mounts}


def idle(where: Where, value: dict[str, Any]) -> Container:
    """A container in which nothing trains, but a token may stand in it."""
    return Container(where, value, _NO_RANKS, trains=False, needs_resources=False)


def init_containers(pod: dict[str, Any], where: Where) -> Iterator[Container]:
    for number, container in named(pod, "initContainers"):
        yield idle((*where, "initContainers", number), container)


def count(value: Any) -> int | None:
    is_count = isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"\d{1,6}", value, re.ASCII))
    return int(value) if is_count else None


def of_replicas(manifest: Manifest, key: str, started_by: str) -> Iterator[Container]:
    """The containers of a PyTorchJob or an MPIJob, which keep their pods in replica specs."""
    spec = mapping(manifest.get("spec"))
    processes = count(spec.get("nprocPerNode")) or count(within(spec, "elasticPolicy", "nProcPerNode"))
    processes = processes or count(spec.get("slotsPerWorker"))
    worker = mapping(within(spec, key, "Worker", "template", "spec"))
    told = "Master" in mapping(spec.get(key))
    for name, replica in mapping(spec.get(key)).items():
        here, pod = ("spec", key, name, "template", "spec"), mapping(within(replica, "template", "spec"))
        # The Launcher's command and variables are for the ranks, which run in the Workers.
        place = worker if name == "Launcher" else pod
        main = main_container(pod)
        for number, container in named(pod):
            holder = main_container(worker) if name == "Launcher" else container
            ranks = Ranks(
                processes, replicas_of(manifest), mapping(holder.get("resources")), chooses_nodes(place),
                words(container), told, started_by, _elastic(spec), mounted(holder, place),
            )  # fmt: skip
            yield Container((*here, "containers", number), container, ranks, container is main)
        yield from init_containers(pod, here)


def pods_of_replicas(manifest: Manifest) -> Iterator[Pod]:
    starter = {"PyTorchJob": "torch", "MPIJob": "mpi"}.get(str(manifest.get("kind")), "")
    for key in _REPLICAS:
        replicas = mapping(within(manifest, "spec", key))
        for name, replica in replicas.items():
            pod = mapping(within(replica, "template", "spec"))
            starting = within(replicas, "Launcher", "template", "spec") if key == "mpiReplicaSpecs" else pod
            yield Pod(
                ("spec", key, name, "template", "spec"), pod, trains=name != "Launcher",
                command=words(main_container(mapping(starting))), started_by=starter,
            )  # fmt: skip


def replicas_of(manifest: Manifest) -> int:
    """How many pods train; an MPIJob's Launcher doesn't."""
    replicas = [row for key in _REPLICAS for row in mapping(within(manifest, "spec", key)).items()]
    counts = [mapping(replica).get("replicas", 1) for name, replica in replicas if name != "Launcher"]
    return sum(count for count in counts if isinstance(count, int))


def _elastic(spec: dict[str, Any]) -> tuple[int, int] | None:
    policy = mapping(spec.get("elasticPolicy"))
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    return (least, most) if type(least) is int and type(most) is int and 1 <= least <= most else None


def check_replicas(spec: dict[str, Any], key: str, known: set[str], container: str | None) -> Iterator[Problem]:
    """`known`: the kinds of replica that the operator knows; `container`: the name of the one that it looks for."""
    for name, replica in mapping(spec.get(key)).items():
        where = ("spec", key, name)
        if name not in known:
            near = next((word for word in known if word.lower() == name.lower()), None)
            remedy = f"write {near}" if near else f"the operator knows {' and '.join(sorted(known))}"
            yield Problem(where, f"{name} is no kind of replica: {remedy}")
        policy, count = mapping(replica).get("restartPolicy"), mapping(replica).get("replicas")
        if isinstance(policy, str) and policy not in _RESTART:
            said = f"restartPolicy must be one of {', '.join(_RESTART)}, found {policy}"
            yield Problem((*where, "restartPolicy"), said)
        if isinstance(count, int) and count < 1:
            yield Problem((*where, "replicas"), f"replicas must be at least 1, found {count}: write 1")
        yield from _check_containers(replica, where, container)


def _check_containers(replica: Any, where: Where, name: str | None) -> Iterator[Problem]:
    here: Where = (*where, "template", "spec", "containers")
    containers = mappings(replica, "template", "spec", "containers")
    if not containers:
        yield Problem(where, "there is no container: write template.spec.containers")
    elif name and name not in [container.get("name") for container in containers]:
        yield Problem((*here, 0, "name"), f"the operator looks for a container called {name}: rename this one")
    for number, container in enumerate(containers):
        if not container.get("image"):
            yield Problem((*here, number), "the container has no image: write one")


def check_restarts(spec: dict[str, Any], key: str, often: str) -> Iterator[Problem]:
    replicas = mapping(spec.get(key))
    for name, replica in replicas.items():
        if "restartPolicy" in mapping(within(replica, "template", "spec")):
            used = mapping(replica).get("restartPolicy") or ("OnFailure" if key == "pytorchReplicaSpecs" else "Never")
            said = f"restartPolicy of the pod is overwritten by that of the replica ({used})"
            where: Where = ("spec", key, name, "template", "spec", "restartPolicy")
            yield hint(where, f"{said}: remove it here, and write what is meant beside replicas")
    never = bool(replicas) and all(mapping(replica).get("restartPolicy") == "Never" for replica in replicas.values())
    # A Job makes new pods in place of those that failed, whatever the policy of the pod.
    forever = not never or key == "mpiReplicaSpecs"
    if within(spec, "runPolicy", "backoffLimit") is None and forever:
        where = ("spec", "runPolicy") if "runPolicy" in spec else ("spec",)
        yield hint(where, f"backoffLimit is missing, so {often}: write runPolicy: {{backoffLimit: 3}}")
