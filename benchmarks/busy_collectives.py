"""all_reduce of small and middling tensors, ccl against gloo, on a calm machine and beside busy processes.

  python benchmarks/busy_collectives.py                       2, 4 and 8 ranks; prints a table
  python benchmarks/busy_collectives.py --ranks 2 --rounds 3

Both sides take turns in the same processes; a figure is the median of the rounds' means, so that calls which lost their
core for a while count. A busy process runs on every core, at the ranks' own priority.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

SIZES = {"64 B": (64, 200), "4 KB": (4096, 200), "1 MB": (2**20, 60)}  # bytes, and calls of a round


def _milliseconds(group: dist.ProcessGroup, tensor: torch.Tensor, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return 1000 * (time.perf_counter() - begin) / calls


def measure(rank: int, ranks: int, rounds: int, folder: str) -> None:
    import cputrain.distributed  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("ccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found: dict[str, dict[str, float]] = {}
    for name, (size, calls) in SIZES.items():
        tensor = torch.full((size // 4,), -0.0)
        times: dict[str, list[float]] = {side: [] for side in groups}
        for _ in range(rounds):
            for side, group in groups.items():
                dist.barrier()
                times[side].append(_milliseconds(group, tensor, calls))
        found[name] = {side: statistics.median(values) for side, values in times.items()}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _burn(_: int, until: str) -> None:
    while not os.path.exists(until):
        sum(range(10_000))


def table(ranks: int, rounds: int, busy: bool) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        cores = len(os.sched_getaffinity(0)) if busy else 0
        burners = mp.start_processes(_burn, (f"{folder}/found.json",), nprocs=cores, join=False, start_method="spawn")
        try:
            mp.start_processes(measure, (ranks, rounds, folder), nprocs=ranks, join=True, start_method="spawn")
        finally:
            for process in burners.processes if cores else []:
                process.kill()
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| ranks | machine | size | ccl | gloo | ccl / gloo |\n|---|---|---|---|---|---|")
    for ranks in arguments.ranks:
        for busy in (False, True):
            for size, one in table(ranks, arguments.rounds, busy).items():
                words = [str(ranks), "busy" if busy else "calm", size, f"{one['ccl']:.3f} ms", f"{one['gloo']:.3f} ms"]
                print(f"| {' | '.join(words)} | {one['ccl'] / one['gloo']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
