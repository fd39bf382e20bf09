"""`cputrain launch --dry-run`: exactly what would run, machine by machine, and why. Secrets stay secret."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from cputrain import hardware, secrets_in_clear
from cputrain.launch import join, openmp, topology
from cputrain.launch.hostfile import Machine
from cputrain.launch.plan import Plan, Task
from cputrain.launch.ranks import Place


def text(plan: Plan, task: Task) -> str:
    return "\n".join(_lines(plan, task)) + "\n"


def text_of_one(place: Place | None, command: list[str], added: Mapping[str, str], inherited: Mapping[str, str]) -> str:
    """Nothing is started: this process becomes the script's, alone or as the rank that another launcher started."""
    found = {**inherited, **added}
    share, costs = join.shares(place, found)
    number, warning = topology.threads(found.get("OMP_NUM_THREADS"), share)
    who = f"rank {place.rank} of {place.size}: {place.reason}" if place else "one process, in place of this one"
    lines = [f"engine: none ({who})", f"command: {_shown(command)}", "environment added:", *_variables(added)]
    lines += [f"{_bound(share)}, OMP_NUM_THREADS={number} ({share.reason})"]
    lines += [f"  warning: {text}" for text in (*costs, warning) if text]
    return "\n".join([*lines, _openmp(found)]) + "\n"


def _lines(plan: Plan, task: Task) -> Iterator[str]:
    yield f"engine: {plan.engine} ({plan.reason})"
    asked = plan.environment[join.EXPECTED].replace(":", " to ")  # other machines may have some, too
    some = f"{plan.size} of {asked}" if asked != str(plan.size) else asked
    yield f"ranks: {some} on {len(plan.machines)} machine{'s' if len(plan.machines) > 1 else ''}"
    yield f"meeting: {plan.meeting}"
    yield f"folder: {task.folder}"
    for name, words in plan.commands:
        yield f"command on {name}: {_shown(words)}"
    if plan.hosts:
        yield f"  HOSTFILE, line by line: {' | '.join(plan.hosts.splitlines())}"
    if plan.engine == "torchrun" and plan.forwarded:
        yield "  its standard input is the order, as JSON: folder, environment, and the program"
        yield f"  program: {_shown(['cputrain', 'run', *task.program])}"
    yield f"environment {'sent by name' if plan.engine == 'mpi' else 'added'}:"
    yield from _variables(plan.environment)
    found = {**({} if plan.forwarded else task.inherited), **plan.environment}
    for machine in plan.machines:
        yield f"{machine.name}: {_span(machine.ranks)}"
        yield from _binding(machine, found)
    yield _openmp(found)


def _binding(machine: Machine, found: Mapping[str, str]) -> Iterator[str]:
    from cputrain.launch import ssh

    if machine.name not in ("localhost", "this machine") and not ssh.is_here(machine.name):
        yield "  each rank takes its own cores there, by that machine's topology, affinity and quota"
        return
    division = topology.divide(hardware.this_machine(), machine.processes, join.communication(found))
    for rank, share in zip(machine.ranks, division.shares, strict=True):
        number, _ = topology.threads(found.get("OMP_NUM_THREADS"), share)
        yield f"  rank {rank}: {_bound(share)}, OMP_NUM_THREADS={number} ({share.reason})"
    _, warning = topology.threads(found.get("OMP_NUM_THREADS"), division.shares[0])
    yield from (f"  warning: {text}" for text in (*division.warnings, warning) if text)


def _bound(share: topology.Share) -> str:
    if share.cpus is None:
        return "not bound"
    spare = f", {_joined(share.communication)} of them for communication" if share.communication else ""
    return f"CPUs {_joined(share.cpus)}{spare}"


def _openmp(found: Mapping[str, str]) -> str:
    kind, why = openmp.runtime(found)
    return f"OpenMP here: {kind} ({why})"


def _variables(variables: Mapping[str, str]) -> list[str]:
    return [f"  {secrets_in_clear.shown(name, value)}" for name, value in sorted(variables.items())]


def _shown(words: list[str]) -> str:
    return shlex.join(secrets_in_clear.shown_words(words))


def _joined(cpus: hardware.Cpus) -> str:
    return ",".join(map(str, cpus))


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
