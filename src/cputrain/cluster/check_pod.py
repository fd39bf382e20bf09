"""What will hurt inside a pod: CPUs and threads, memory, libraries, variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from cputrain import secrets_in_clear
from cputrain.cluster import (
    check_command,
    check_flags,
    check_volumes,
    job_containers,
    names,
    quantity,
)
from cputrain.cluster.command_words import processes_of_torchrun, runs_python
from cputrain.cluster.job_containers import Container
from cputrain.cluster.manifest import Problem, Where, hint, items, mapping, warning

# Variables that are meant for a training, in whichever container they are set.
_FOR_RANKS = re.compile(r"OMP_|KMP_|GOMP_|CCL_|HF_|MASTER_|LD_PRELOAD$|TRANSFORMERS_|TOKENIZERS_")
# What runc needs to start any process, and what importing torch takes.
_LEAST, _LEAST_FOR_TORCH = 6 * 2**20, 256 * 2**20


def problems(manifest: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Problem]:
    """`others`: the manifests beside it, of which one may be a TrainJob's runtime."""
    # The training operator's MPIJob starts ranks by `kubectl exec`, which keeps the container's variables.
    by_ssh = manifest.get("apiVersion") != "kubeflow.org/v1"
    for container in job_containers.containers(manifest, others):
        if container.resources or container.needs_resources:
            yield from _resources(container)
        yield from _memory(container)
        yield from _threads(container)
        yield from _variables(container)
        yield from _out_of_reach(container) if by_ssh else ()
        yield from _image(container)
        yield from check_command.problems(container)
        yield from check_flags.problems(container)
        yield from check_volumes.of_container(container)
    for pod in job_containers.pods(manifest, others):
        yield from check_volumes.of_pod(pod)


def _rows(container: Container) -> Iterator[tuple[Where, str, str]]:
    """The variables of a container whose values stand in the manifest."""
    for number, row in enumerate(items(container.value.get("env"))):
        name, value = mapping(row).get("name"), mapping(row).get("value")
        if isinstance(name, str) and isinstance(value, str):
            yield (*container.where, "env", number), name, value


def _resources(container: Container) -> Iterator[Problem]:
    where = (*container.where, container.resources_key) if container.resources else container.where
    limits, requests = mapping(container.resources.get("limits")), mapping(container.resources.get("requests"))
    missing = [name for name in ("cpu", "memory") if limits.get(name) is None]
    if missing:
        have = "has" if len(missing) == 1 else "have"
        said = f"{' and '.join(missing)} {have} no limit, so the pod isn't Guaranteed, and its neighbours slow it down"
        yield hint(where, f"{said}: set {'it' if len(missing) == 1 else 'both'}")
    for name in ("cpu", "memory"):
        limit, request = limits.get(name), requests.get(name)
        if limit is not None and request is not None and quantity.found(limit) != quantity.found(request):
            yield hint(
                (*where, "requests", name),
                f"{name} has limit {limit} and request {request}, so the pod isn't Guaranteed: make them equal",
            )
    amount = quantity.found(limits.get("cpu"))
    if amount is not None and amount.denominator != 1:
        said = f"cpu {limits['cpu']} is no whole number, and only whole CPUs are pinned: round it"
        yield hint((*where, "limits", "cpu"), said)


def _memory(container: Container) -> Iterator[Problem]:
    """`64M` and `64m` for 64Gi: one letter, a factor of a thousand or more."""
    for side in ("limits", "requests"):
        text = mapping(container.resources.get(side)).get("memory")
        amount, where = quantity.found(text), (*container.where, container.resources_key, side, "memory")
        if amount is None:
            continue
        meant = re.sub(r"[A-Za-z]+$", "", str(text)) + "Gi"
        if amount < _LEAST:
            said = f"memory {text} is {quantity.in_words(amount)}, in which no process starts: did you mean {meant}?"
            yield Problem(where, said)
        elif amount < _LEAST_FOR_TORCH and side == "limits" and container.trains and _is_python(container):
            said = f"memory {text} is {quantity.in_words(amount)}, less than importing torch takes"
            yield warning(where, f"{said}: did you mean {meant}?")


def _is_python(container: Container) -> bool:
    return runs_python(container.ranks.command or job_containers.words(container.value))


def _threads(container: Container) -> Iterator[Problem]:
    limit = quantity.found(mapping(container.ranks.resources.get("limits")).get("cpu"))
    said = processes_of_torchrun(container)
    processes = int(said[0]) if said and re.fullmatch(r"\d{1,6}", said[0], re.ASCII) else container.ranks.processes or 1
    for place, name, value in _rows(container):
        if name == "OMP_NUM_THREADS" and re.fullmatch(r"\d{1,6}", value, re.ASCII) and limit is not None:
            needed = int(value) * processes
            if needed > limit:
                yield warning(place, _too_many_threads(processes, value, needed, limit))


def _too_many_threads(processes: int, threads: str, needed: int, limit: Fraction) -> str:
    ranks = f"{processes} processes of" if processes > 1 else "1 process of"
    return (
        f"{ranks} {threads} threads need {needed} CPUs, and the pod is limited to {float(limit):g}: threads wait for "
        "each other; lower OMP_NUM_THREADS"
    )


def _variables(container: Container) -> Iterator[Problem]:
    for place, name, value in _rows(container):
        if name == "TRANSFORMERS_CACHE":
            yield warning(place, "TRANSFORMERS_CACHE does nothing any more: set HF_HOME")
        clear = f"{name} stands here in clear, for everyone who can read jobs: use a Secret and secretKeyRef"
        if value and secrets_in_clear.looks_secret(value):
            yield Problem(place, clear)
        elif value and secrets_in_clear.is_secret_name(name):
            yield warning(place, clear)
        if name == "LD_PRELOAD":
            for library in re.split(r"[:\s]+", value):
                found = names.without_release(library)
                said = (
                    f"{library} is one release's file name, which images don't have, and it is skipped: write {found}"
                )
                yield from [warning(place, said)] if found else []


def _out_of_reach(container: Container) -> Iterator[Problem]:
    for place, name, _ in _rows(container) if container.where[1:3] == ("mpiReplicaSpecs", "Worker") else ():
        if _FOR_RANKS.match(name):
            yield warning(
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
