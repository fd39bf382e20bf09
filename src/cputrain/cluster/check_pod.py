"""What will hurt inside a pod: CPUs and threads, memory, libraries, variables, volumes, /dev/shm."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cputrain import secrets_in_clear
from cputrain.cluster import check_command, kinds, syntax
from cputrain.cluster.check_command import option, place, processes_of_torchrun, runs_python, words
from cputrain.cluster.containers import Container, Pod, named, volumes_of
from cputrain.cluster.containers import words as word_list
from cputrain.cluster.manifest import Problem, Where, hint, mapping, mappings, warning, within

# Variables that are meant for a training, in any container.
_FOR_RANKS = re.compile(r"OMP_|KMP_|GOMP_|CCL_|HF_|MASTER_|LD_PRELOAD$|TRANSFORMERS_|TOKENIZERS_")
# What runc needs to start any process, and what importing torch takes.
_LEAST, _LEAST_FOR_TORCH = 6 * 2**20, 256 * 2**20
# Volumes that end with the pod, or can't be written to.
_PASSING = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "image")


def problems(manifest: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Problem]:
    """`others`: the manifests beside it, of which one may be a TrainJob's runtime."""
    # The training operator's MPIJob starts ranks by `kubectl exec`, which keeps the container's variables.
    by_ssh = manifest.get("apiVersion") != "kubeflow.org/v1"
    for container in kinds.containers(manifest, others):
        if container.resources or container.needs_resources:
            yield from _resources(container)
        for rule in (_memory, _threads, _variables, _image, check_command.problems, _output_folder):
            yield from rule(container)
        yield from _out_of_reach(container) if by_ssh else ()
    for pod in kinds.pods(manifest, others):
        yield from _volume_mounts(pod)
        yield from _shared_memory(pod)


def _rows(container: Container) -> Iterator[tuple[Where, str, str]]:
    """The variables of a container whose values stand in the manifest."""
    for where, row in container.variables:
        name, value = row.get("name"), row.get("value")
        if isinstance(name, str) and isinstance(value, str):
            yield where, name, value


def _resources(container: Container) -> Iterator[Problem]:
    where = (*container.where, container.resources_key) if container.resources else container.where
    limits, requests = mapping(container.resources.get("limits")), mapping(container.resources.get("requests"))
    missing = [name for name in ("cpu", "memory") if limits.get(name) is None]
    if missing:
        have, them = ("has", "it") if len(missing) == 1 else ("have", "both")
        said = f"{' and '.join(missing)} {have} no limit, so the pod isn't Guaranteed, and its neighbours slow it down"
        yield hint(where, f"{said}: set {them}")
    for name in ("cpu", "memory"):
        limit, request = limits.get(name), requests.get(name)
        if limit is not None and request is not None and syntax.quantity(limit) != syntax.quantity(request):
            said = f"{name} has limit {limit} and request {request}, so the pod isn't Guaranteed: make them equal"
            yield hint((*where, "requests", name), said)
    amount = syntax.quantity(limits.get("cpu"))
    if amount is not None and amount.denominator != 1:
        said = f"cpu {limits['cpu']} is no whole number, and only whole CPUs are pinned: round it"
        yield hint((*where, "limits", "cpu"), said)


def _memory(container: Container) -> Iterator[Problem]:
    """`64M` and `64m` for 64Gi: one letter, a factor of a thousand or more."""
    trains_python = container.trains and runs_python(container.ranks.command or word_list(container.value))
    for side in ("limits", "requests"):
        text = within(container.resources, side, "memory")
        amount, where = syntax.quantity(text), (*container.where, container.resources_key, side, "memory")
        if amount is None:
            continue
        meant = re.sub(r"[A-Za-z]+$", "", str(text)) + "Gi"
        if amount < _LEAST:
            said = f"memory {text} is {syntax.size_in_words(amount)}, in which no process starts: did you mean {meant}?"
            yield Problem(where, said)
        elif amount < _LEAST_FOR_TORCH and side == "limits" and trains_python:
            said = f"memory {text} is {syntax.size_in_words(amount)}, less than importing torch takes"
            yield warning(where, f"{said}: did you mean {meant}?")


def _threads(container: Container) -> Iterator[Problem]:
    limit = syntax.quantity(within(container.ranks.resources, "limits", "cpu"))
    found, processes = processes_of_torchrun(container), container.ranks.processes or 1
    if found and re.fullmatch(r"\d{1,6}", found[0], re.ASCII):
        processes = int(found[0])
    for where, name, value in _rows(container):
        if name != "OMP_NUM_THREADS" or not re.fullmatch(r"\d{1,6}", value, re.ASCII) or limit is None:
            continue
        needed = int(value) * processes
        ranks = f"{processes} processes of" if processes > 1 else "1 process of"
        said = f"{ranks} {value} threads need {needed} CPUs, and the pod is limited to {float(limit):g}"
        if needed > limit:
            yield warning(where, f"{said}: threads wait for each other; lower OMP_NUM_THREADS")


def _variables(container: Container) -> Iterator[Problem]:
    for where, name, value in _rows(container):
        if name == "TRANSFORMERS_CACHE":
            yield warning(where, "TRANSFORMERS_CACHE does nothing any more: set HF_HOME")
        clear = f"{name} stands here in clear, for everyone who can read jobs: use a Secret and secretKeyRef"
        if value and secrets_in_clear.looks_secret(value):
            yield Problem(where, clear)
        elif value and secrets_in_clear.is_secret_name(name):
            yield warning(where, clear)
        if name == "LD_PRELOAD":
            for library in re.split(r"[:\s]+", value):
                if found := syntax.without_release(library):
                    said = f"{library} is one release's file name, which images don't have, and it is skipped"
                    yield warning(where, f"{said}: write {found}")


