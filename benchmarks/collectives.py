"""all_reduce of two ranks with one core each: ccl, gloo, oneCCL over MPI and a hand-made bound, interleaved.

  python benchmarks/collectives.py                 prints the table and writes benchmarks/results/collectives_*.md

The bound (shared_memory_bound.cpp) sums in two processes that do nothing else: no checks, no Python, no sleeping.
oneCCL is the real one (`pip install "cputrain[oneccl]"`), with the settings of engines/oneccl_library.py, in a second
group of the backend ccl; "alone" is its all_reduce without what ccl does around it (comparing titles between machines).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import machine

CASES = [(torch.float32, 1, 200), (torch.float32, 16, 30), (torch.float32, 64, 15), (torch.bfloat16, 64, 15)]
BOUND = Path(__file__).with_name("shared_memory_bound.cpp")
CHUNK_KB = 256
# oneCCL has kernels for bf16 with AVX-512 and without any vectors.
AVX2 = {"CPUTRAIN_ISA": "avx2", "CCL_BF16": "scalar"}
BLOCK = 5  # calls of one side before the other has its turn


def block(all_reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> list[float]:
    """Milliseconds of some calls in a row; one before them brings its own memory into the caches."""
    times = []
    for _ in range(1 + BLOCK):
        dist.barrier()
        start = time.perf_counter()
        all_reduce(tensor)
        times.append(1000 * (time.perf_counter() - start))
    return times[1:]


def sides(with_oneccl: bool) -> dict[str, Callable[[torch.Tensor], object]]:
    """Name -> all_reduce. The default group is ccl's, over shared memory."""
    found = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if with_oneccl:
        os.environ["CPUTRAIN_CCL_TRANSPORT"] = "oneccl"
        found["oneCCL"] = dist.new_group(backend="ccl")
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        name: functools.partial(dist.all_reduce, group=group) for name, group in found.items()
    }
    if with_oneccl:
        engine = found["oneCCL"].transport._between
        calls["oneCCL alone"] = lambda tensor: engine.all_reduce(tensor, 0, 60)
    return calls


def measure(rank: int, folder: str, repeats: int, with_oneccl: bool) -> None:
    """One rank: all sides in turns, in the same processes."""
    import cputrain.distributed  # noqa: F401

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("ccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    calls = sides(with_oneccl)
    found = []
    for dtype, megabytes, rounds in CASES:
        # However often it is summed, it stays what it is; and ccl doesn't pass on pages of (positive) zeros.
        tensor = torch.full((megabytes * 2**20 // dtype.itemsize,), -0.0, dtype=dtype)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds * repeats // BLOCK):
            for name, all_reduce in calls.items():
                times[name] += block(all_reduce, tensor)
        found.append({"dtype": str(dtype), "megabytes": megabytes, "times": times})
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run_ranks(folder: str, repeats: int) -> None:
    """Under Intel's mpirun if it and oneCCL are there."""
    mpirun = Path(sys.prefix, "bin", "mpiexec.hydra")
    if not mpirun.exists() or not Path(sys.prefix, "lib/ccl/cpu/lib/libccl.so.1").exists():
        print('no oneCCL beside this Python (pip install "cputrain[oneccl]"): its columns are left out')
        mp.spawn(measure, (folder, repeats, False), nprocs=2)
        return
    command = [str(mpirun), "-n", "2", sys.executable, __file__, "--repeats", str(repeats), "--rank-of", folder]
    subprocess.run(command, env={**os.environ, "I_MPI_PIN": "0"}, check=True)


def bound_program(folder: str) -> str | None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    program = f"{folder}/bound"
    kind = ["-mavx2", "-mfma"] if os.environ.get("CPUTRAIN_ISA") == "avx2" else ["-march=native"]
    subprocess.run([compiler, "-O3", *kind, "-o", program, str(BOUND)], check=True)
    return program


def bound_times(program: str, megabytes: int, rounds: int) -> list[float]:
    answer = subprocess.run(
        [program, str(megabytes), str(rounds), str(CHUNK_KB)], capture_output=True, text=True, check=True
    )
    return [float(line) for line in answer.stdout.split()]


def rows(cases: list[dict], bounds: dict[int, list[float]]) -> list[dict[str, str]]:
    table = []
    for case in cases:
        times, is_fp32 = case["times"], case["dtype"] == "torch.float32"
        ccl = min(times["ccl"])
        bound = bounds.get(case["megabytes"], []) if is_fp32 else []
        row = {"all_reduce": f"{case['megabytes']} MB {case['dtype'].removeprefix('torch.')}"}
        row |= {f"{name}, best (median) ms": f"{min(t):.3f} ({statistics.median(t):.3f})" for name, t in times.items()}
        for name in list(times)[1:]:
            medians = statistics.median(times[name]) / statistics.median(times["ccl"])
            row[f"{name} / ccl, best (median)"] = f"{min(times[name]) / ccl:.2f} ({medians:.2f})"
        row["bound, best ms"] = f"{min(bound):.3f}" if bound else ""
        row["bound / ccl"] = f"{min(bound) / ccl:.2f}" if bound else ""
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--isa", choices=["native", "avx2"], default="native", help="avx2 limits ours and oneCCL's bf16"
    )
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--rank-of", metavar="FOLDER", help=argparse.SUPPRESS)  # one of mpirun's ranks
    arguments = parser.parse_args()
    if arguments.rank_of:
        measure(int(os.environ["PMI_RANK"]), arguments.rank_of, arguments.repeats, True)
        return
    if arguments.isa == "avx2":
        os.environ.update(AVX2)
    facts = machine.description() | {"instruction set": arguments.isa}
    with tempfile.TemporaryDirectory() as folder:
        program = bound_program(folder)
        before = {mb: bound_times(program, mb, n) for _, mb, n in CASES[:3]} if program else {}
        run_ranks(folder, arguments.repeats)
        after = {mb: bound_times(program, mb, n) for _, mb, n in CASES[:3]} if program else {}
        times = json.loads(Path(folder, "times.json").read_text())
    table = machine.table(rows(times, {mb: before[mb] + after[mb] for mb in before}))
    print(table)
    if not arguments.no_report:
        path = machine.report_path("collectives" if arguments.isa == "native" else "collectives_avx2")
        path.write_text(
            "# Collectives of two ranks, one core each\n\n"
            f"`python benchmarks/collectives.py --isa {arguments.isa}`; "
            "all_reduce through `dist.all_reduce`, all sides in turns in the same "
            "processes, the bound before and after them. oneCCL 2021.13.1 over Intel MPI, `CCL_ALLREDUCE=nreduce`, "
            '`CCL_WORKER_OFFLOAD=0`; "alone" is without what ccl does around it.\n\n'
            + machine.facts_table(facts)
            + "\n"
            + table
        )
        print(f"written to {path}")


if __name__ == "__main__":
    main()
