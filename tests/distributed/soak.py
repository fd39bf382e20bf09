"""Many calls in a row of every operation, from Python, functional and inside DDP's backward; by hand as a program.

python -m tests.distributed.soak --calls 20000 --ranks 2
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from tests.distributed.ranks import spawn, start


def rounds(rank: int, size: int, folder: str, calls: int) -> None:
    start(rank, size, folder)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64), bucket_cap_mb=0.01)
    began = time.monotonic()
    for number in range(calls):
        _one_of_each(rank, size, 1 + number % 300)
        model(torch.ones(2, 64)).sum().backward()
        if rank == 0 and number % 1000 == 999:
            print(f"{number + 1} rounds in {time.monotonic() - began:.0f} s", flush=True)
    dist.destroy_process_group()


def _one_of_each(rank: int, size: int, length: int) -> None:
    x = torch.full((length,), float(rank))
    total = size * (size - 1) / 2
    dist.broadcast(x.clone(), 0)
    work = dist.all_reduce(y := x.clone(), async_op=True)
    dist.reduce(x.clone(), size - 1)
    work.wait()
    assert (y == total).all()
    outputs = [torch.empty(length) for _ in range(size)]
    dist.all_gather(outputs, x)
    assert all((outputs[r] == r).all() for r in range(size))
    dist.reduce_scatter(torch.empty(length), [x] * size)
    dist.all_to_all(outputs, [x] * size)
    dist.gather(x, outputs if rank == 0 else None, 0)
    dist.scatter(torch.empty(length), [x] * size if rank == 0 else None, 0)
    assert (functional.all_reduce(x, "sum", dist.group.WORLD) == total).all()
    functional.broadcast(x, 0, dist.group.WORLD).sum().item()
    received = torch.empty(length)
    requests = [dist.isend(x, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    assert all(request.wait() for request in requests) and (received == (rank - 1) % size).all()
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rounds, arguments.ranks, arguments.ranks, folder, arguments.calls)
