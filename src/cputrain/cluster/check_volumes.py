"""What will hurt in a pod's volumes: mounts of nothing, results beside the volume, /dev/shm."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cputrain.cluster import job_containers, quantity
from cputrain.cluster.command_words import option, place, runs_python, words
from cputrain.cluster.job_containers import Container, Pod
from cputrain.cluster.manifest import Problem, hint, items, mapping, warning

# Volumes that end with the pod, or can't be written to.
_PASSING = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "image")


def of_pod(pod: Pod) -> Iterator[Problem]:
    yield from _mounts(pod)
    yield from _shared_memory(pod)


def of_container(container: Container) -> Iterator[Problem]:
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


def _mounts(pod: Pod) -> Iterator[Problem]:
    """The API server refuses a pod that mounts what it doesn't have."""
    known = {str(mapping(volume).get("name")) for volume in items(pod.spec.get("volumes"))}
    for key in ("initContainers", "containers"):
        for number, container in job_containers.named(pod.spec, key):
            for row, mount in enumerate(map(mapping, items(container.get("volumeMounts")))):
                name = mount.get("name")
                where = (*pod.where, key, number, "volumeMounts", row)
                elsewhere = pod.volumes_elsewhere
                if isinstance(name, str) and elsewhere is not None and name not in known | elsewhere:
                    has = f" (it has {', '.join(sorted(known))})" if known else ""
                    said = f"there is no volume {name} in this pod{has}"
                    yield Problem(where, f"{said}: write it under volumes, or mount one that is there")


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
                yield from _size_of_shared_memory(pod, row, container) if row is not None else ()
    if not found and not pod.is_part and "/dev/shm" not in pod.mounted_elsewhere and _has_data_loaders(pod):
        first = next((number for number, _ in job_containers.named(pod.spec)), None)
        if first is not None:
            yield hint(
                (*pod.where, "containers", first),
                "/dev/shm has 64 MiB, and data loaders with workers die of it: mount an emptyDir of medium Memory "
                "with a sizeLimit there",
            )


def _has_data_loaders(pod: Pod) -> bool:
    """Only Python programs have PyTorch's; what an image starts by itself is one if torchrun's variables are for it.

    JAX and XGBoost have none, and Flux mounts a /dev/shm of its own.
    """
    if pod.started_by not in ("torch", "mpi"):
        return False
    return runs_python(pod.command) or (pod.started_by == "torch" and not _has_command(pod))


def _has_command(pod: Pod) -> bool:
    return any(container.get("command") for _, container in job_containers.named(pod.spec)) or bool(
        pod.command and not pod.command[0].startswith("-")
    )


def _size_of_shared_memory(pod: Pod, row: int, container: Mapping[str, Any]) -> Iterator[Problem]:
    volume, where = mapping(items(pod.spec.get("volumes"))[row]), (*pod.where, "volumes", row)
    folder = mapping(volume.get("emptyDir"))
    size, text = quantity.found(folder.get("sizeLimit")), folder.get("sizeLimit")
    limits = mapping(mapping(pod.resources or container.get("resources")).get("limits"))
    memory = quantity.found(limits.get("memory"))
    if folder.get("medium") == "Memory" and text is None:
        yield hint(
            where,
            "/dev/shm has no sizeLimit, and what fills it counts as the pod's memory until the pod is killed: "
            "write sizeLimit: 8Gi",
        )
    elif "emptyDir" in volume and folder.get("medium") != "Memory":
        yield hint(where, "/dev/shm is a folder on the node's disk: write emptyDir: {medium: Memory, sizeLimit: 8Gi}")
    elif size is not None and memory is not None and size > memory:
        smaller = quantity.in_mebibytes(int(memory) // 8)
        yield warning(
            (*where, "emptyDir", "sizeLimit"),
            f"/dev/shm may grow to {text}, and counts as memory, of which there is {limits['memory']}: the pod is "
            f"killed before it is full; write sizeLimit: {smaller}",
        )
