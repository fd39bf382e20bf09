"""`cputrain env`: what a bug report needs, to be pasted into it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import cputrain
from cputrain.cli import doctor, installation
from cputrain.cli.app import command, new_app
from cputrain.cli.wrapping import on_a_terminal
from cputrain.secrets_in_clear import is_secret_name, shown_value

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
    lines = list(_lines(doctor.examine()))
    width = max(len(name) for name, _ in lines)
    print("\n".join(on_a_terminal(f"{name:<{width}}  ", value, width + 2) for name, value in lines))


def _lines(report: doctor.Report) -> Iterator[tuple[str, str]]:
    machine, installed = report.hardware, report.installation
    yield "cputrain", f"{report.cputrain}, {Path(cputrain.__file__).parent}"
    yield "Python", f"{installed.python.value}, {installed.python.source}"
    yield "system", installed.system.value
    for name in _PACKAGES:
        yield name, installation.version(name) or "not installed"
    yield "CPU", f"{machine.model.value} ({machine.vendor.value})"
    yield "instruction sets", " ".join(machine.instruction_sets.value)
    yield "usable cores", f"{machine.usable_cores.value} ({machine.usable_cores.source})"
    limit = machine.memory_limit.value
    yield "memory", doctor.in_bytes(machine.memory_total.value)
    yield "memory limit", "none" if limit is None else doctor.in_bytes(limit)
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
