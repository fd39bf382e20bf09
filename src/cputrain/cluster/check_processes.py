"""How many processes a job starts: counts that the manifest leaves out, and counts that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster import job_containers
from cputrain.cluster.command_words import MPIRUN, TORCHRUN, Word, calls, option, place, processes_of_torchrun, words
from cputrain.cluster.job_containers import Container
from cputrain.cluster.manifest import Problem, Where, mapping, warning, within

_COUNT = re.compile(r"[1-9]\d{0,5}", re.ASCII)
# Options of mpirun by which the slots of the operator's hostfile don't count: more ranks than slots on purpose,
# another list of hosts, a number of hosts that changes.
_OWN_PLACES = (
    "--oversubscribe", "-oversubscribe", "--hostfile", "-hostfile", "-f", "--host", "-host", "-H",
    "--host-discovery-script", "-ppn", "-N",
)  # fmt: skip

_WITH_TWO_VALUES = ("mca", "gmca", "prtemca", "pmixmca", "genv", "env")
_WITHOUT_VALUE = (
    "allow-run-as-root", "oversubscribe", "tag-output", "timestamp-output", "report-bindings", "display-map", "v",
    "verbose", "q", "l", "nolocal", "bynode", "byslot", "print-all-exitcodes", "prepend-rank", "genvall", "envall",
)  # fmt: skip


def problems(manifest: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Problem]:
    """`others`: the manifests beside it, of which one may be a TrainJob's runtime."""
    kind = manifest.get("kind")
    containers = [each for each in job_containers.containers(manifest, others) if each.trains]
    if kind == "PyTorchJob":
        yield from _uncounted_pytorchjob(mapping(manifest.get("spec")), containers)
    elif kind == "TrainJob":
        yield from _uncounted_trainjob(manifest, others, containers)
    for container in containers:
        if kind == "MPIJob" and "Launcher" in container.where:
            yield from _mpirun(manifest, container)
        elif container.ranks.started_by == "torch":
            yield from _torchrun(container)
            yield from _launch(container, *_sizes(manifest, container))


def _uncounted_pytorchjob(spec: dict[str, Any], containers: list[Container]) -> Iterator[Problem]:
    """The operator then sets `auto`, which torchrun, and only torchrun, takes for the node's GPUs or else its CPUs."""
    counted = within(spec, "elasticPolicy", "nProcPerNode") is not None
    counting = [each for each in containers if _reads_torchruns_variable(each) and not each.ranks.has_gpus]
    if counting and spec.get("nprocPerNode") in (None, "auto", "cpu") and not counted:
        yield warning(
            ("spec", "nprocPerNode") if "nprocPerNode" in spec else ("spec",),
            "nprocPerNode is missing, and torchrun then starts one process for every CPU of the node, until memory "
            'ends: write nprocPerNode: "1", in quotes',
        )


def _reads_torchruns_variable(container: Container) -> bool:
    said = processes_of_torchrun(container)
    # A TrainJob may leave the command to its runtime.
    programs = {word.name for word in words(container)} | {text.rsplit("/", 1)[-1] for text in container.ranks.command}
    return not programs.isdisjoint(TORCHRUN) and not (said and _COUNT.fullmatch(said[0]))


def _uncounted_trainjob(
    manifest: dict[str, Any], others: Sequence[dict[str, Any]], containers: list[Container]
) -> Iterator[Problem]:
    trainer = within(manifest, "spec", "trainer")
    if not isinstance(trainer, dict):
        if job_containers.started_by(manifest, others) == "torch":
            said = "the operator then sets no variable at all: ranks can't find each other; write it"
            yield warning(("spec",), f"trainer is missing, and {said}")
        return
    runtime = job_containers.runtime_of(manifest, others)
    policy = within(runtime, "spec", "mlPolicy", "torch", "numProcPerNode")
    if trainer.get("numProcPerNode") is not None or (policy is not None and _COUNT.fullmatch(str(policy))):
        return
    for container in containers:
        ours = any(word.rsplit("/", 1)[-1] == "cputrain" for word in container.ranks.command)
        launched = _reads_torchruns_variable(container) or (ours and trainer.get("resourcesPerNode"))
        if container.ranks.started_by == "torch" and launched and not container.ranks.has_gpus:
            yield warning(
                ("spec", "trainer"),
                "numProcPerNode is missing, and the operator then asks for one process for every CPU: write "
                "numProcPerNode: 1",
            )


