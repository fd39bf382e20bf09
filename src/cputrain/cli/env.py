"""What is installed around cputrain, and `cputrain env`, which prints it for a bug report, with the machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cputrain
from cputrain import settings
from cputrain.cli.app import command, new_app
from cputrain.cli.terminal import in_bytes, on_a_terminal
from cputrain.hardware import Fact
from cputrain.launch import cores, mpi
from cputrain.secrets_in_clear import is_secret_name, shown_value

if TYPE_CHECKING:
    from cputrain.cli.doctor import Report

app = new_app()
EXAMPLES = """
    cputrain env
    cputrain env > environment.txt
"""
_PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "peft", "psutil"),
    *("mpi4py", "impi-rt", "oneccl-devel", "typer", "rich", "ruamel.yaml"),
)
# Variables that change what is computed, by whom or how fast.
_VARIABLES = re.compile(
    r"(CPUTRAIN|OMP|KMP|GOMP|MKL|DNNL|ONEDNN|CCL|I_MPI|FI|OMPI|ACCELERATE|PET|TORCH|TORCHELASTIC|MALLOC|GLIBC)_\w+"
    r"|LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|HF_HOME"
    r"|HF_HUB_OFFLINE|LANG|LC_ALL|SLURM_(JOB_ID|NTASKS|CPUS_PER_TASK)|KUBERNETES_SERVICE_HOST"
)


@command(app, EXAMPLES)
def env() -> None:
    """Print versions, settings and the machine, for a bug report.

    Values of variables whose names speak of tokens, keys or passwords are not shown.
    """
    from cputrain.cli import doctor  # which imports this module

    lines = list(_lines(doctor.examine()))
    width = max(len(name) for name, _ in lines)
    print("\n".join(on_a_terminal(f"{name:<{width}}  ", value, width + 2) for name, value in lines))


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    machine, installed = report.hardware, report.installation
    yield "cputrain", f"{report.cputrain}, {Path(cputrain.__file__).parent}"
    yield "Python", f"{installed.python.value}, {installed.python.source}"
    yield "system", installed.system.value
    for name in _PACKAGES:
        yield name, version(name) or "not installed"
    yield "CPU", f"{machine.model.value} ({machine.vendor.value})"
    yield "instruction sets", " ".join(machine.instruction_sets.value)
    yield "usable cores", f"{machine.usable_cores.value} ({machine.usable_cores.source})"
    limit = machine.memory_limit.value
    yield "memory", in_bytes(machine.memory_total.value)
    yield "memory limit", "none" if limit is None else in_bytes(limit)
    yield "kernels", f"{report.kernels.isa} ({report.kernels.reason})"
    yield "native library", report.kernels.problem or "loads"
    yield "dtype auto", f"{report.auto.value} ({report.auto.source})" if report.auto else "unknown"
    yield "threads", str(report.threads.torch)
    yield "OpenMP", ", ".join(report.threads.runtimes) or "none"
    yield "allocator", installed.allocator.value
    yield "MPI", f"{installed.mpi.value}, {installed.mpi.source}" if installed.mpi.value else "none"
    yield from _variables(os.environ)
    for line in report.advice:
        yield "warning", line


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(environ.items()):
        if _VARIABLES.fullmatch(name):
            yield name, "(set, not shown)" if is_secret_name(name) else repr(shown_value(value))


# --- What is installed ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installation:
    """Each answer with where it came from. `mpi` is None if no mpirun was found."""

    python: Fact[str]
    system: Fact[str]
    allocator: Fact[str]
    mpi: Fact[str | None]
    bad_preloads: tuple[str, ...]  # libraries of LD_PRELOAD that can't be loaded


def examine_installation() -> Installation:
    return Installation(
        Fact(f"{platform.python_version()} ({platform.python_implementation()})", sys.executable),
        _system(),
        _allocator(),
        _mpi(),
        tuple(filter(lambda library: not cores.loads(library), settings.preloaded())),
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
    preloaded = f"LD_PRELOAD={settings.value_of(settings.PRELOAD)}" if settings.preloaded() else ""
    return Fact(f"left as it is: {why_not}", preloaded)


def _mpi() -> Fact[str | None]:
    found = mpi.find(os.environ)
    if found is None:
        return Fact(None, "no mpirun of Intel MPI, MPICH or Open MPI in PATH")
    return Fact(str(found).rpartition(",")[0], found.command)
