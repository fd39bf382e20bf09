"""A rank's memory comes from the NUMA node of its cores, whichever of its threads touches it first."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable

from cputrain.hardware import Hardware

# Numbers of set_mempolicy and get_mempolicy: libc has no functions for them, and libnuma is seldom installed.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_DEFAULT, _PREFERRED, _LOCAL = 0, 1, 4
_NODES = 1024  # room in a mask


def node_of(cpus: Iterable[int], machine: Hardware) -> int | None:
    """The one node that has all these CPUs; None if there is only one in the machine, or they lie on several."""
    nodes = machine.numa_nodes.value
    wanted = set(cpus)
    return next((node.number for node in nodes if wanted <= set(node.cpus)), None) if len(nodes) > 1 else None


def prefer(node: int) -> str | None:
    """Memory comes from this node as long as it has some; the answer is why not, if so.

    A policy that is there already (numactl) is its user's wish.
    """
    if platform.machine() not in _CALLS:
        return f"{platform.machine()} isn't known here"
    there = policy()
    if there[0] not in (_DEFAULT, _LOCAL):
        return "the process was started with a memory policy of its own, which is kept"
    mask = (ctypes.c_ulong * (_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    return _refused(_CALLS[platform.machine()][0], ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(_NODES))


def policy() -> tuple[int, list[int]]:
    """Of this thread: the policy's number, and its nodes."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_NODES // 64))()
    number = _CALLS[platform.machine()][1]
    reason = _refused(number, ctypes.byref(mode), mask, ctypes.c_ulong(_NODES), None, ctypes.c_ulong(0))
    nodes = [node for node in range(_NODES) if mask[node // 64] >> node % 64 & 1]
    return (mode.value, nodes) if reason is None else (_DEFAULT, [])


def _refused(number: int, *arguments: object) -> str | None:
    """Containers often forbid these calls."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    return os.strerror(ctypes.get_errno()) if call(ctypes.c_long(number), *arguments) else None
