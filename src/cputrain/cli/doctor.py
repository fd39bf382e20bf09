"""`cputrain doctor`: what this CPU is, what of it this process may use, which kernels run on it, and why."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cputrain import __version__, hardware, settings
from cputrain.cli import env
from cputrain.cli.app import command, new_app, option
from cputrain.cli.terminal import in_bytes
from cputrain.hardware import Fact

if TYPE_CHECKING:
    from rich.console import RenderableType

app = new_app()
EXAMPLES = """
    cputrain doctor
    cputrain doctor --strict && cputrain run run_qa.py --do_train
    cputrain doctor --json > machine.json
"""
Row = tuple[str, str, str]

_SOURCE_WIDTH = 33
_PACKAGES = ("torch", "numpy", "transformers", "accelerate")


@dataclass(frozen=True)
class Kernels:
    """Which kernels run, why, and what is wrong with the native library if anything is."""

    isa: str
    reason: str
    problem: str | None


@dataclass(frozen=True)
class Threads:
    """How many threads torch uses, what was asked of OpenMP, and which OpenMP runtimes are loaded."""

    torch: int | None
    omp_num_threads: str | None
    runtimes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All that the doctor found. `advice` is what a user should change, worst first."""

    cputrain: str
    packages: dict[str, str | None]
    installation: env.Installation
    hardware: hardware.Hardware
    kernels: Kernels
    auto: Fact[str] | None  # the precision that dtype="auto" means here; None if no kernel runs
    threads: Threads
    advice: tuple[str, ...]


@command(app, EXAMPLES)
def doctor(
    as_json: Annotated[bool, option("Print all of it as JSON, with every source.", "--json")] = False,
    strict: Annotated[bool, option("End with 1 if there is any warning.", "--strict")] = False,
) -> None:
    """Say what this CPU is, what of it may be used, which kernels run on it, and why.

    Lines that begin with ! are warnings, each with what to do. The exit code is 1 if the native library doesn't load,
    so that nothing would be optimised; with --strict also if there is a warning; else 0.
    """
    report = examine()
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _show(report)
    if report.kernels.problem or (strict and report.advice):
        raise typer.Exit(1)


def examine() -> Report:
    machine, kernels = hardware.this_machine(), _kernels()
    threads, installed = _threads(), env.examine_installation()
    packages = {name: env.version(name) for name in _PACKAGES}
    return Report(
        cputrain=__version__,
        packages=packages,
        installation=installed,
        hardware=machine,
        kernels=kernels,
        auto=None if kernels.problem else _auto(),
        threads=threads,
        advice=(*_advice(machine, kernels, threads), *_advice_on(installed, packages)),
    )


def _kernels() -> Kernels:
    isa, reason = hardware.best_isa()
    try:
        from cputrain import native

        if native.why_not() is not None:
            return Kernels(isa, reason, f"{native.why_not()}: models train as stock here.")
        native.kernels_of(isa)
    except ImportError as error:
        return Kernels(isa, reason, f"torch can't be imported ({error}): reinstall it with `pip install torch`.")
    except ValueError as error:  # the library is missing, broken or of another version
        return Kernels(isa, reason, str(error))
    return Kernels(isa, reason, None)


def _auto() -> Fact[str]:
    """Measured within two seconds the first time, and remembered, as `optimize` does it."""
    from cputrain.formats import choose

    choice = choose.automatic()
    return Fact(choice.dtype, choice.reason.removeprefix(choose.AUTO))


def _threads() -> Threads:
    """Asked after the kernels were loaded, so that every OpenMP runtime that a training would have is there."""
    torch = sys.modules.get("torch")  # the native library's module has imported it, if it can be imported
    threads = torch.get_num_threads() if torch else None
    return Threads(threads, settings.value_of(settings.THREADS) or None, env.openmp_runtimes())


def _advice(machine: hardware.Hardware, kernels: Kernels, threads: Threads) -> Iterator[str]:
    usable = machine.usable_cores.value
    if kernels.problem:
        yield kernels.problem
    if threads.torch is not None and threads.torch != usable:
        said = f"torch uses {_counted(threads.torch, 'thread')}, but {_counted(usable, 'core')} may be used"
        yield f"{said}: set OMP_NUM_THREADS={usable}."
    if len(threads.runtimes) > 1:
        yield (
            f"{len(threads.runtimes)} OpenMP runtimes fight over the cores: {', '.join(threads.runtimes)}. "
            "Keep torch's: take the others out of LD_PRELOAD, or uninstall the packages that bring them."
        )
    if "CPUTRAIN_ISA" in kernels.reason:
        yield f"{kernels.reason} chooses the kernels, which may be slower than this CPU's best: unset it."


def _advice_on(installed: env.Installation, packages: dict[str, str | None]) -> Iterator[str]:
    for library in installed.bad_preloads:
        yield f"LD_PRELOAD names {library}, which can't be loaded: correct its path, or unset LD_PRELOAD."
    if packages["torch"] and not packages["numpy"]:
        yield "numpy is not installed, and torch can't exchange data with it: pip install numpy."
    if not packages["transformers"]:
        yield 'transformers is not installed: for Hugging Face models, pip install "cputrain[hf]".'


# --- The screen --------------------------------------------------------------------------------------------------


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"[bold]cputrain {report.cputrain}[/]", highlight=False)
    console.print(_table(_sections(report)))
    for line in report.advice:
        console.print(f"[bold yellow]![/] {line}", highlight=False)


