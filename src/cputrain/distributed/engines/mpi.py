"""MPI as the engine between machines: Intel MPI, MPICH or Open MPI, through mpi4py."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cputrain import settings
from cputrain.distributed import failures
from cputrain.distributed.engines import ALL_RANKS, NO_RANK, Engine, Waiter, Watch, all_can, compiled
from cputrain.distributed.transport import Tensors

# MPI is only ever called by a thread that holds this: MPI_THREAD_SERIALIZED is enough, and every MPI has it.
_lock = threading.Lock()
_INTEL, _MPICH, _OPEN_MPI = "libmpi.so.12", "libmpich.so.12", "libmpi.so.40"
# MPI before version 4 counts with 32 bits.
_PIECE = 2**30
# Collectives and messages are told apart by their tags.
_COLLECTIVE, _FIRST_MESSAGE = 0, 1


class MpiEngine(Engine):
    """Everything is started without waiting and then asked for: MPI's own waits burn a core and know no timeout.

    Ranks exchange directly, in one round. Trees and rings of MPI's nonblocking collectives would move only whenever
    this rank asks for them.
    """

    name = "mpi"

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, timeout: timedelta, watch: Watch) -> None:
        self._rank, self._size, self._waiter = rank, size, Waiter(watch)
        self._mpi, numbers = _meet(store, rank, size, timeout)
        with _lock:
            group = self._mpi.COMM_WORLD.Get_group().Incl(numbers)
            self._world = self._mpi.COMM_WORLD.Create_group(group)
            group.Free()
            self._highest_tag = self._world.Get_attr(self._mpi.TAG_UB) - _FIRST_MESSAGE

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> None:
        requests: list[Any] = []
        with _lock:
            for peer in self._others():
                requests += self._each(self._world.Irecv, outputs[peer], peer, _COLLECTIVE)
            for peer in self._others():
                requests += self._each(self._world.Isend, inputs[peer], peer, _COLLECTIVE)
        outputs[self._rank].copy_(inputs[self._rank])
        moved = sum(t.numel() for t in (*outputs, *inputs))
        self._finish(requests, moved, timeout, (outputs, inputs))

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> None:
        self.all_to_all(outputs, [tensor] * self._size, timeout)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        with _lock:
            requests = [self._world.Ibcast(self._buffer(piece), root) for piece in _pieces(tensor)]
        self._finish(requests, tensor.numel(), timeout, tensor)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        with _lock:
            requests = self._each(self._world.Isend, tensor, peer, self._tag(tag))
        self._finish(requests, tensor.numel(), timeout, tensor, peer)

    def receive(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        """A message is looked at before it is taken: its size may be another one."""
        status, found = self._mpi.Status(), []
        source = self._mpi.ANY_SOURCE if peer is None else peer

        def arrived() -> bool:
            with _lock:
                message = self._world.Improbe(source, self._tag(tag), status)
            found.append(message)
            return message is not None

        self._waiter.wait(arrived, 0, timeout, None, NO_RANK if peer is None else peer)
        sender, size = status.Get_source(), status.Get_count(self._mpi.BYTE)
        expected = min(tensor.numel(), _PIECE)
        if size != expected:
            raise failures.different_message(sender, size, expected)
        with _lock:
            first, *rest = _pieces(tensor)
            requests = [found[-1].Irecv(self._buffer(first))]
            requests += [self._world.Irecv(self._buffer(piece), sender, self._tag(tag)) for piece in rest]
        self._finish(requests, tensor.numel(), timeout, tensor, sender)
        return sender

    def abort(self) -> None:
        self._waiter.aborted = True

    def close(self, broken: bool) -> None:
        if broken or self._waiter.pending:
            _abandoned.append((self._world, self._waiter))
            _do_not_finalise()
        else:
            with _lock:
                self._world.Free()

    def _others(self) -> list[int]:
        """Every rank begins with another one."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _each(self, start: Callable[..., Any], tensor: Tensor, peer: int, tag: int) -> list[Any]:
        return [start(self._buffer(piece), peer, tag) for piece in _pieces(tensor)]

    def _buffer(self, tensor: Tensor) -> Any:
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel()), self._mpi.BYTE]

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._highest_tag:
            raise ValueError(f"tags of this MPI go from 0 to {self._highest_tag}, found {tag}.")
        return tag + _FIRST_MESSAGE

    def _finish(self, requests: list[Any], size: int, timeout: float, kept: Any, awaited: int = ALL_RANKS) -> None:
        def done() -> bool:
            with _lock:
                return self._mpi.Request.Testall(requests)

        try:
            self._waiter.wait(done, size, timeout, (requests, kept), awaited)
        except self._mpi.Exception as error:
            raise failures.PeerDied(f"MPI failed between the machines: {error.Get_error_string()}") from None


