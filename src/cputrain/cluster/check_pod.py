"""What will hurt inside a pod: CPUs and threads, memory, libraries, variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from cputrain.cluster import names, quantity, secrets_in_clear
from cputrain.cluster.schema import Problem, Where

_FEATURE = "feature.node.kubernetes.io/cpu-cpuid.AMXBF16"


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    kind, spec = manifest.get("kind"), mapping(manifest.get("spec"))
    processes = _processes(spec)
    if kind == "TrainJob":
        trainer, here = mapping(spec.get("trainer")), ("spec", "trainer")
        resources = mapping(trainer.get("resourcesPerNode"))
        yield from _resources(resources, (*here, "resourcesPerNode"))
        yield from _threads(trainer, here, resources, processes)
        yield from _variables(trainer, here)
        yield from _arguments(trainer, here)
    for where, template in _templates(manifest):
        for place, container in containers_of(template, where):
            resources = mapping(container.get("resources"))
            in_train_job = kind in ("TrainingRuntime", "ClusterTrainingRuntime")
            if resources or not in_train_job:
                yield from _resources(resources, (*place, "resources") if resources else place)
            # The Launcher's variables are for the ranks, which run in the Workers.
            running = _worker_resources(spec) if "Launcher" in where else resources
            yield from _threads(container, place, running, processes)
            yield from _variables(container, place)
            yield from _arguments(container, place)
            yield from _image(container, place)
            yield from _bf16(container, place, mapping(template.get("spec")))
        if "Launcher" not in where:
            yield from _shared_memory(template, where)


def _templates(manifest: dict[str, Any]) -> Iterator[tuple[Where, dict[str, Any]]]:
    spec = mapping(manifest.get("spec"))
    for replicas in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        for name, replica in mapping(spec.get(replicas)).items():
            yield ("spec", replicas, name, "template"), mapping(mapping(replica).get("template"))
    jobs = items(mapping(mapping(spec.get("template")).get("spec")).get("replicatedJobs"))
    for number, job in enumerate(jobs):
        here = ("spec", "template", "spec", "replicatedJobs", number, "template", "spec", "template")
        yield here, mapping(mapping(mapping(mapping(job).get("template")).get("spec")).get("template"))


def containers_of(template: Any, where: Where) -> Iterator[tuple[Where, dict[str, Any]]]:
    for number, container in enumerate(items(mapping(mapping(template).get("spec")).get("containers"))):
        if isinstance(container, dict):
            yield (*where, "spec", "containers", number), container


def words(container: dict[str, Any]) -> list[str]:
    return [word for key in ("command", "args") for word in items(container.get(key)) if isinstance(word, str)]


def variables(container: dict[str, Any]) -> Iterator[tuple[int, tuple[str, str]]]:
    for number, row in enumerate(items(container.get("env"))):
        name, value = mapping(row).get("name"), mapping(row).get("value")
        if isinstance(name, str) and isinstance(value, str):
            yield number, (name, value)


def _worker_resources(spec: dict[str, Any]) -> dict[str, Any]:
    worker = mapping(mapping(spec.get("mpiReplicaSpecs")).get("Worker"))
    found = [container for _, container in containers_of(worker.get("template"), ())]
    return mapping(found[0].get("resources")) if found else {}


def _processes(spec: dict[str, Any]) -> int | None:
    counts = (spec.get("nprocPerNode"), mapping(spec.get("trainer")).get("numProcPerNode"), spec.get("slotsPerWorker"))
    for count in counts:
        if isinstance(count, int) or (isinstance(count, str) and re.fullmatch(r"\d{1,6}", count, re.ASCII)):
            return int(count)
    return None


def _amount(value: Any) -> Fraction | None:
    """A quantity's value; what isn't one is the schema's to complain about."""
    try:
        return quantity.parse(str(value), "") if isinstance(value, (str, int, float)) else None
    except ValueError:
        return None


def _resources(resources: dict[str, Any], where: Where) -> Iterator[Problem]:
    limits, requests = mapping(resources.get("limits")), mapping(resources.get("requests"))
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


