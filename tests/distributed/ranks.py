"""Starts the ranks of a test as processes of their own, with a store in a file."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=120)


def spawn(main: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """main(rank, …) in so many processes; raises if one of them does."""
    mp.start_processes(main, arguments, nprocs=ranks, join=True, start_method="spawn")


def start(rank: int, size: int, folder: str, timeout: timedelta = TIMEOUT, **environment: str) -> None:
    """Makes the default group, with the backend of ours."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    import cputrain.distributed  # noqa: F401

    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("ccl", store=store, rank=rank, world_size=size, timeout=timeout)


def run_cases(rank: int, size: int, folder: str, module: str, environment: dict[str, str]) -> None:
    """Every case of a module in one process; what failed goes into a file of this rank."""
    start(rank, size, folder, **environment)
    failed = {}
    for name, case in cases_of(module).items():
        try:
            torch.manual_seed(0)
            case(rank, size)
        except BaseException:  # noqa: BLE001 - the parent reports it
            failed[name] = traceback.format_exc()
            break  # the ranks are out of step now
    Path(folder, f"failed-{rank}.json").write_text(json.dumps(failed))
    transport = dist.group.WORLD.transport.name
    Path(folder, f"transport-{rank}").write_text(transport)
    if not failed:
        dist.destroy_process_group()


def cases_of(module: str) -> dict[str, Callable[[int, int], None]]:
    __import__(module)
    content = vars(sys.modules[module])
    return {name.removeprefix("case_"): content[name] for name in content if name.startswith("case_")}


class Outcome:
    """What the cases of a module gave on every rank."""

    def __init__(self, folder: Path, ranks: int, module: str, **environment: str) -> None:
        spawn(run_cases, ranks, ranks, str(folder), module, environment)
        self._collect(folder, ranks, module)

    def _collect(self, folder: Path, ranks: int, module: str) -> None:
        self.module, self.failed = module, {}
        for rank in range(ranks):
            for name, trace in json.loads((folder / f"failed-{rank}.json").read_text()).items():
                self.failed.setdefault(name, f"rank {rank}:\n{trace}")
        self.transports = {(folder / f"transport-{rank}").read_text() for rank in range(ranks)}

    def check(self, case: str) -> None:
        assert case not in self.failed, self.failed[case]
        names = list(cases_of(self.module))
        for name in self.failed:
            assert names.index(case) < names.index(name), f"not reached: {name} failed before it"
