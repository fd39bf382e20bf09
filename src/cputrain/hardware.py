"""What this CPU is and how much of it this process may use, each answer with where it came from.

Everything is read from /proc and /sys, below a root that tests can replace. No torch is imported.
`this_machine()` reads once; `detect(root)` reads anew; `best_isa()` names the kernels that run here, and why.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from cputrain import settings
from cputrain.kernel_files import Cpus, Tree, cgroup_limits, parse_cpus, parse_size

T = TypeVar("T")

# Named as /proc/cpuinfo names them, oldest first. Families (avx512…, amx_…) are taken whole, whatever Linux adds.
_X86_SETS = ("sse4_1", "sse4_2", "avx", "f16c", "fma", "avx2")
_ARM_SETS = ("asimd", "asimddp", "fphp", "i8mm", "bf16", "sve", "sve2", "sme")
_FAMILIES = re.compile(r"(avx512|avx_|avx10|amx_).*")

# From the widest to the one that runs everywhere. Each list is what the compiler may use for those kernels.
ISA_NEEDS = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}

# Those that multiply bf16; the last is ARM's.
BF16_SETS = ("amx_bf16", "avx512_bf16", "bf16")

# cgroup v1 says "no limit" with the largest multiple of the page size that fits; no machine has half an exbibyte.
_NO_LIMIT = 1 << 59


@dataclass(frozen=True)
class Fact(Generic[T]):
    """An answer, and the file or the assumption that it came from."""

    value: T
    source: str


@dataclass(frozen=True)
class Cache:
    """Caches of one kind and size: `instances` of them, each of `size` bytes."""

    level: int
    kind: str
    size: int
    instances: int


@dataclass(frozen=True)
class NumaNode:
    """A memory node that has CPUs. `memory` is None where the kernel doesn't say."""

    number: int
    cpus: Cpus
    memory: int | None


@dataclass(frozen=True)
class Hardware:
    """One machine as one process sees it. `cores` and `sockets` are the logical CPUs of each."""

    vendor: Fact[str]
    model: Fact[str]
    instruction_sets: Fact[tuple[str, ...]]
    logical_cpus: Fact[Cpus]
    cores: Fact[tuple[Cpus, ...]]
    sockets: Fact[tuple[Cpus, ...]]
    numa_nodes: Fact[tuple[NumaNode, ...]]
    caches: Fact[tuple[Cache, ...]]
    affinity: Fact[Cpus]
    cpuset: Fact[Cpus | None]
    cpu_quota: Fact[float | None]
    memory_total: Fact[int | None]
    memory_limit: Fact[int | None]
    usable_cpus: Fact[Cpus]
    usable_cores: Fact[int]
    usable_memory: Fact[int | None]

    @property
    def threads_per_core(self) -> int:
        return max(map(len, self.cores.value), default=1)


@cache
def this_machine() -> Hardware:
    """The machine that we run on, read at the first call."""
    return detect()


def detect(root: str | Path = "/") -> Hardware:
    """Reads everything below `root`, which holds `proc` and `sys`."""
    tree = Tree(Path(root))
    processors = _processors(tree)
    cpus = _logical_cpus(tree, processors)
    cores = _cores(tree, cpus.value, processors)
    affinity, cpuset, quota = _affinity(tree, cpus), _cpuset(tree), _cpu_quota(tree)
    usable = _usable_cpus(affinity, cpuset)
    memory, limit = _memory_total(tree), _memory_limit(tree)
    return Hardware(
        vendor=_described(processors, "vendor_id", "CPU implementer"),
        model=_described(processors, "model name", "CPU part"),
        instruction_sets=_instruction_sets(processors),
        logical_cpus=cpus,
        cores=cores,
        sockets=_sockets(tree, cpus.value, processors),
        numa_nodes=_numa_nodes(tree, cpus.value),
        caches=_caches(tree, cpus.value),
        affinity=affinity,
        cpuset=cpuset,
        cpu_quota=quota,
        memory_total=memory,
        memory_limit=limit,
        usable_cpus=usable,
        usable_cores=_usable_cores(cores.value, usable, quota),
        usable_memory=_usable_memory(memory, limit),
    )