def _table(sections: Iterable[Iterable[Row]]) -> RenderableType:
    """Three columns: what, the answer, and where it came from."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", ratio=10)
    table.add_column(overflow="fold", ratio=11, style="dim")
    for section in sections:
        table.add_row()
        for what, answer, source in section:
            table.add_row(what, Text(answer), Text(_shortened(source)))
    return table


def _shortened(source: str) -> str:
    """A path keeps the end that fits the third column of 80; `--json` has all of it."""
    path, colon, rest = source.partition(":")
    if path.startswith("/"):
        while len(path) > _SOURCE_WIDTH and "/" in path.removeprefix("…/"):
            path = "…/" + path.removeprefix("…/").lstrip("/").partition("/")[2]
    return path + colon + rest


def _sections(report: Report) -> Iterator[list[Row]]:
    machine = report.hardware
    yield [
        ("CPU", f"{machine.model.value} ({machine.vendor.value})", machine.model.source),
        ("sets", _sets(machine.instruction_sets.value), machine.instruction_sets.source),
        ("cores", _cores(machine), machine.cores.source),
        ("sockets", str(len(machine.sockets.value)), machine.sockets.source),
        ("NUMA", _nodes(machine.numa_nodes.value), machine.numa_nodes.source),
        ("caches", ", ".join(map(_cache, machine.caches.value)) or "unknown", machine.caches.source),
        ("memory", in_bytes(machine.memory_total.value), machine.memory_total.source),
    ]
    cpuset, quota, limit = machine.cpuset, machine.cpu_quota, machine.memory_limit
    yield [
        ("affinity", _ranges(machine.affinity.value), machine.affinity.source),
        ("cpuset", "none" if cpuset.value is None else _ranges(cpuset.value), cpuset.source),
        ("quota", "none" if quota.value is None else f"{quota.value:g} CPUs", quota.source),
        ("limit", "none" if limit.value is None else in_bytes(limit.value), limit.source),
        # The files that decided stand in the lines above.
        ("usable", _counted(machine.usable_cores.value, "core"), re.sub(r" \(/.*?\)", "", machine.usable_cores.source)),
    ]
    yield list(_software(report))


def _software(report: Report) -> Iterator[Row]:
    kernels, threads = report.kernels, report.threads
    yield "kernels", f"{kernels.isa}: native library {'does NOT load' if kernels.problem else 'loads'}", kernels.reason
    if report.auto is not None:
        yield "auto", f"{report.auto.value}: what optimize computes in", report.auto.source
    yield "bf16", *_bf16(report.hardware.instruction_sets.value)
    runtimes = " and ".join(path.rpartition("/")[2] for path in threads.runtimes) or "no OpenMP"
    asked = "is not set" if threads.omp_num_threads is None else f"is {threads.omp_num_threads}"
    yield "threads", f"{threads.torch or 'unknown'} ({runtimes})", f"torch; OMP_NUM_THREADS {asked}"
    yield "malloc", report.installation.allocator.value, report.installation.allocator.source
    yield "MPI", report.installation.mpi.value or "none", report.installation.mpi.source
    versions = [f"{name} {version or '(not installed)'}" for name, version in report.packages.items()]
    yield "packages", ", ".join(versions), ""
    yield "Python", report.installation.python.value, report.installation.python.source
    distribution, _, kernel = report.installation.system.value.partition(", ")
    yield "system", distribution, kernel


def _bf16(sets: tuple[str, ...]) -> tuple[str, str]:
    found = [name for name in hardware.BF16_SETS if name in sets]
    if found:
        return "in hardware", f"instruction sets: {', '.join(found)}"
    return "not in hardware: stored as bf16, multiplied in fp32", "neither amx_bf16 nor avx512_bf16"


def _sets(names: Iterable[str]) -> str:
    """The avx512 family says its name once: avx512(bw dq f vl _vnni)."""
    names = tuple(names)
    wide = [name.removeprefix("avx512") for name in names if name.startswith("avx512")]
    others = [name for name in names if not name.startswith("avx512")]
    return " ".join([*others, *([f"avx512({' '.join(sorted(wide, key=lambda n: (n[0] == '_', n)))})"] if wide else [])])


def _cores(machine: hardware.Hardware) -> str:
    logical, smt = len(machine.logical_cpus.value), machine.threads_per_core
    siblings = f"SMT, siblings {_ranges(machine.cores.value[0])} …" if smt > 1 else "no SMT"
    return f"{len(machine.cores.value)} physical, {logical} logical ({siblings})"


def _nodes(nodes: tuple[hardware.NumaNode, ...]) -> str:
    if len(nodes) > 4:
        return f"{len(nodes)} nodes, the first of CPUs {_ranges(nodes[0].cpus)}"
    return "; ".join(f"node {node.number}: CPUs {_ranges(node.cpus)}, {in_bytes(node.memory)}" for node in nodes)


def _cache(cache: hardware.Cache) -> str:
    kind = {"data": "d", "instruction": "i"}.get(cache.kind, "")
    return f"L{cache.level}{kind} {cache.instances} × {in_bytes(cache.size)}"


def _ranges(cpus: Iterable[int]) -> str:
    """0, 1, 2, 8 is "0-2,8", as the kernel writes it."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