def _out_of_reach(container: Container) -> Iterator[Problem]:
    for where, name, _ in _rows(container) if container.where[1:3] == ("mpiReplicaSpecs", "Worker") else ():
        if _FOR_RANKS.match(name):
            said = f"{name} doesn't reach the ranks, which sshd starts without the Worker's variables"
            yield warning(where, f"{said}: set it on the Launcher, and forward it (mpirun -x {name})")


def _image(container: Container) -> Iterator[Problem]:
    image = container.value.get("image")
    if isinstance(image, str):
        try:
            syntax.image(image, "the image")
        except ValueError:
            said = f"{image!r} is not an image's name, so it can't be pulled: write the real one"
            yield Problem((*container.where, "image"), said)


def _output_folder(container: Container) -> Iterator[Problem]:
    """`--output_dir` on no volume, which means that the trained model is lost with the pod."""
    command, mounts = words(container), container.ranks.mounts
    found = option(command, "--output_dir") if container.trains and mounts is not None else None
    if not found or option(command, "--push_to_hub") or not re.match(r"[\w./]", found[0]) or "://" in found[0]:
        return
    assert mounts is not None
    kept = sorted(path for path, volume in mounts.items() if volume and not any(kind in volume for kind in _PASSING))
    working = container.value.get("workingDir")
    folder = posixpath.normpath(posixpath.join(str(working or ""), found[0]))
    if any(f"{folder}/".startswith(f"{path.rstrip('/')}/") for path in kept):
        return
    where, said = place(container, found[1]), f"--output_dir {found[0]} is on no volume, so it ends with the pod"
    if not folder.startswith("/") and kept:
        yield hint(where, f"{said}, unless the image's working directory is: write a path under {kept[0]}")
    else:
        remedy = f"write a path under {kept[0]}" if kept else "mount a PersistentVolumeClaim, and write a path under it"
        yield warning(where, f"{said}: {remedy}")


def _volume_mounts(pod: Pod) -> Iterator[Problem]:
    """The API server refuses a pod that mounts what it doesn't have."""
    known, elsewhere = volumes_of(pod.spec), pod.volumes_elsewhere
    has = f" (it has {', '.join(sorted(known))})" if known else ""
    for key in ("initContainers", "containers") if elsewhere is not None else ():
        for number, container in named(pod.spec, key):
            for row, mount in enumerate(mappings(container, "volumeMounts")):
                name = mount.get("name")
                if isinstance(name, str) and name not in {*known, *(elsewhere or ())}:
                    said = f"there is no volume {name} in this pod{has}"
                    where = (*pod.where, key, number, "volumeMounts", row)
                    yield Problem(where, f"{said}: write it under volumes, or mount one that is there")


def _shared_memory(pod: Pod) -> Iterator[Problem]:
    """/dev/shm of the container that trains: a side car needs none, and a patch may leave it to its runtime."""
    if not pod.trains:
        return
    known = {str(volume.get("name")): row for row, volume in enumerate(mappings(pod.spec, "volumes"))}
    found = False
    for _, container in named(pod.spec):
        for mount in mappings(container, "volumeMounts"):
            if str(mount.get("mountPath")).rstrip("/") == "/dev/shm":
                found = True
                row = known.get(str(mount.get("name")))
                yield from _size_of_shared_memory(pod, row, container) if row is not None else ()
    first = next((number for number, _ in named(pod.spec)), None)
    elsewhere = found or pod.is_part or "/dev/shm" in pod.mounted_elsewhere
    if first is not None and not elsewhere and _has_data_loaders(pod):
        said = "/dev/shm has 64 MiB, and data loaders with workers die of it"
        where = (*pod.where, "containers", first)
        yield hint(where, f"{said}: mount an emptyDir of medium Memory with a sizeLimit there")


def _has_data_loaders(pod: Pod) -> bool:
    """Only Python programs have PyTorch's; what an image starts by itself is one if torchrun's variables are for it.

    JAX and XGBoost have none, and Flux mounts a /dev/shm of its own.
    """
    given = any(container.get("command") for _, container in named(pod.spec))
    has_command = given or bool(pod.command and not pod.command[0].startswith("-"))
    if pod.started_by not in ("torch", "mpi"):
        return False
    return runs_python(pod.command) or (pod.started_by == "torch" and not has_command)


def _size_of_shared_memory(pod: Pod, row: int, container: Mapping[str, Any]) -> Iterator[Problem]:
    volume, where = mappings(pod.spec, "volumes")[row], (*pod.where, "volumes", row)
    folder = mapping(volume.get("emptyDir"))
    text, limit = folder.get("sizeLimit"), within(pod.resources or container.get("resources"), "limits", "memory")
    size, memory = syntax.quantity(text), syntax.quantity(limit)
    if folder.get("medium") == "Memory" and text is None:
        said = "/dev/shm has no sizeLimit, and what fills it counts as the pod's memory until the pod is killed"
        yield hint(where, f"{said}: write sizeLimit: 8Gi")
    elif "emptyDir" in volume and folder.get("medium") != "Memory":
        yield hint(where, "/dev/shm is a folder on the node's disk: write emptyDir: {medium: Memory, sizeLimit: 8Gi}")
    elif size is not None and memory is not None and size > memory:
        said = f"/dev/shm may grow to {text}, and counts as memory, of which there is {limit}"
        remedy = f"the pod is killed before it is full; write sizeLimit: {syntax.in_mebibytes(int(memory) // 8)}"
        yield warning((*where, "emptyDir", "sizeLimit"), f"{said}: {remedy}")
