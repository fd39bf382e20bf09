"""Many calls in a row of every operation, from Python, functional and inside DDP's backward. Runs on any torch.

python -m tests.distributed.soak --calls 20000 --ranks 2 --starts 5
python -m tests.distributed.soak --calls 1000 --starts 2 --transport mpi --mpirun intel

A hang ends as an error after the timeout; an abort at exit is the exit code of a rank. Either ends this with code 1.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from tests.distributed import mpi_ranks
from tests.distributed.ranks import spawn, start

Call = Callable[[], object]


def rounds(rank: int, size: int, folder: str, calls: int) -> None:
    """So many calls of each operation, one of each in turn."""
    warnings.simplefilter("ignore", FutureWarning)  # the old names of torch 2.13 are the only ones elsewhere
    start(rank, size, folder, timeout=timedelta(seconds=60))
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64), bucket_cap_mb=0.01)
    began, made = time.monotonic(), 0
    for number in range(calls):
        for call in (*_from_python(rank, size, 1 + number % 300), *_functional(rank, size, 1 + number % 300)):
            call()
            made += 1
        model(torch.ones(2, 64)).sum().backward()
        made += 1
    if rank == 0:
        name, seconds = dist.group.WORLD.transport.name, time.monotonic() - began
        print(f"{calls} calls of each operation by {name}, {made} in all, in {seconds:.0f} s", flush=True)
    dist.destroy_process_group()


def _from_python(rank: int, size: int, length: int) -> Iterator[Call]:
    x = torch.full((length,), float(rank))
    many, outputs = torch.full((size * length,), float(rank)), [torch.empty(length) for _ in range(size)]
    total = size * (size - 1) / 2

    def all_reduce() -> None:
        work = dist.all_reduce(y := x.clone(), async_op=True)
        dist.reduce(x.clone(), size - 1)
        work.wait()
        assert (y == total).all()

    def all_gather() -> None:
        dist.all_gather(outputs, x)
        assert all((outputs[r] == r).all() for r in range(size))

    def exchange() -> None:
        received = torch.empty(length)
        requests = [dist.isend(x, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
        assert all(request.wait() for request in requests) and (received == (rank - 1) % size).all()

    def objects() -> None:
        found = [None] * size
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": r} for r in range(size)]

    def coalesced() -> None:
        with dist._coalescing_manager():
            for part in (one := x.clone(), other := x.clone()):
                dist.all_reduce(part)
        assert (one == total).all() and (other == total).all()

    yield all_reduce
    yield all_gather
    yield exchange
    yield objects
    yield coalesced
    yield lambda: dist.broadcast(x.clone(), 0)
    yield lambda: dist.reduce_scatter(torch.empty(length), [x] * size)
    yield lambda: dist.all_to_all(outputs, [x] * size)
    yield lambda: dist.gather(x, outputs if rank == 0 else None, 0)
    yield lambda: dist.scatter(torch.empty(length), [x] * size if rank == 0 else None, 0)
    yield lambda: dist.all_gather_into_tensor(many.clone(), x)
    yield lambda: dist.reduce_scatter_tensor(x.clone(), many)
    yield lambda: dist.all_to_all_single(torch.empty_like(many), many)
    yield dist.barrier
    yield dist.monitored_barrier


def _functional(rank: int, size: int, length: int) -> Iterator[Call]:
    x, many, group = torch.full((length,), float(rank)), torch.ones(size * length), dist.group.WORLD
    yield lambda: functional.all_reduce(x, "sum", group).sum().item()
    yield lambda: functional.broadcast(x, 0, group).sum().item()
    yield lambda: functional.all_gather_tensor(x, 0, group).sum().item()
    yield lambda: functional.reduce_scatter_tensor(many, "sum", 0, group).sum().item()
    yield lambda: functional.all_to_all_single(many, None, None, group).sum().item()


def start_once(ranks: int, calls: int, transport: str, mpirun: str | None, folder: str) -> None:
    os.environ["CPUTRAIN_CCL_TRANSPORT"] = transport
    if mpirun is None:
        spawn(rounds, ranks, ranks, folder, calls)
        return
    command = getattr(mpi_ranks, mpirun)(ranks)
    answer = mpi_ranks.run(command, "tests.distributed.soak:rounds", folder, calls, seconds=3600)
    print(answer.stdout, end="", flush=True)
    if answer.returncode:
        raise SystemExit(answer.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="of each operation")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5, help="how often processes are started anew, and end")
    parser.add_argument("--transport", default="auto", help="auto, gloo, mpi or oneccl")
    parser.add_argument("--mpirun", choices=("intel", "mpich", "open_mpi"), help="who starts the ranks, for mpi")
    arguments = parser.parse_args()
    for _ in range(arguments.starts):
        with tempfile.TemporaryDirectory() as folder:
            calls = -(-arguments.calls // arguments.starts)
            start_once(arguments.ranks, calls, arguments.transport, arguments.mpirun, folder)
