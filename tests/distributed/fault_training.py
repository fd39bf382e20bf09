"""A training by DistributedDataParallel in which one rank does something wrong. A script of ranks:

    cputrain launch -n 3 tests/distributed/fault_training.py FAULT RANK

FAULT is one of FAULTS or LINK, RANK is the one that commits it in the fifth step, and "none" trains to the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, WRONG_STEP = 40, 5
LINK = "link"  # the test takes a machine's network away when a rank says "fault"; the ranks train on slowly
# Of the group. Only a stopped rank is waited for so long: all other faults are noticed as they happen.
TIMEOUT = {"stop": 6}
CODE = 3


def _raise() -> None:
    raise KeyError("a bug of the script")


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _other_collective() -> None:
    dist.broadcast(torch.ones(7), 0)


def _other_shape() -> None:
    dist.all_reduce(torch.ones(7))


FAULTS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "exit-0": lambda: sys.exit(0),
    "os-exit": lambda: os._exit(CODE),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop,
    "other-collective": _other_collective,
    "other-shape": _other_shape,
}


def say(text: str) -> None:
    """In one piece: mpirun mixes what isn't."""
    sys.stdout.write(f"FAULTS {dist.get_rank()} {time.time():.2f} {text}\n")
    sys.stdout.flush()


def main() -> None:
    fault, culprit = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("ccl", timeout=timedelta(seconds=TIMEOUT.get(fault, 100)))
    rank = dist.get_rank()
    say(f"transport {dist.group.WORLD.transport.name}")
    # Several buckets: some all_reduces are under way, some queued, when it happens.
    model = DistributedDataParallel(
        nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(100, 100), nn.Tanh())]), bucket_cap_mb=0.05
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS if fault != LINK else 50 * STEPS):
        loss = model(torch.ones(8, 100)).square().mean()
        if step == WRONG_STEP and rank == culprit and fault != "none":
            say("fault")
            FAULTS.get(fault, lambda: None)()
        time.sleep(0.05 if fault == LINK else 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    say("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
