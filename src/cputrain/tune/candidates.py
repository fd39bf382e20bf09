"""What may be fastest on a machine: ranks × threads × binding × allocator × cores for communication × number formats.

The simplest stand first: plain divisions of the cores into ranks, then those that differ in one more thing, in two …
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cputrain import settings
from cputrain.hardware import Hardware
from cputrain.launch import cores
from cputrain.launch.config import Config

# Ranks of fewer cores than this are tried up to eight: a batch that is divided further is all overhead.
_CORES_OF_A_RANK, _SMALL_RANKS = 4, 8
# Where a rank has as many cores, one of them may be worth keeping free for communication.
_CORES_TO_SPARE = 4
# OpenMP's own binding: GNU's, Intel's and LLVM's runtimes read both.
_BOUND_THREADS = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}


@dataclass(frozen=True)
class Candidate:
    """`differs`: in how many things from the plain division of cores; `dtype` None: what the script asks for."""

    ranks: int
    threads: int
    binds_threads: bool = False
    allocator: str = "default"
    communication: int = 0
    dtype: str | None = None
    differs: int = 0

    @property
    def words(self) -> str:
        parts = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''} × {self.threads} thread{'s' * (self.threads > 1)}"]
        parts += ["threads bound"] * self.binds_threads
        parts += [self.allocator] * (self.allocator != "default")
        parts += [f"{self.communication} core of each for communication"] * (self.communication > 0)
        return ", ".join([*parts, *([self.dtype] if self.dtype else [])])

    def config(self, base: Config) -> Config:
        """The base with what this candidate says; the rest of the file's settings stay."""
        variables = {settings.THREADS: str(self.threads)}
        variables |= _BOUND_THREADS if self.binds_threads else {}
        variables |= {settings.DTYPE: self.dtype} if self.dtype else {}
        ours = {settings.THREADS, *_BOUND_THREADS, *([settings.DTYPE] if self.dtype else [])}
        kept = [entry for entry in base.env if entry.partition("=")[0] not in ours]
        return replace(
            base,
            distributed_type="MULTI_CPU" if self.ranks > 1 else "NO",
            num_processes=self.ranks,
            ppn=None,
            env=(*kept, *(f"{name}={value}" for name, value in variables.items())),
            cores_for_communication=self.communication,
            allocator=self.allocator,
        )


def candidates(
    machine: Hardware, dtypes: Sequence[str] = (), allocators: Sequence[str] = ("default",)
) -> list[Candidate]:
    found = []
    for ranks in _ranks(machine):
        for communication in (0, 1):
            share = _share(machine, ranks, communication)
            if share is not None:
                varied = itertools.product(_threads(share.threads), (False, True), allocators, dtypes or (None,))
                found += [
                    _candidate(share, ranks, communication, threads, binds, allocator, dtype)
                    for threads, binds, allocator, dtype in varied
                    if threads > 1 or not binds  # one thread is bound with its rank
                ]
    return sorted(found, key=lambda one: one.differs)


def _candidate(
    share: cores.Share, ranks: int, communication: int, threads: int, binds: bool, allocator: str, dtype: str | None
) -> Candidate:
    differs = sum((threads != share.threads, binds, allocator != "default", communication > 0))
    return Candidate(ranks, threads, binds, allocator, communication, dtype, differs)


def _ranks(machine: Hardware) -> Iterable[int]:
    """1, 2, 4 … and multiples of the NUMA nodes, as far as they use all cores evenly."""
    available, nodes = machine.usable_cores.value, len(machine.numa_nodes.value)
    doubled = [2**power for power in range(available.bit_length())]
    for ranks in sorted({1, *doubled, *(nodes * many for many in doubled)}):
        if ranks == 1 or (ranks <= available and (ranks <= _SMALL_RANKS or available // ranks >= _CORES_OF_A_RANK)):
            yield ranks


def _share(machine: Hardware, ranks: int, communication: int) -> cores.Share | None:
    """None where the division costs something, or makes no sense."""
    if ranks == 1:
        return cores.alone(machine).shares[0] if not communication else None
    division = cores.divide(machine, ranks, communication)
    share = division.shares[0]
    too_few = communication and share.threads + communication < _CORES_TO_SPARE
    return None if division.warnings or too_few else share


def _threads(most: int) -> list[int]:
    """All cores, or half of them: small products are faster on fewer, and memory may be what limits."""
    return sorted({most, max(1, most // 2)}, reverse=True)


def allocators() -> list[str]:
    """Those that are installed."""
    found = ["default"]
    for name in cores.ALLOCATORS[1:]:
        try:
            cores.preload(name, {})
        except ValueError:
            continue
        found.append(name)
    return found
