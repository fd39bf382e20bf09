"""What is installed around cputrain: Python, the system, the allocator, OpenMP, MPI and packages, with sources."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cputrain.hardware import Fact
from cputrain.launch import cores, mpi


@dataclass(frozen=True)
class Installation:
    """Each answer with where it came from. `mpi` is None if no mpirun was found."""

    python: Fact[str]
    system: Fact[str]
    allocator: Fact[str]
    mpi: Fact[str | None]
    bad_preloads: tuple[str, ...]  # libraries of LD_PRELOAD that can't be loaded


def examine() -> Installation:
    return Installation(
        Fact(f"{platform.python_version()} ({platform.python_implementation()})", sys.executable),
        _system(),
        _allocator(),
        _mpi(),
        tuple(filter(lambda library: not cores.loads(library), _preloaded())),
    )


def version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def openmp_runtimes(maps: str | None = None) -> tuple[str, ...]:
    """The OpenMP libraries in this process. scikit-learn and the like may bring one of their own beside torch's."""
    mapped = _maps() if maps is None else maps
    return tuple(sorted(set(re.findall(r"/[^\n]*/lib(?:gomp|iomp5|omp)\b[^\n/ ]*", mapped))))


def _maps() -> str:
    try:
        return Path("/proc/self/maps").read_bytes().decode(errors="replace")
    except OSError:  # only Linux has it
        return ""


def _system(release: Path = Path("/etc/os-release")) -> Fact[str]:
    """Debian GNU/Linux 12, Linux 6.1, glibc 2.36, x86_64."""
    kernel = f"{platform.system()} {platform.release()}"
    libc = " ".join(filter(None, platform.libc_ver()))
    try:
        name = re.search(r'^PRETTY_NAME="?([^"\n]*)', release.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        name = None
    parts = [name[1] if name else None, kernel, libc, platform.machine()]
    return Fact(", ".join(filter(None, parts)), str(release) if name else "uname")


def _allocator() -> Fact[str]:
    from cputrain import memory

    why_not = memory.why_not()
    if not why_not:
        return Fact("glibc's", "where malloc leads to")
    return Fact(f"left as it is: {why_not}", f"LD_PRELOAD={os.environ['LD_PRELOAD']}" if _preloaded() else "")


def _preloaded() -> list[str]:
    return [library for library in re.split(r"[: ]", os.environ.get("LD_PRELOAD", "")) if library]


def _mpi() -> Fact[str | None]:
    found = mpi.find(os.environ)
    if found is None:
        return Fact(None, "no mpirun of Intel MPI, MPICH or Open MPI in PATH")
    return Fact(str(found).rpartition(",")[0], found.command)
