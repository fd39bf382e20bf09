"""How much memory this process has, had at most, and has in use: as the kernel and glibc count it."""

from __future__ import annotations

import ctypes
from pathlib import Path

from cputrain.memory import why_not

_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    """Since the last `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Where the kernel refuses, an earlier peak counts on, and the answer is too large rather than too small."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def in_use() -> int:
    """Bytes that malloc has handed out and not got back; 0 where glibc can't be asked."""
    library = ctypes.CDLL(None)
    if why_not() or not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


def allow(more: int) -> None:
    """An allocation beyond so many bytes more fails here, before the kernel has to kill a process."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + more, resource.RLIM_INFINITY))


def available() -> int:
    """What a process may still take: of the machine's memory, and of its control groups' limit."""
    from cputrain import hardware

    limit = hardware.this_machine().usable_memory.value
    free = next(
        (int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")), None
    )
    return min(filter(None, (limit, free)), default=1 << 62)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
