"""What a rank gets of its machine: its own physical cores, memory near them, threads that fit, and an allocator."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cputrain.hardware import Cpus, Hardware
from cputrain.settings import preloaded


@dataclass(frozen=True)
class Share:
    """What one rank gets. `cpus` is None where binding would do harm; memory comes from where the cores are."""

    cpus: Cpus | None
    threads: int
    communication: Cpus
    reason: str
    takes_turns: bool = False  # with another rank, on the same cores


@dataclass(frozen=True)
class Division:
    """The shares of all ranks of a machine, and what the division costs."""

    shares: tuple[Share, ...]
    warnings: tuple[str, ...]


def divide(machine: Hardware, ranks: int, communication: int = 0) -> Division:
    """Equal shares: ranks wait for each other at every step, so a larger share would only wait longer.

    One logical CPU of each core is used: two threads of one core share its vector units.
    """
    nodes = _cores_by_node(machine)
    available = sum(map(len, nodes))
    if machine.usable_cores.value < available:
        return _by_quota(machine, ranks, communication)
    if ranks > available:
        return _crowded(nodes, ranks, communication)
    if ranks < len(nodes):
        places, reason = _whole_nodes(nodes, ranks), f"whole NUMA nodes ({len(nodes)} for {_ranks(ranks)})"
        spread = [
            f"{_ranks(ranks)} on {len(nodes)} NUMA nodes: memory of other nodes is slower to reach, start {len(nodes)}."
        ]
    else:
        places, reason, spread = _within_nodes(nodes, ranks), "cores within one NUMA node", []
    each = len(places[0])
    shares = tuple(_share(cpus, communication, f"{_cores(each)}: {reason}") for cpus in places)
    return Division(shares, (*spread, *_idle(available, each, ranks), *_cramped(each, communication)))


def alone(machine: Hardware, communication: int = 0) -> Division:
    """All of it for one rank: no other rank shares the mask, so the mask stays as it is."""
    cores = machine.usable_cores.value
    threads = _computing(cores, communication)
    share = Share(None, threads, (), f"{_cores(cores)}: {machine.usable_cores.source}")
    return Division((share,), tuple(_cramped(cores, communication)))


def _cores_by_node(machine: Hardware) -> list[Cpus]:
    """The first usable CPU of each physical core, node by node. A core that no node names joins the first."""
    usable = set(machine.usable_cpus.value)
    firsts = [min(usable.intersection(core)) for core in machine.cores.value if usable.intersection(core)]
    nodes = [tuple(cpu for cpu in firsts if cpu in node.cpus) for node in machine.numa_nodes.value]
    stray = tuple(set(firsts).difference(*nodes))
    nodes = [node for node in nodes if node]
    return [tuple(sorted((*nodes[0], *stray))), *nodes[1:]] if nodes else [tuple(sorted(firsts)) or (0,)]


def _within_nodes(nodes: list[Cpus], ranks: int) -> list[Cpus]:
    """The most cores per rank for which every rank still fits into a node; ranks spread over the nodes evenly."""
    each = next(k for k in range(max(map(len, nodes)), 0, -1) if sum(len(node) // k for node in nodes) >= ranks)
    rooms = [[node[start : start + each] for start in range(0, len(node) - each + 1, each)] for node in nodes]
    taken: list[list[Cpus]] = [[] for _ in nodes]
    for _ in range(ranks):
        emptiest = max(range(len(nodes)), key=lambda n: (len(rooms[n]) - len(taken[n]), -n))
        taken[emptiest].append(rooms[emptiest][len(taken[emptiest])])
    return [cpus for node in taken for cpus in node]


def _whole_nodes(nodes: list[Cpus], ranks: int) -> list[Cpus]:
    """Fewer ranks than nodes: each gets several, and what doesn't divide stays idle."""
    per_rank = len(nodes) // ranks
    groups = [sum(nodes[rank * per_rank : (rank + 1) * per_rank], ()) for rank in range(ranks)]
    each = min(map(len, groups))
    return [tuple(sorted(group[:each])) for group in groups]