def _pieces(tensor: Tensor) -> list[Tensor]:
    """At least one, which may be empty."""
    return [tensor[begin : begin + _PIECE] for begin in range(0, max(tensor.numel(), 1), _PIECE)]


# Communicators and buffers of groups that failed: MPI may still write to them.
_abandoned: list[Any] = []


def _do_not_finalise() -> None:
    """MPI_Finalize would wait for ever for a rank that is gone: at its end this rank ends all others instead."""
    from mpi4py.run import set_abort_status

    set_abort_status(1)


def _meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[Any, list[int]]:
    """MPI, and the numbers that the group's ranks have in its world. If one has no MPI, all say so."""
    mpi: Any = None
    try:
        mpi = _load()
        said = f"{mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}"
    except ValueError as error:
        said = f"! {error}"
    numbers = [int(answer.split()[0]) for answer in all_can(store, "mpi", rank, size, timeout, said)]
    if len(set(numbers)) < size:
        library = mpi.Get_library_version().split("\n")[0].strip("\0 ")
        raise ValueError(
            f"{settings.TRANSPORT}=mpi, but MPI ({library}) sees a world of {mpi.COMM_WORLD.size} for a group of "
            f"{size}: start the ranks with that MPI's mpirun (cputrain launch --engine mpi), or use gloo."
        )
    return mpi, numbers


# --- The MPI library that fits the mpirun which started this process ----------------------------------------------


def _load() -> Any:
    """The module mpi4py.MPI, with MPI initialised; ValueError says what is missing."""
    if "mpi4py.MPI" not in sys.modules and not settings.is_set(settings.MPI_LIBRARY) and (path := _library()):
        os.environ[settings.MPI_LIBRARY] = path
    try:
        with _lock:
            from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"MPI can't be used ({error}): pip install mpi4py, beside an MPI (Intel's from pip: impi-rt==2021.18.1)."
        ) from None
    except RuntimeError as error:  # mpi4py lists all the places where it found no library
        raise ValueError(f"mpi4py finds no MPI library ({str(error).splitlines()[-1]}): install one.") from None
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ValueError("MPI was initialised for one thread only; ccl needs MPI_THREAD_SERIALIZED.")
    return MPI


def _library() -> str | None:
    """What mpi4py is to load. By itself it takes the one beside Python, which under another's mpirun sees one rank."""
    starter = settings.mpirun_of()
    if starter == "Open MPI":
        return _OPEN_MPI
    if starter == "MPICH" and not _loads(_INTEL) and _loads(_MPICH):
        return _debians_mpich()
    return None


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _debians_mpich() -> str:
    """mpi4py's wheel wants MPICH as libmpi.so.12, Debian calls it libmpich.so.12: an empty library leads there."""
    with open("/proc/self/maps") as file:
        mpich = next(line.split()[-1] for line in file if "/libmpich.so" in line)
    arguments = ["-Wl,-soname,libmpi.so.12", "-Wl,--no-as-needed", mpich]
    made = str(compiled.library(_INTEL, "// Nothing but a name.\n", arguments, "mpi4py with Debian's MPICH"))
    ctypes.CDLL(made)  # mpi4py's own asks for it by the short name, and finds it loaded
    return made
