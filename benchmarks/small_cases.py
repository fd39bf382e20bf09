"""Benchmarks of many small cases in one process: their options, the loop over the cases, table and report."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from interleaved import environment, usable_cores
from machine import description, facts_table, report_path, table


class Case(Protocol):
    name: str


Result = dict[str, Any]


def run(
    what: str,
    about: str,
    cases: Callable[[], Iterable[Any]],
    measure: Callable[[Any, argparse.Namespace], Result],
    printed: Callable[[Result], dict[str, str]],
    seconds: float,
) -> None:
    """`what` is the plural that names the report; `cases` may import torch, which nothing before it does."""
    settings = _arguments(what, about, seconds)
    isa = "avx2" if settings.isa == "avx_vnni" else settings.isa
    limits = environment(isa, settings.threads, ours=True)
    if any(os.environ.get(name) != value for name, value in limits.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | limits)  # read when torch is loaded
    _keep_freed_memory()
    import torch

    from cputrain import native

    torch.set_num_threads(settings.threads)
    if settings.isa == "avx_vnni":
        native.kernels().int16_use_vnni(2)  # always: a virtual machine may hide that it has it
    rounds = [
        [_measured(case, measure, settings) for case in cases() if settings.only in case.name]
        for _ in range(settings.rounds)
    ]
    if not rounds[0]:
        raise SystemExit(f"none of the {what} has a name with {settings.only!r} in it")
    results = [_median_round(of_case) for of_case in zip(*rounds, strict=True)]
    text = _report(what, about, [printed(result) for result in results], settings)
    print(json.dumps(results, indent=1) if settings.json else text)
    if settings.report:
        path = report_path(what if settings.isa == "native" else f"{what}_{settings.isa}")
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


def _measured(case: Case, measure: Callable[[Any, argparse.Namespace], Result], settings: argparse.Namespace) -> Result:
    result = measure(case, settings)
    print(f"{case.name}: {result['ratio']:.2f}", file=sys.stderr)
    return result


def _median_round(of_case: tuple[Result, ...]) -> Result:
    middle = statistics.median_low(result["ratio"] for result in of_case)
    return next(result for result in of_case if result["ratio"] == middle)


def _report(what: str, about: str, rows: list[dict[str, str]], settings: argparse.Namespace) -> str:
    from cputrain import native

    facts = description() | {"kernels": native.kernels().isa, "threads": str(settings.threads)}
    return (
        f"# {what.capitalize()}\n\n    python benchmarks/{what}.py {' '.join(sys.argv[1:])}\n\n"
        f"{about.split('    python')[0].strip()}\n{about.rpartition('--json')[2].rstrip()}\n\n"
        f"{table(rows)}\n{facts_table(facts)}"
    )


def _keep_freed_memory() -> None:
    """Fresh pages cost more than any kernel here; in training, too, buffers are used again."""
    libc = ctypes.CDLL(None)
    for option, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        libc.mallopt(option, value)


def _arguments(what: str, about: str, seconds: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--isa",
        choices=["native", "avx2", "avx_vnni"],
        default="native",
        help="avx2 limits both sides to it; avx_vnni, too, but for our int16 products",
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--only", default="", help=f"{what} whose name contains this")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"for each (default {seconds:g})")
    parser.add_argument(
        "--rounds", type=int, default=1, help="go through all of them so many times, and show each one's median round"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    return parser.parse_args()
