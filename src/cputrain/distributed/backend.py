"""Makes the groups of the backend `ccl`, and makes torch know it."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cputrain import settings
from cputrain.distributed import rendezvous
from cputrain.distributed.engines import ALL_RANKS, Engine
from cputrain.distributed.monitor import Monitor
from cputrain.distributed.process_group import CclProcessGroup
from cputrain.distributed.shared_memory import SharedMemoryTransport
from cputrain.distributed.transport import AloneTransport, Transport
from cputrain.distributed.two_level import Levels, TwoLevelTransport
from cputrain.log import logger, mention_once
from cputrain.settings import TRANSPORT, attempt, one_of, value_of

# What can carry data between machines, and where it is made. Loaded when it is used: each needs packages of its own.
ENGINES = {"gloo": ("gloo", "GlooEngine"), "mpi": ("mpi", "MpiEngine"), "oneccl": ("oneccl", "OneCclEngine")}

# How often this process has made a group of each name: a store may outlive a group of the same name. Processes that
# are started anew count from 0 again, which is why keys have the attempt's name, too.
_generations: Counter[str] = Counter()


@functools.cache
def register() -> None:
    """`init_process_group("ccl")` works from now on."""
    if "CCL" not in dist.Backend._plugins:  # under `cputrain run` it was announced before
        dist.Backend.register_backend("ccl", create, extended_api=True, devices=["cpu"])
    monitored = _monitored_barrier(distributed_c10d.monitored_barrier)
    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored
    _use_all_to_all()


def create(options: Any, _: Any) -> CclProcessGroup:
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    global_ranks = list(options.global_ranks_in_group) or list(range(size))
    generation = _generations[options.group_id]
    _generations[options.group_id] += 1
    store = dist.PrefixStore(f"ccl/{attempt()}/{generation}", options.store)
    transport, reason = _choose(store, rank, global_ranks, timeout)
    if rank == 0:
        logger.info("ccl, group %s of %d: %s (%s)", options.group_id, size, transport.name, reason)
    # torch 2.15 hangs a flight recorder on every group that doesn't keep one, and can't on one that is all Python.
    keeping: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    keeping.add("ccl")
    if global_ranks[rank] == 0:
        say_what_has_no_effect(transport.name)
    return CclProcessGroup(transport, rank, size, timeout)


def _choose(store: dist.Store, rank: int, global_ranks: list[int], timeout: timedelta) -> tuple[Transport, str]:
    """The way that data takes, and why."""
    asked = one_of(TRANSPORT) or "auto"
    if len(global_ranks) == 1:
        return AloneTransport(), "one rank"
    meeting = rendezvous.meet(store, rank, global_ranks, timeout)
    machines = len(meeting.machines)
    if asked == "shm" and machines > 1:
        raise ValueError(
            f"{TRANSPORT}=shm, but the ranks are on {machines} machines that share no memory; use auto, or one of "
            f"{', '.join(ENGINES)}."
        )
    if machines == 1 and asked in ("auto", "shm"):
        return SharedMemoryTransport(meeting.here, rank, meeting.peers), "all ranks share this machine's memory"
    if machines == 1:  # an engine was asked for: it alone, as if every rank were a machine
        meeting.here.close()
        meeting.machines, meeting.here = [[r] for r in range(len(global_ranks))], rendezvous.Machine([rank])
        reason = f"{TRANSPORT}={asked}, although the ranks share memory"
    else:
        reason = f"{machines} machines" + (f", {TRANSPORT}={asked}" if asked in ENGINES else "")
    return _two_levels(store, rank, meeting, timeout, _engine(asked)), reason


def _engine(asked: str) -> Callable[..., Engine]:
    """gloo comes with torch and needs no setting up, so it is the default."""
    module, name = ENGINES.get(asked, ENGINES["gloo"])
    return getattr(importlib.import_module(f"cputrain.distributed.engines.{module}"), name)


def _two_levels(
    store: dist.Store, rank: int, meeting: rendezvous.Meeting, timeout: timedelta, engine: Callable[..., Engine]
) -> TwoLevelTransport:
    here, machines, size = meeting.here, meeting.machines, len(meeting.peers)
    address = rendezvous.reachable_address(store, rank, size, timeout)
    local: SharedMemoryTransport | AloneTransport = AloneTransport()
    if here.memory is not None:
        local = SharedMemoryTransport(here, here.ranks.index(rank), meeting.peers)
    made: list[TwoLevelTransport] = []

    def watch(awaited: int = ALL_RANKS) -> None:
        if made:
            made[0].check_peers(awaited)

    flat = engine(dist.PrefixStore("flat", store), rank, size, address, timeout, watch)
    between = None
    if rank == here.ranks[0]:
        number = machines.index(here.ranks)
        prefixed = dist.PrefixStore("between", store)
        between = engine(prefixed, number, len(machines), address, timeout, watch)
    monitor = Monitor(store, rank, size, address, timeout, local.report)
    made.append(TwoLevelTransport(Levels(local, between, flat, monitor), machines, rank, meeting.peers))
    return made[0]


def say_what_has_no_effect(transport: str, environ: settings.Environ | None = None) -> None:
    """One line each, once: a setting that does nothing must not look as if it did."""
    if "oneccl" in transport:
        if value_of(settings.WORKERS, environ) and value_of(settings.OFFLOAD, environ) == "0":
            mention_once("CCL_WORKER_COUNT has no effect: no core is kept for oneCCL's workers (CCL_WORKER_OFFLOAD=0)")
        return
    if value_of(settings.ATL_TRANSPORT, environ):
        mention_once(f"CCL_ATL_TRANSPORT has no effect: it is oneCCL's, and {transport} carries the data")
    kept = any(value_of(name, environ) for name in (settings.COMMUNICATION_CPUS, settings.COMMUNICATION_CORES))
    if value_of(settings.WORKERS, environ) and not kept:
        mention_once(
            "CCL_WORKER_COUNT has no effect: cores are kept free for communication by `cputrain run` and "
            "`cputrain launch`, which did not do it here"
        )


# --- What torch refuses to do with a CPU group that isn't gloo's -------------------------------------------------


def _monitored_barrier(stock: Any) -> Any:
    """Stock's refuses every group that isn't gloo's, by its name."""

    @functools.wraps(stock)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        found = group if group is not None else distributed_c10d._get_default_group()
        if not isinstance(found, CclProcessGroup):
            return stock(group, timeout, wait_all_ranks)
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        return found.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


_DTENSOR = "torch.distributed.tensor.placement_types"


def _use_all_to_all() -> None:
    """DTensor moves shards from one dimension to another by all_to_all, which torch believes no CPU group to have.

    It gathers everything everywhere instead, which takes as many times the memory and traffic as there are ranks.
    Changed now, or when a script imports DTensor: importing it here would cost every start half a second.
    """
    if _DTENSOR in sys.modules:
        _change_dtensor(sys.modules[_DTENSOR])
    else:
        sys.meta_path.insert(0, _DtensorFinder())


class _DtensorFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _DTENSOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _change_dtensor(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change_dtensor(placement_types: Any) -> None:
    stock = placement_types.shard_dim_alltoall

    @functools.wraps(stock)
    def shard_dim_alltoall(tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
        group = mesh.get_group(mesh_dim)
        if not isinstance(group, CclProcessGroup):
            return stock(tensor, gather_dim, shard_dim, mesh, mesh_dim)
        return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, group.group_name)

    placement_types.shard_dim_alltoall = shard_dim_alltoall