@cache
def has_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself, rather than by emulation."""
    return any(name in this_machine().instruction_sets.value for name in BF16_SETS)


def best_isa(hardware: Hardware | None = None, environ: settings.Environ | None = None) -> tuple[str, str]:
    """The widest kernels that this CPU runs (avx512, avx2 or portable), and why; CPUTRAIN_ISA forces lower ones."""
    sets = (hardware or this_machine()).instruction_sets
    lacking = {isa: [name for name in needs if name not in sets.value] for isa, needs in ISA_NEEDS.items()}
    asked = settings.one_of(settings.ISA, environ)
    if asked:
        return _asked_isa(asked, lacking), f"CPUTRAIN_ISA={asked}"
    best = next(isa for isa in ISA_NEEDS if not lacking[isa])
    has = f"the CPU has {', '.join(ISA_NEEDS[best])}" if ISA_NEEDS[best] else "it needs nothing beyond the baseline"
    wider = [f"{isa} lacks {', '.join(lacking[isa])}" for isa in ISA_NEEDS if lacking[isa]]
    return best, "; ".join([has, *wider])


def _asked_isa(asked: str, lacking: Mapping[str, list[str]]) -> str:
    if lacking[asked]:
        raise ValueError(
            f"CPUTRAIN_ISA is {asked!r}, but this CPU lacks {', '.join(lacking[asked])}; choose a lower one."
        )
    return asked


# --- The CPU -----------------------------------------------------------------------------------------------------

_CPUINFO = "/proc/cpuinfo"
_CPU_FOLDER = "/sys/devices/system/cpu"


def _processors(tree: Tree) -> dict[int, dict[str, str]]:
    """/proc/cpuinfo: the fields of each logical CPU by its number."""
    processors = {}
    for block in re.split(r"\n\s*\n", tree.read(_CPUINFO) or ""):
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        if fields.get("processor", "").isdigit():
            processors[int(fields["processor"])] = fields
    return processors


def _described(processors: Mapping[int, Mapping[str, str]], *names: str) -> Fact[str]:
    for name in names:
        for fields in processors.values():
            if fields.get(name):
                return Fact(fields[name], f"{_CPUINFO}: {name}")
    return Fact("unknown", f"{_CPUINFO} doesn't say")


def _instruction_sets(processors: Mapping[int, Mapping[str, str]]) -> Fact[tuple[str, ...]]:
    """Only what every CPU has: a thread may run on any of them."""
    flags = [set((fields.get("flags") or fields.get("Features") or "").split()) for fields in processors.values()]
    common = set.intersection(*flags) if flags else set()
    if not common:
        return Fact((), f"{_CPUINFO} lists none: the baseline is assumed")
    known = [name for name in (*_X86_SETS, *_ARM_SETS) if name in common]
    return Fact((*known, *sorted(filter(_FAMILIES.fullmatch, common))), f"{_CPUINFO}: flags that every CPU has")


def _logical_cpus(tree: Tree, processors: Mapping[int, object]) -> Fact[Cpus]:
    online = tree.read(f"{_CPU_FOLDER}/online")
    if online:
        return Fact(parse_cpus(online), f"{_CPU_FOLDER}/online")
    if processors:
        return Fact(tuple(sorted(processors)), f"{_CPUINFO}: processor")
    if tree.is_real:
        return Fact(tuple(range(os.cpu_count() or 1)), "os.cpu_count()")
    return Fact((0,), "assumed: neither /sys nor /proc lists CPUs")


def _cores(tree: Tree, cpus: Cpus, processors: Mapping[int, Mapping[str, str]]) -> Fact[tuple[Cpus, ...]]:
    """The logical CPUs of each physical core: SMT siblings stand together."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = [tree.read(f"{_CPU_FOLDER}/cpu{cpu}/topology/{name}") for cpu in cpus]
        if all(siblings):
            groups = {tuple(c for c in parse_cpus(text or "") if c in cpus) for text in siblings}
            return Fact(tuple(sorted(groups)), f"{_CPU_FOLDER}/cpu*/topology/{name}")
    places = {cpu: _place(processors, cpu, "physical id", "core id") for cpu in cpus}
    if all(places.values()):
        return Fact(_grouped(places), f"{_CPUINFO}: physical id, core id")
    return Fact(tuple((cpu,) for cpu in cpus), "assumed: the topology is hidden, so each CPU counts as a core")


