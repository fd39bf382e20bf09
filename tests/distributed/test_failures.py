"""A rank that dies, leaves, is late or does something else: every other rank hears of it, by name, and soon."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.ranks import start

HOST = os.uname().nodename


def _scenario(rank: int, size: int, folder: str, name: str, seconds: float, environment: dict[str, str]) -> None:
    start(rank, size, folder, timedelta(seconds=seconds), **environment)
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    began = time.monotonic()
    try:
        globals()[f"_{name}"](rank)
        text = "done"
    except (RuntimeError, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    Path(folder, f"said-{rank}").write_text(f"{time.monotonic() - began:.2f}\n{text}")


def said(folder: Path, name: str, size: int, seconds: float = 60, **environment: str) -> dict[int, tuple[float, str]]:
    """What each surviving rank raised, and after how many seconds."""
    arguments = (size, str(folder), name, seconds, environment)
    context = mp.start_processes(_scenario, arguments, nprocs=size, join=False, start_method="spawn")
    for process in context.processes:
        process.join(90)
        assert process.exitcode is not None, "a rank hangs"
    return read(folder, size)


def read(folder: Path, size: int) -> dict[int, tuple[float, str]]:
    found = {}
    for rank in range(size):
        if (folder / f"said-{rank}").exists():
            after, text = (folder / f"said-{rank}").read_text().split("\n", 1)
            found[rank] = float(after), text
    return found


def _a_rank_is_killed(rank: int) -> None:
    if rank == 1:
        # A data-loader worker that outlives the rank and holds all its sockets.
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1_000_000))


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_within_seconds(size: int, tmp_path) -> None:
    found = said(tmp_path, "a_rank_is_killed", size)
    assert set(found) == set(range(size)) - {1}
    for after, text in found.values():
        assert after < 5
        assert text.startswith("PeerDied: rank 1 (host ") and f"host {HOST}" in text and " died" in text
        assert (
            "its last collective was barrier number 2" in text
            and "this rank is in all_reduce (float32, 4,000,000 bytes)" in text
        )


def _a_rank_is_killed_while_others_wait_for_a_message(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(3), 1)


def test_whoever_waits_for_a_message_hears_of_it_too(tmp_path) -> None:
    found = said(tmp_path, "a_rank_is_killed_while_others_wait_for_a_message", 3)
    assert all(after < 5 and "rank 1" in text and "died" in text for after, text in found.values()) and len(found) == 2


def _a_rank_raises(rank: int) -> None:
    if rank == 0:
        raise RuntimeError("an error of the script")
    dist.all_reduce(torch.ones(10))


def test_a_rank_that_ends_early_has_left(tmp_path) -> None:
    found = said(tmp_path, "a_rank_raises", 2)
    assert found[1][0] < 20 and "rank 0" in found[1][1] and "has ended the group" in found[1][1]


def _a_rank_is_late(rank: int) -> None:
    if rank == 2:
        time.sleep(6)
    dist.all_reduce(torch.ones(10))


def _a_rank_is_late_here(rank: int) -> None:
    """As before, of two."""
    if rank == 1:
        time.sleep(6)
    dist.all_reduce(torch.ones(10))


def test_the_timeout_names_the_late_rank(tmp_path) -> None:
    found = said(tmp_path, "a_rank_is_late", 3, seconds=2)
    for rank in (0, 1):
        assert "rank 2" in found[rank][1] and "is late: waited 2 s" in found[rank][1]
        assert found[rank][1].startswith("PeerLate")
        assert 2 <= found[rank][0] < 5
    assert "rank 2" in found[2][1]  # it comes too late, and hears why


def _a_rank_is_stopped(rank: int) -> None:
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


def test_a_stopped_rank_is_waited_for(tmp_path) -> None:
    found = said(tmp_path, "a_rank_is_stopped", 2)
    assert [text for _, text in found.values()] == ["done", "done"] and found[0][0] > 3


def _collectives_differ(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(10))
    else:
        dist.broadcast(torch.ones(10), 0)
    dist.barrier()


def _sizes_differ(rank: int) -> None:
    dist.all_reduce(torch.ones(10 + rank))


def _dtypes_differ(rank: int) -> None:
    dist.all_reduce(torch.ones(10, dtype=torch.float32 if rank else torch.int32))


def _roots_differ(rank: int) -> None:
    dist.broadcast(torch.ones(10), rank)
    dist.barrier()


def _parts_differ(rank: int) -> None:
    dist.all_to_all([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2 + (1 - rank))])


@pytest.mark.parametrize(
    "name", ["collectives_differ", "sizes_differ", "dtypes_differ", "roots_differ", "parts_differ"]
)
def test_mismatched_collectives_are_reported(name: str, tmp_path) -> None:
    found = said(tmp_path, name, 2)
    for after, text in found.values():
        assert after < 5 and text.startswith("CollectivesDiffer: the ranks called different collectives"), text


def _message_sizes_differ(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(5), 1)
    else:
        dist.recv(torch.ones(6), 0)


def test_a_message_of_another_size_is_reported(tmp_path) -> None:
    found = said(tmp_path, "message_sizes_differ", 2)
    assert "rank 0 sent 20 bytes, this rank receives 24" in found[1][1]


def _waits_ten_seconds(rank: int) -> None:
    if rank == 1:
        time.sleep(10)
    before = resource.getrusage(resource.RUSAGE_SELF)
    dist.all_reduce(torch.ones(10))
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 1, used


def test_waiting_burns_no_core(tmp_path) -> None:
    found = said(tmp_path, "waits_ten_seconds", 2)
    assert [text for _, text in found.values()] == ["done", "done"] and found[0][0] > 9


def _interrupted(rank: int) -> None:
    if rank == 1:
        time.sleep(25)
        return
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    dist.all_reduce(torch.ones(10))


def test_ctrl_c_ends_a_wait(tmp_path) -> None:
    found = said(tmp_path, "interrupted", 2)
    assert found[0][1].startswith("KeyboardInterrupt") and found[0][0] < 20


# --- Between machines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", ["0;1", "0;1,2"])
def test_a_killed_rank_of_another_machine_is_named(machines: str, tmp_path) -> None:
    size = machines.replace(";", ",").count(",") + 1
    found = said(tmp_path, "a_rank_is_killed", size, CPUTRAIN_CCL_TEST_MACHINES=machines)
    assert set(found) == set(range(size)) - {1}
    for after, text in found.values():
        assert after < 5 and text.startswith(f"PeerDied: rank 1 (host {HOST}, process "), text
        assert "its last collective was" in text and "this rank is in all_reduce" in text


def test_a_stopped_rank_of_another_machine_is_waited_for(tmp_path) -> None:
    found = said(tmp_path, "a_rank_is_stopped", 2, CPUTRAIN_CCL_TEST_MACHINES="0;1")
    assert [text for _, text in found.values()] == ["done", "done"] and found[0][0] > 3


@pytest.mark.parametrize("name", ["sizes_differ", "parts_differ"])
def test_mismatched_collectives_of_two_machines_are_reported(name: str, tmp_path) -> None:
    found = said(tmp_path, name, 2, CPUTRAIN_CCL_TEST_MACHINES="0;1")
    for _, text in found.values():
        assert text.startswith("CollectivesDiffer: the ranks called different collectives"), text
