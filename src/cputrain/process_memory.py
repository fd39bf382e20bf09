"""How much memory this process has, had at most, and has in use: as the kernel and glibc count it."""

from __future__ import annotations

import ctypes
import posixpath
import re
from pathlib import Path

from cputrain.kernel_files import Tree, cgroup_limits
from cputrain.memory import why_not

_REAL = Tree(Path("/"))
_UNKNOWN = 1 << 62
# A control group's limit, what it uses, and what of that are caches that the kernel would give back: version 2 and 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def _status(name: str) -> int:
    """0 where the kernel doesn't say."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _REAL.read("/proc/self/status") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


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


def free(tree: Tree = _REAL) -> int:
    """What the machine has left, caches included."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", tree.read("/proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else _UNKNOWN


def available(tree: Tree = _REAL) -> int:
    """What this process may still take: of the machine's memory, and of what each control group around it has left."""
    left = [free(tree)]
    for limit, used, cache in _FILES:
        for path, text in cgroup_limits(tree, "memory", limit):
            folder = posixpath.dirname(path)
            taken = tree.read(f"{folder}/{used}") or ""
            if text.isdigit() and taken.isdigit():
                given_back = re.search(rf"^{cache} (\d+)", tree.read(f"{folder}/memory.stat") or "", re.MULTILINE)
                left.append(int(text) - int(taken) + (int(given_back[1]) if given_back else 0))
    return max(0, min(left))