def _sockets(tree: Tree, cpus: Cpus, processors: Mapping[int, Mapping[str, str]]) -> Fact[tuple[Cpus, ...]]:
    packages = {cpu: tree.read(f"{_CPU_FOLDER}/cpu{cpu}/topology/physical_package_id") for cpu in cpus}
    if all(packages.values()):
        return Fact(_grouped(packages), f"{_CPU_FOLDER}/cpu*/topology/physical_package_id")
    places = {cpu: _place(processors, cpu, "physical id") for cpu in cpus}
    if all(places.values()):
        return Fact(_grouped(places), f"{_CPUINFO}: physical id")
    return Fact((cpus,), "assumed: the topology is hidden, so it counts as one socket")


def _place(processors: Mapping[int, Mapping[str, str]], cpu: int, *names: str) -> tuple[str, ...] | None:
    fields = processors.get(cpu, {})
    return tuple(fields[name] for name in names) if all(name in fields for name in names) else None


def _grouped(key_of: Mapping[int, object]) -> tuple[Cpus, ...]:
    """CPUs with the same key together, ordered by their first CPU."""
    groups: dict[object, list[int]] = {}
    for cpu in sorted(key_of):
        groups.setdefault(key_of[cpu], []).append(cpu)
    return tuple(tuple(group) for group in groups.values())


def _numa_nodes(tree: Tree, cpus: Cpus) -> Fact[tuple[NumaNode, ...]]:
    """Nodes of memory alone (HBM, CXL) are left out: nothing can be pinned to them."""
    folder = "/sys/devices/system/node"
    nodes = []
    for number, path in tree.numbered(folder, "node"):
        total = re.search(r"MemTotal:\s+(\d+) kB", tree.read(f"{path}/meminfo") or "")
        own = tuple(cpu for cpu in parse_cpus(tree.read(f"{path}/cpulist") or "") if cpu in cpus)
        nodes.append(NumaNode(number, own, int(total[1]) * 1024 if total else None))
    with_cpus = tuple(node for node in nodes if node.cpus)
    if with_cpus:
        return Fact(with_cpus, f"{folder}/node*/cpulist")
    return Fact((NumaNode(0, cpus, None),), f"assumed: {folder} is hidden, so it counts as one node")


def _caches(tree: Tree, cpus: Cpus) -> Fact[tuple[Cache, ...]]:
    users: dict[tuple[int, str, int], set[Cpus]] = {}
    for cpu in cpus:
        for _, path in tree.numbered(f"{_CPU_FOLDER}/cpu{cpu}/cache", "index"):
            level, kind, size, shared = (tree.read(f"{path}/{n}") for n in ("level", "type", "size", "shared_cpu_list"))
            if level and kind and size:
                sharers = parse_cpus(shared or str(cpu))
                users.setdefault((int(level), kind.lower(), parse_size(size)), set()).add(sharers)
    caches = tuple(Cache(*key, instances=len(groups)) for key, groups in sorted(users.items()))
    source = f"{_CPU_FOLDER}/cpu*/cache" if caches else f"{_CPU_FOLDER}/cpu*/cache is hidden"
    return Fact(caches, source)


# --- What this process may use -----------------------------------------------------------------------------------


def _affinity(tree: Tree, cpus: Fact[Cpus]) -> Fact[Cpus]:
    path = "/proc/self/status"
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", tree.read(path) or "", re.MULTILINE)
    if allowed:
        # The mask may name CPUs that are possible but not there.
        return Fact(tuple(cpu for cpu in parse_cpus(allowed[1]) if cpu in cpus.value), f"{path}: Cpus_allowed_list")
    if tree.is_real and hasattr(os, "sched_getaffinity"):
        return Fact(tuple(sorted(os.sched_getaffinity(0))), "sched_getaffinity()")
    return Fact(cpus.value, f"assumed: {path} is hidden, so all of {cpus.source}")