def _by_quota(machine: Hardware, ranks: int, communication: int) -> Division:
    """A quota gives time, not cores: pods that all bind to the first cores of their host would collide there."""
    cores = machine.usable_cores.value
    each = max(1, cores // ranks)
    threads = _computing(each, communication)
    reason = f"{machine.usable_cores.source}; a quota gives no cores of one's own to bind to"
    share = Share(None, threads, (), reason, takes_turns=ranks > cores)
    crowded = [_too_many(ranks, cores)] if ranks > cores else list(_idle(cores, each, ranks))
    return Division((share,) * ranks, (*crowded, *_cramped(each, communication)))


def _crowded(nodes: list[Cpus], ranks: int, communication: int) -> Division:
    cpus = [cpu for node in nodes for cpu in node]
    shares = tuple(
        Share((cpus[rank % len(cpus)],), 1, (), "more ranks than cores: they take turns", takes_turns=True)
        for rank in range(ranks)
    )
    return Division(shares, (_too_many(ranks, len(cpus)), *_cramped(1, communication)))


def _share(cpus: Cpus, communication: int, reason: str) -> Share:
    threads = _computing(len(cpus), communication)
    return Share(cpus, threads, cpus[threads:], reason)


def _computing(cores: int, communication: int) -> int:
    return max(1, cores - communication)


def _too_many(ranks: int, cores: int) -> str:
    return f"{_ranks(ranks)} on {_cores(cores)} take turns, and every step waits for the last: start at most {cores}."


def _idle(available: int, each: int, ranks: int) -> list[str]:
    idle = available - each * ranks
    if not idle:
        return []
    return [f"{idle} of {_cores(available)} stay idle: {_ranks(ranks)} get {each} each, because steps are in step."]


def _cramped(each: int, communication: int) -> list[str]:
    if communication < each or not communication:
        return []
    return [
        f"--cores-for-communication {communication} would leave nothing of {_cores(each)} to compute with: "
        "one thread computes, and both share the core."
    ]


def threads(asked: str | None, share: Share) -> tuple[int, str | None]:
    """How many threads a rank computes with, and what a user's own OMP_NUM_THREADS costs, which is kept."""
    first = (asked or "").split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        return share.threads, None
    number = int(first)
    if number > share.threads:
        return number, (
            f"OMP_NUM_THREADS={number} is kept, but this rank has {_cores(share.threads)} to compute with: "
            f"threads wait for each other, {share.threads} would be faster."
        )
    idle = share.threads - number
    return number, f"OMP_NUM_THREADS={number} is kept; {idle} of {_cores(share.threads)} stay idle." if idle else None


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


# --- Memory: from the NUMA node of the rank's cores, whichever of its threads touches it first -------------------

# Numbers of set_mempolicy and get_mempolicy: libc has no functions for them, and libnuma is seldom installed.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_DEFAULT, _PREFERRED, _LOCAL = 0, 1, 4
_NODES = 1024  # room in a mask


def numa_node(cpus: Iterable[int], machine: Hardware) -> int | None:
    """The one node that has all these CPUs; None if there is only one in the machine, or they lie on several."""
    nodes = machine.numa_nodes.value
    wanted = set(cpus)
    return next((node.number for node in nodes if wanted <= set(node.cpus)), None) if len(nodes) > 1 else None


def prefer_memory_of(node: int) -> str | None:
    """Memory comes from this node as long as it has some; the answer is why not, if so.

    A policy that is there already (numactl) is its user's wish.
    """
    if platform.machine() not in _CALLS:
        return f"{platform.machine()} isn't known here"
    there = memory_policy()
    if there[0] not in (_DEFAULT, _LOCAL):
        return "the process was started with a memory policy of its own, which is kept"
    mask = (ctypes.c_ulong * (_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    return _refused(_CALLS[platform.machine()][0], ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(_NODES))


def memory_policy() -> tuple[int, list[int]]:
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


# --- OpenMP: GNU's, Intel's and LLVM's runtimes read different variables -----------------------------------------

_RUNTIMES = {"gomp": "GNU", "iomp5": "Intel", "omp": "LLVM"}
_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)\b[^/\0]*\.so")


def openmp_runtime(environ: Mapping[str, str], torch_folder: Path | None = None) -> tuple[str, str]:
    """The one that torch loads (GNU, Intel, LLVM or unknown), and why. Settings must be there before torch's import."""
    for library in preloaded(environ):
        if found := _RUNTIME.fullmatch(re.sub(r"\.so[.\d]*$", ".so", os.path.basename(library))):
            return _RUNTIMES[found[1]], f"LD_PRELOAD={library}"
    torch = importlib.util.find_spec("torch")
    folder = torch_folder or (Path(torch.origin).parent if torch and torch.origin else None)
    deps = folder / "lib" / "libtorch_global_deps.so" if folder else None
    if deps is None or not deps.exists():
        return "unknown", "torch's libraries were not found"
    # torch opens this tiny library first, globally, and what it needs is what all get.
    found = _RUNTIME.search(deps.read_bytes().decode("latin-1"))
    if not found:
        return "unknown", f"{deps} names none"
    return _RUNTIMES[found[1]], f"{deps} needs {found[0]}"


def openmp_settings(kind: str, crowded: bool) -> dict[str, str]:
    """What to add beside OMP_NUM_THREADS.

    Threads are not bound one by one: the first would keep data-loader workers and communication on its core. Threads
    that wait must not burn a core on which another process computes: Intel's and LLVM's spin for 200 ms by default.
    """
    if kind in ("Intel", "LLVM"):
        return {"KMP_BLOCKTIME": "0" if crowded else "1"}
    if kind == "GNU" and crowded:
        return {"OMP_WAIT_POLICY": "PASSIVE"}
    return {}


# --- Allocators --------------------------------------------------------------------------------------------------

# By the names that stay the same between releases. The minimal tcmalloc has no profiler, and needs no libunwind.
_ALLOCATORS = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
}
ALLOCATORS = ("default", *_ALLOCATORS)
_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def preload(name: str, environ: Mapping[str, str], folders: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """LD_PRELOAD for the ranks, and warnings. What the user preloads stays if it loads; ld.so ignores the rest."""
    kept, warnings = [], []
    for library in preloaded(environ):
        if loads(library):
            kept.append(library)
        else:
            warnings.append(f"LD_PRELOAD names {library}, which can't be loaded: it is left out.")
    if name != "default":
        kept.append(_found(name, folders))
    return ":".join(kept), warnings


def _found(name: str, folders: tuple[str, ...]) -> str:
    if name not in _ALLOCATORS:
        raise ValueError(f"--allocator must be one of {', '.join(ALLOCATORS)}, found {name!r}.")
    places = folders or (f"{sys.prefix}/lib", *_FOLDERS)
    for file in (Path(folder) / library for library in _ALLOCATORS[name] for folder in places):
        if file.exists() and loads(str(file)):
            return str(file)
    package = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}[name]
    raise ValueError(f"--allocator {name}: none of {', '.join(_ALLOCATORS[name])} was found; apt install {package}.")


def loads(library: str) -> bool:
    """Asked of the loader itself: it runs a program with the library, and complains on stderr if it can't."""
    environ = {"LD_PRELOAD": library, "PATH": os.defpath}
    answer = subprocess.run(["/bin/true"], env=environ, capture_output=True, text=True, check=False)
    return answer.returncode == 0 and "cannot be preloaded" not in answer.stderr
