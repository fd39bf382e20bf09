"""How many processes and threads the CPUs of a pod or a node make."""

from __future__ import annotations

from dataclasses import dataclass

# Beyond this a process would span sockets: 64 logical CPUs are half of today's usual two-socket node.
_CPUS_PER_PROCESS = 64
# A core for communication is a core less for arithmetic: worth it from this many.
_SPARE_FROM = 8


@dataclass(frozen=True)
class Sizing:
    """Per pod: processes, threads of each for arithmetic, cores of each for communication."""

    processes: int
    threads: int
    communication: int


def of_cpus(
    cpus: int,
    machines: int,
    processes: int | None = None,
    threads: int | None = None,
    communication: int | None = None,
) -> Sizing:
    """What the user left open follows from the CPUs; what doesn't fit into them is refused."""
    for what, value, least in (
        ("processes per pod", processes, 1),
        ("threads per process", threads, 1),
        ("cores for communication", communication, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{what} must be at least {least}, found {value}.")
    here = processes or -(-cpus // _CPUS_PER_PROCESS)
    if here > cpus:
        raise ValueError(f"{here} processes don't fit into {cpus} CPUs: each needs one of its own.")
    each = cpus // here
    if communication is None:
        spare = each - threads if threads else each
        several = machines > 1 and each >= _SPARE_FROM
        communication = 1 if several and spare >= 1 else 0
    chosen = threads or each - communication
    if chosen < 1 or here * (chosen + communication) > cpus:
        raise ValueError(
            f"{here} processes of {max(chosen, 1)} threads and {communication} cores for communication need "
            f"{here * (max(chosen, 1) + communication)} CPUs, and the pod has {cpus}."
        )
    return Sizing(here, chosen, communication)