def _cpuset(tree: Tree) -> Fact[Cpus | None]:
    """The CPUs that every cgroup on the way up leaves."""
    found = [
        (path, parse_cpus(text))
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
        for path, text in cgroup_limits(tree, "cpuset", name)
        if text
    ]
    if not found:
        return Fact(None, "no cpuset cgroup")
    common = set.intersection(*(set(cpus) for _, cpus in found))
    narrowest = min(found, key=lambda item: len(item[1]))
    return Fact(tuple(sorted(common)), narrowest[0])


def _cpu_quota(tree: Tree) -> Fact[float | None]:
    """CPUs' worth of time per period; the least on the way up wins."""
    found = []
    for path, text in cgroup_limits(tree, "cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            found.append((int(quota) / int(period or 100_000), path))
    for path, quota in cgroup_limits(tree, "cpu", "cpu.cfs_quota_us"):
        period = tree.read(posixpath.join(posixpath.dirname(path), "cpu.cfs_period_us")) or "100000"
        if quota.isdigit():
            found.append((int(quota) / int(period), path))
    return Fact(*min(found)) if found else Fact(None, "no cgroup sets a quota")


def _memory_limit(tree: Tree) -> Fact[int | None]:
    found = [
        (int(text), path)
        for name in ("memory.max", "memory.limit_in_bytes")
        for path, text in cgroup_limits(tree, "memory", name)
        if text.isdigit() and int(text) < _NO_LIMIT
    ]
    return Fact(*min(found)) if found else Fact(None, "no cgroup sets a limit")


def oom_kills(root: str | Path = "/") -> int:
    """How many processes of this cgroup the kernel has ended for want of memory; 0 where it doesn't say."""
    for name in ("memory.events", "memory.oom_control"):  # of cgroup v2 and v1
        for _, text in cgroup_limits(Tree(Path(root)), "memory", name):
            found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _memory_total(tree: Tree) -> Fact[int | None]:
    total = re.search(r"^MemTotal:\s+(\d+) kB", tree.read("/proc/meminfo") or "", re.MULTILINE)
    if total:
        return Fact(int(total[1]) * 1024, "/proc/meminfo: MemTotal")
    return Fact(None, "/proc/meminfo is hidden")


def _usable_cpus(affinity: Fact[Cpus], cpuset: Fact[Cpus | None]) -> Fact[Cpus]:
    both = tuple(cpu for cpu in affinity.value if cpuset.value is None or cpu in cpuset.value)
    # No CPU in common is a state that the kernel passes through while it moves a process: it obeys the mask.
    if cpuset.value is None or not both:
        return Fact(affinity.value, f"the affinity mask ({affinity.source})")
    # The kernel cuts the mask down to the cpuset: where the two agree it was the cpuset that decided.
    if len(both) == len(cpuset.value):
        return Fact(both, f"the cpuset ({cpuset.source})")
    if len(both) == len(affinity.value):
        return Fact(both, f"the affinity mask ({affinity.source})")
    return Fact(both, f"the affinity mask ({affinity.source}) within the cpuset ({cpuset.source})")


def _usable_cores(cores: tuple[Cpus, ...], usable: Fact[Cpus], quota: Fact[float | None]) -> Fact[int]:
    """The least of what affinity, cpuset and quota allow. A thread needs a whole CPU's time, but one always runs."""
    number, reason = sum(not set(core).isdisjoint(usable.value) for core in cores), usable.source
    if quota.value is not None and quota.value < number:
        number, reason = int(quota.value), f"the quota of {quota.value:g} CPUs ({quota.source})"
    number = max(1, number)
    if number == len(cores):
        return Fact(number, "every core: nothing takes any away")
    return Fact(number, f"{reason} allows {number} of {len(cores)}")


def _usable_memory(total: Fact[int | None], limit: Fact[int | None]) -> Fact[int | None]:
    if limit.value is not None and (total.value is None or limit.value < total.value):
        return limit
    return total