def _sizes(manifest: dict[str, Any], container: Container) -> tuple[int, int]:
    """The least and the most pods that train together."""
    policy = mapping(within(manifest, "spec", "elasticPolicy"))
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    if type(least) is int and type(most) is int and 1 <= least <= most:
        return least, most
    return container.ranks.pods, container.ranks.pods


def _launch(container: Container, least: int, most: int) -> Iterator[Problem]:
    """`cputrain launch -n` counts all processes, and refuses what the operator's numbers can't give."""
    for own in calls(words(container), ("cputrain",)):
        asked, each = option(own, "-n", "--num_processes"), option(own, "--ppn")
        if not own or own[0].text != "launch" or not asked or not _COUNT.fullmatch(asked[0]):
            continue
        size = int(asked[0])
        here = int(each[0]) if each and _COUNT.fullmatch(each[0]) else container.ranks.processes
        here = here or max(1, size // max(1, most))
        if not here * least <= size <= here * most:
            pods = str(most) if least == most else f"{least} to {most}"
            total = str(here * most) if least == most else f"{here * least} to {here * most}"
            yield Problem(
                place(container, asked[1]),
                f"launch {asked[1].text.partition('=')[0]} {size} is the number of processes in all, and {pods} pods "
                f"of {here} are {total}: leave it out",
            )


def _torchrun(container: Container) -> Iterator[Problem]:
    said, processes = processes_of_torchrun(container), container.ranks.processes
    if said and processes and _COUNT.fullmatch(said[0]) and int(said[0]) != processes:
        yield warning(
            place(container, said[1]),
            f"torchrun starts {said[0]} processes, and the job says {processes}: torchrun's option wins, remove one",
        )
    for own in calls(words(container), TORCHRUN):
        found = option(own, "--nnodes")
        least = found[0].partition(":")[0] if found else ""
        if found and _COUNT.fullmatch(least) and int(least) != container.ranks.pods > 1:
            yield from _other_nodes(container, place(container, found[1]), found[0], int(least))


def _other_nodes(container: Container, where: Where, text: str, least: int) -> Iterator[Problem]:
    pods = container.ranks.pods
    if text == "1":
        said = "--nnodes 1 makes every pod train alone, whatever the operator says: remove it"
        yield Problem(where, said)
    elif least > pods:
        yield Problem(where, f"--nnodes {text} waits for {least} pods, and the job has {pods}: remove it")
    elif ":" not in text:
        yield warning(where, f"--nnodes {text} leaves out some of the {pods} pods of the job: remove it")


def _of_mpirun(words: Sequence[Word]) -> Iterator[Word]:
    """The words before the program that mpirun starts, which may have a `-n` of its own."""
    values = 0  # that may still follow the last option
    for word in words:
        if word.text.startswith("-"):
            values = 0 if "=" in word.text or word.text.lstrip("-") in _WITHOUT_VALUE else 1
            values += word.text.lstrip("-") in _WITH_TWO_VALUES
        elif values:
            values -= 1
        else:
            return
        yield word


def _mpirun(manifest: dict[str, Any], container: Container) -> Iterator[Problem]:
    """mpirun's count against the slots that the operator writes into the hostfile."""
    spec = mapping(manifest.get("spec"))
    slots = container.ranks.processes or 1
    pods = container.ranks.pods + (1 if spec.get("runLauncherAsWorker") is True else 0)
    for call in calls(words(container), MPIRUN):
        own = list(_of_mpirun(call))
        found, mapped = option(own, "-n", "-np", "--np", "--n"), option(own, "--map-by", "-map-by")
        if not found or not _COUNT.fullmatch(found[0]) or option(own, *_OWN_PLACES) or (mapped and ":" in mapped[0]):
            continue
        size, total = int(found[0]), slots * pods
        remedy = f"{pods} Workers of {slots} slots have {total}: write {total}, or change slotsPerWorker"
        if size > total and spec.get("mpiImplementation") in (None, "OpenMPI"):
            said = f"mpirun is asked for {size} ranks, and Open MPI refuses more than there are slots; {remedy}"
            yield Problem(place(container, found[1]), said)
        elif size != total:
            yield warning(place(container, found[1]), f"mpirun is asked for {size} ranks; {remedy}")
