"""What will hurt inside a pod: CPUs and threads, memory, libraries, variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from cputrain.cluster import check_command, job_containers, names, quantity, secrets_in_clear
from cputrain.cluster.job_containers import Container, Pod
from cputrain.cluster.loose_values import items, mapping
from cputrain.cluster.schema import Problem, Where

# Variables that are meant for a training, whoever sets them.
_FOR_RANKS = re.compile(r"OMP_|KMP_|GOMP_|CCL_|HF_|MASTER_|LD_PRELOAD$|TRANSFORMERS_|TOKENIZERS_")


def problems(manifest: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Problem]:
    """`others`: the manifests beside it, of which one may be a TrainJob's runtime."""
    for container in job_containers.containers(manifest, others):
        if container.resources or container.needs_resources:
            yield from _resources(container)
        yield from _threads(container)
        yield from _variables(container)
        yield from _image(container)
        yield from check_command.problems(container)
    for pod in job_containers.pods(manifest, others):
        yield from _shared_memory(pod)


def _rows(container: Container) -> Iterator[tuple[Where, str, str]]:
    """The variables of a container whose values stand in the manifest."""
    for number, row in enumerate(items(container.value.get("env"))):
        name, value = mapping(row).get("name"), mapping(row).get("value")
        if isinstance(name, str) and isinstance(value, str):
            yield (*container.where, "env", number), name, value


def _amount(value: Any) -> Fraction | None:
    """A quantity's value; what isn't one is the schema's to complain about."""
    try:
        return quantity.parse(str(value), "") if isinstance(value, (str, int, float)) else None
    except ValueError:
        return None


def _resources(container: Container) -> Iterator[Problem]:
    where = (*container.where, container.resources_key) if container.resources else container.where
    limits, requests = mapping(container.resources.get("limits")), mapping(container.resources.get("requests"))
    for name in ("cpu", "memory"):
        limit, request = limits.get(name), requests.get(name)
        if limit is None:
            yield Problem(
                where, f"{name} has no limit, so the pod isn't Guaranteed, and its neighbours slow it down: set it"
            )
        elif request is not None and _amount(limit) != _amount(request):
            yield Problem(
                (*where, "requests", name),
                f"{name} has limit {limit} and request {request}, so the pod isn't Guaranteed: make them equal",
            )
        amount = _amount(limit)
        if name == "cpu" and amount is not None and amount.denominator != 1:
            yield Problem(
                (*where, "limits", name), f"cpu {limit} is no whole number, and only whole CPUs are pinned: round it"
            )


def _threads(container: Container) -> Iterator[Problem]:
    limit = _amount(mapping(container.ranks.resources.get("limits")).get("cpu"))
    said = check_command.processes_of_torchrun(container)
    processes = int(said) if said and re.fullmatch(r"\d{1,6}", said, re.ASCII) else container.ranks.processes or 1
    for place, name, value in _rows(container):
        if name == "OMP_NUM_THREADS" and re.fullmatch(r"\d{1,6}", value, re.ASCII) and limit is not None:
            needed = int(value) * processes
            if needed > limit:
                ranks = f"{processes} processes of" if processes > 1 else "1 process of"
                yield Problem(
                    place,
                    f"{ranks} {value} threads need {needed} CPUs, and the pod is limited to {float(limit):g}: threads "
                    "wait for each other; lower OMP_NUM_THREADS",
                )


def _variables(container: Container) -> Iterator[Problem]:
    for place, name, value in _rows(container):
        if name == "TRANSFORMERS_CACHE":
            yield Problem(place, "TRANSFORMERS_CACHE does nothing any more: set HF_HOME")
        if value and (secrets_in_clear.is_secret_name(name) or secrets_in_clear.looks_secret(value)):
            yield Problem(
                place, f"{name} stands here in clear, for everyone who can read jobs: use a Secret and secretKeyRef"
            )
        if name == "LD_PRELOAD":
            for library in re.split(r"[:\s]+", value):
                found = names.without_release(library)
                said = (
                    f"{library} is one release's file name, which images don't have, and it is skipped: write {found}"
                )
                yield from [Problem(place, said)] if found else []
        if container.where[1:3] == ("mpiReplicaSpecs", "Worker") and _FOR_RANKS.match(name):
            yield Problem(
                place,
                f"{name} doesn't reach the ranks, which sshd starts without the Worker's variables: set it on the "
                f"Launcher, and forward it (mpirun -x {name})",
            )


def _image(container: Container) -> Iterator[Problem]:
    image = container.value.get("image")
    if isinstance(image, str):
        try:
            names.image(image, "the image")
        except ValueError:
            yield Problem(
                (*container.where, "image"),
                f"{image!r} is not an image's name, so it can't be pulled: write the real one",
            )


def _shared_memory(pod: Pod) -> Iterator[Problem]:
    """/dev/shm of the container that trains: a side car needs none, and a patch may leave it to its runtime."""
    if not pod.trains:
        return
    known = {str(mapping(volume).get("name")): row for row, volume in enumerate(items(pod.spec.get("volumes")))}
    found = False
    for _, container in job_containers.named(pod.spec):
        for mount in map(mapping, items(container.get("volumeMounts"))):
            if str(mount.get("mountPath")).rstrip("/") == "/dev/shm":
                found = True
                row = known.get(str(mount.get("name")))
                yield from _size_of_shared_memory(pod, row) if row is not None else ()
    if not found and not pod.is_part and "/dev/shm" not in pod.mounted_elsewhere:
        first = next((number for number, _ in job_containers.named(pod.spec)), None)
        if first is not None:
            yield Problem(
                (*pod.where, "containers", first),
                "/dev/shm has 64 MiB, and data loaders with workers die of it: mount an emptyDir of medium Memory "
                "with a sizeLimit there",
            )


def _size_of_shared_memory(pod: Pod, row: int) -> Iterator[Problem]:
    volume, place = mapping(items(pod.spec.get("volumes"))[row]), (*pod.where, "volumes", row)
    folder = mapping(volume.get("emptyDir"))
    if folder.get("medium") == "Memory" and folder.get("sizeLimit") is None:
        yield Problem(
            place,
            "/dev/shm has no sizeLimit, and what fills it counts as the pod's memory until the pod is killed: "
            "write sizeLimit: 8Gi",
        )
    elif "emptyDir" in volume and folder.get("medium") != "Memory":
        yield Problem(
            place, "/dev/shm is a folder on the node's disk: write emptyDir: {medium: Memory, sizeLimit: 8Gi}"
        )
