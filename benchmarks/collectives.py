"""all_reduce of two ranks with one core each: ccl, gloo and a hand-made bound, interleaved.

  python benchmarks/collectives.py                 prints the table and writes benchmarks/results/collectives_*.md

The bound (shared_memory_bound.cpp) sums in two processes that do nothing else: no checks, no Python, no sleeping.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import machine

CASES = [(torch.float32, 1, 200), (torch.float32, 16, 30), (torch.float32, 64, 15), (torch.bfloat16, 64, 15)]
BOUND = Path(__file__).with_name("shared_memory_bound.cpp")
CHUNK_KB = 256
BLOCK = 5  # calls of one side before the other has its turn


def block(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[float]:
    """Milliseconds of some calls in a row; one before them brings its own memory into the caches."""
    times = []
    for _ in range(1 + BLOCK):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(1000 * (time.perf_counter() - start))
    return times[1:]


def measure(rank: int, folder: str, repeats: int) -> None:
    """One rank: ccl and gloo in turns, in the same processes."""
    import cputrain.distributed  # noqa: F401

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("ccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = []
    for dtype, megabytes, rounds in CASES:
        tensor = torch.zeros(megabytes * 2**20 // dtype.itemsize, dtype=dtype)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(rounds * repeats // BLOCK):
            for name, group in groups.items():
                times[name] += block(tensor, group)
        found.append({"dtype": str(dtype), "megabytes": megabytes} | times)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def bound_program(folder: str) -> str | None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    program = f"{folder}/bound"
    subprocess.run([compiler, "-O3", "-march=native", "-o", program, str(BOUND)], check=True)
    return program


def bound_times(program: str, megabytes: int, rounds: int) -> list[float]:
    answer = subprocess.run(
        [program, str(megabytes), str(rounds), str(CHUNK_KB)], capture_output=True, text=True, check=True
    )
    return [float(line) for line in answer.stdout.split()]


def rows(times: list[dict], bounds: dict[int, list[float]]) -> list[dict[str, str]]:
    table = []
    for case in times:
        ccl, gloo = min(case["ccl"]), min(case["gloo"])
        bound = (
            bounds.get(case["megabytes"], []) if "float32" in case["dtype"] and "b" not in case["dtype"][6:7] else []
        )
        table.append(
            {
                "all_reduce": f"{case['megabytes']} MB {case['dtype'].removeprefix('torch.')}",
                "ccl, best (median) ms": f"{ccl:.3f} ({statistics.median(case['ccl']):.3f})",
                "gloo, best (median) ms": f"{gloo:.3f} ({statistics.median(case['gloo']):.3f})",
                "gloo / ccl, best (median)": f"{gloo / ccl:.1f} "
                f"({statistics.median(case['gloo']) / statistics.median(case['ccl']):.1f})",
                "bound, best ms": f"{min(bound):.3f}" if bound else "",
                "bound / ccl": f"{min(bound) / ccl:.2f}" if bound else "",
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-report", action="store_true")
    arguments = parser.parse_args()
    facts = machine.description()
    with tempfile.TemporaryDirectory() as folder:
        program = bound_program(folder)
        before = {mb: bound_times(program, mb, n) for _, mb, n in CASES[:3]} if program else {}
        mp.spawn(measure, (folder, arguments.repeats), nprocs=2)
        after = {mb: bound_times(program, mb, n) for _, mb, n in CASES[:3]} if program else {}
        times = json.loads(Path(folder, "times.json").read_text())
    table = machine.table(rows(times, {mb: before[mb] + after[mb] for mb in before}))
    print(table)
    if not arguments.no_report:
        path = machine.report_path("collectives")
        path.write_text(
            "# Collectives of two ranks, one core each\n\n"
            "`python benchmarks/collectives.py`; all_reduce through `dist.all_reduce`, ccl and gloo in turns in the "
            "same processes, the bound before and after them.\n\n" + machine.facts_table(facts) + "\n" + table
        )
        print(f"written to {path}")


if __name__ == "__main__":
    main()
