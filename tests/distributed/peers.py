"""Ranks that reduce for ever, each with a worker that holds its sockets, until something happens. A script of ranks:

    cputrain run tests/distributed/peers.py TIMEOUT [HOW [RANKS]]

HOW is what those ranks do before the reductions: "gil" holds the interpreter for 20 s. Each rank prints which way its
data takes, when it has begun, and what ended it, with the time, which is the same on all hosts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def say(text: str) -> None:
    sys.stdout.write(f"PEER {dist.get_rank()} {time.time():.2f} {os.getpid()} {text}\n")
    sys.stdout.flush()


def start_worker() -> None:
    """As a data loader's: it outlives its rank for a while, and holds all its sockets."""
    parent = os.getpid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end = time.monotonic() + 60
        while time.monotonic() < end and (os.getppid() == parent or time.monotonic() < end - 40):
            time.sleep(0.2)
        os._exit(0)


def main() -> None:
    timeout, how, ranks = float(sys.argv[1]), *[*sys.argv[2:], "", ""][:2]
    dist.init_process_group("ccl", timeout=timedelta(seconds=timeout))
    start_worker()
    say(f"on {socket.gethostname()} by {dist.group.WORLD.transport.name}")
    tensor = torch.ones(100_000)
    begun = time.monotonic()
    while time.monotonic() - begun < 100:
        if how == "gil" and str(dist.get_rank()) in ranks.split(","):
            ctypes.PyDLL(None).sleep(20)
            how = ""  # once
        tensor.fill_(1)
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            say(f"ended {type(error).__name__}: {error}")
            sys.exit(7)
        assert (tensor == dist.get_world_size()).all()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
