"""`cputrain launch --dry-run`: exactly what would run, machine by machine, and why. Secrets stay secret."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from cputrain import hardware
from cputrain.launch import environment, openmp, topology
from cputrain.launch.plan import Plan, Task


def text(plan: Plan, task: Task, communication: int) -> str:
    return "\n".join(_lines(plan, task, communication)) + "\n"


def _lines(plan: Plan, task: Task, communication: int) -> Iterator[str]:
    yield f"engine: {plan.engine} ({plan.reason})"
    yield f"ranks: {plan.size} on {len(plan.machines)} machine{'s' if len(plan.machines) > 1 else ''}"
    yield f"folder: {task.folder}"
    for name, words in plan.commands:
        yield f"command on {name}: {shlex.join(environment.shown_words(words))}"
    if plan.engine == "torchrun" and plan.forwarded:
        yield "  its standard input is the order, as JSON: folder, environment, and the program"
        yield f"  program: {shlex.join(['cputrain', 'run', *environment.shown_words(task.program)])}"
    yield f"environment {'sent by name' if plan.engine == 'mpi' else 'added'}:"
    yield from (f"  {environment.shown(name, value)}" for name, value in sorted(plan.environment.items()))
    for machine in plan.machines:
        yield f"{machine.name}: {_span(machine.ranks)}"
        yield from _binding(machine.name, machine.ranks, communication)
    kind, why = openmp.runtime({**task.inherited, **task.added})
    yield f"OpenMP here: {kind} ({why})"


def _binding(name: str, ranks: range, communication: int) -> Iterator[str]:
    from cputrain.launch import ssh

    if name not in ("localhost", "this machine") and not ssh.is_here(name):
        yield "  each rank takes its own cores there, by that machine's topology, affinity and quota"
        return
    machine = hardware.this_machine()
    division = topology.divide(machine, len(ranks), communication)
    for rank, share in zip(ranks, division.shares, strict=True):
        bound = "not bound" if share.cpus is None else f"CPUs {','.join(map(str, share.cpus))}"
        yield f"  rank {rank}: {bound}, {share.threads} thread{'s' if share.threads > 1 else ''} ({share.reason})"
    yield from (f"  warning: {warning}" for warning in division.warnings)


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