def _threads(
    container: dict[str, Any], where: Where, resources: dict[str, Any], processes: int | None
) -> Iterator[Problem]:
    limit = _amount(mapping(resources.get("limits")).get("cpu"))
    for row, (name, value) in variables(container):
        if name == "OMP_NUM_THREADS" and value.isdecimal() and value.isascii() and len(value) < 7 and limit is not None:
            needed = int(value) * (processes or 1)
            if needed > limit:
                yield Problem(
                    (*where, "env", row),
                    f"{processes or 1} processes of {value} threads need {needed} CPUs, and the pod is limited to "
                    f"{float(limit):g}: threads wait for each other; lower OMP_NUM_THREADS",
                )


def _variables(container: dict[str, Any], where: Where) -> Iterator[Problem]:
    for row, (name, value) in variables(container):
        place = (*where, "env", row)
        if name == "TRANSFORMERS_CACHE":
            yield Problem(place, "TRANSFORMERS_CACHE does nothing any more: set HF_HOME")
        if value and (secrets_in_clear.is_secret_name(name) or secrets_in_clear.looks_secret(value)):
            yield Problem(
                place, f"{name} stands here in clear, for everyone who can read jobs: use a Secret and secretKeyRef"
            )
        if name == "LD_PRELOAD":
            yield from (Problem(place, sentence) for sentence in _preloads(value))


def _preloads(value: str) -> Iterator[str]:
    for library in re.split(r"[:\s]+", value):
        found = re.fullmatch(r"(?:.*/)?(.+\.so\.\d+)\.[\d.]+", library)
        if found:
            yield f"{library} is one release's file name, which images don't have, and it is skipped: write {found[1]}"


def _arguments(container: dict[str, Any], where: Where) -> Iterator[Problem]:
    for key in ("command", "args"):
        rows = items(container.get(key))
        for row, word in enumerate(rows):
            if not isinstance(word, str):
                continue
            option, equals, value = word.partition("=")
            named = word.startswith("--") and secrets_in_clear.is_secret_name(option.removeprefix("--"))
            following = rows[row + 1] if row + 1 < len(rows) else None
            given = bool(value) if equals else isinstance(following, str) and not following.startswith(("-", "$("))
            if secrets_in_clear.looks_secret(word) or (named and given and not value.startswith("$(")):
                yield Problem(
                    (*where, key, row),
                    "a token stands here in clear: put it into a Secret, and into env by secretKeyRef",
                )


def _image(container: dict[str, Any], where: Where) -> Iterator[Problem]:
    image = container.get("image")
    if isinstance(image, str):
        try:
            names.image(image, "the image")
        except ValueError:
            yield Problem(
                (*where, "image"), f"{image!r} is not an image's name, so it can't be pulled: write the real one"
            )


def _bf16(container: dict[str, Any], where: Where, spec: dict[str, Any]) -> Iterator[Problem]:
    """Stock PyTorch emulates bf16 where the CPU has none; cputrain never does."""
    command = words(container)
    if "--bf16" not in command or any(word.rsplit("/", 1)[-1] == "cputrain" for word in command):
        return
    if not spec.get("nodeSelector") and not spec.get("affinity"):
        key = next(key for key in ("args", "command") if "--bf16" in items(container.get(key)))
        yield Problem(
            (*where, key, items(container[key]).index("--bf16")),
            "--bf16 on a node without bf16 instructions is emulated, some 13 times slower: choose nodes with "
            f'nodeSelector {_FEATURE}: "true", or start the script with cputrain launch',
        )


def _shared_memory(template: dict[str, Any], where: Where) -> Iterator[Problem]:
    spec = mapping(template.get("spec"))
    volumes = {
        mapping(volume).get("name"): (row, mapping(volume))
        for row, volume in enumerate(items(spec.get("volumes")))
        if isinstance(mapping(volume).get("name"), str)
    }
    for place, container in containers_of(template, where):
        mounts = [mapping(mount) for mount in items(container.get("volumeMounts"))]
        name = next((mount.get("name") for mount in mounts if mount.get("mountPath") == "/dev/shm"), None)
        if name is None:
            yield Problem(
                place,
                "/dev/shm has 64 MiB, and data loaders with workers die of it: mount an emptyDir of medium Memory "
                "with a sizeLimit there",
            )
        elif isinstance(name, str) and name in volumes:
            row, volume = volumes[name]
            folder = mapping(volume.get("emptyDir"))
            if folder.get("medium") == "Memory" and folder.get("sizeLimit") is None:
                yield Problem(
                    (*where, "spec", "volumes", row),
                    "/dev/shm has no sizeLimit, and what fills it counts as the pod's memory until the pod is killed: "
                    "write sizeLimit: 8Gi",
                )
