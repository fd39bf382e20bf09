"""What ranks may go through: one dies, leaves, is late or does something else. Each raises what it is told.

The same processes go through several, with a new group for each; where somebody is killed, that comes last.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.ranks import start

HOST = os.uname().nodename
Said = dict[int, tuple[float, str]]  # of each rank that survived: after how many seconds, and what it raised


def go_through(
    rank: int, size: int, folder: str, names: list[str], seconds: float, environment: dict[str, str]
) -> None:
    for name in names:
        place = Path(folder, name)
        start(rank, size, str(place), timedelta(seconds=seconds), **environment)
        dist.all_reduce(torch.ones(1000))
        dist.barrier()
        began = time.monotonic()
        try:
            globals()[name](rank, place)
            text = "done"
        except (RuntimeError, KeyboardInterrupt) as error:
            text = f"{type(error).__name__}: {error}"
        (place / f"unsaid-{rank}").write_text(f"{time.monotonic() - began:.2f}\n{text}")
        (place / f"unsaid-{rank}").rename(place / f"said-{rank}")  # at once: others look for it
        dist.destroy_process_group()


def said(folder: Path, names: list[str], size: int, seconds: float = 60, **environment: str) -> dict[str, Said]:
    """What was raised, by the name of the scenario."""
    prepare(folder, names)
    arguments = (size, str(folder), names, seconds, environment)
    context = mp.start_processes(go_through, arguments, nprocs=size, join=False, start_method="spawn")
    for process in context.processes:
        process.join(200)
        assert process.exitcode is not None, "a rank hangs"
    return read(folder, names, size)


def prepare(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).mkdir()


def read(folder: Path, names: list[str], size: int) -> dict[str, Said]:
    return {name: _read_one(folder / name, size) for name in names}


def _read_one(folder: Path, size: int) -> Said:
    found = {}
    for rank in range(size):
        if (folder / f"said-{rank}").exists():
            after, text = (folder / f"said-{rank}").read_text().split("\n", 1)
            found[rank] = float(after), text
    return found


# --- The scenarios -----------------------------------------------------------------------------------------------


def a_rank_is_killed(rank: int, place: Path) -> None:
    if rank == 1:
        # A data-loader worker that outlives the rank and holds all its sockets.
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1_000_000))


def a_rank_is_killed_while_others_wait_for_a_message(rank: int, place: Path) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(3), 1)


def a_rank_raises(rank: int, place: Path) -> None:
    if rank == 0:
        raise RuntimeError("an error of the script")
    dist.all_reduce(torch.ones(10))


def a_rank_is_late(rank: int, place: Path) -> None:
    if rank == dist.get_world_size() - 1:
        time.sleep(6)
    dist.all_reduce(torch.ones(10))


def two_ranks_are_late_for_a_monitored_barrier(rank: int, place: Path) -> None:
    if rank:
        time.sleep(8)
    dist.monitored_barrier(timeout=timedelta(seconds=5), wait_all_ranks=True)


def a_rank_is_stopped(rank: int, place: Path) -> None:
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()


def collectives_differ(rank: int, place: Path) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(10))
    else:
        dist.broadcast(torch.ones(10), 0)
    dist.barrier()


def sizes_differ(rank: int, place: Path) -> None:
    dist.all_reduce(torch.ones(10 + rank))


def the_last_size_differs(rank: int, place: Path) -> None:
    dist.all_reduce(torch.ones(10 + (rank == dist.get_world_size() - 1)))


def reductions_differ(rank: int, place: Path) -> None:
    dist.all_reduce(torch.ones(10), op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)


def the_last_takes_the_mean(rank: int, place: Path) -> None:
    last = rank == dist.get_world_size() - 1
    dist.all_reduce(torch.ones(10), op=dist.ReduceOp.AVG if last else dist.ReduceOp.SUM)


def dtypes_differ(rank: int, place: Path) -> None:
    dist.all_reduce(torch.ones(10, dtype=torch.float32 if rank else torch.int32))


def roots_differ(rank: int, place: Path) -> None:
    dist.broadcast(torch.ones(10), rank)
    dist.barrier()


def parts_differ(rank: int, place: Path) -> None:
    dist.all_to_all([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2 + (1 - rank))])


def message_sizes_differ(rank: int, place: Path) -> None:
    if rank == 0:
        dist.send(torch.ones(5), 1)
    else:
        dist.recv(torch.ones(6), 0)


def waits_ten_seconds(rank: int, place: Path) -> None:
    if rank == 1:
        time.sleep(10)
    before = resource.getrusage(resource.RUSAGE_SELF)
    dist.all_reduce(torch.ones(10))
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 1, used


def interrupted(rank: int, place: Path) -> None:
    if rank == 1:
        end = time.monotonic() + 25
        while not (place / "said-0").exists() and time.monotonic() < end:
            time.sleep(0.1)
        return
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    dist.all_reduce(torch.ones(10))
