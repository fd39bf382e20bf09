"""The process group behind `init_process_group("ccl")`: torch's calls, turned into a transport's.

torch calls a group from Python and from C++. From C++ only some methods are looked up here (the "trampolines" of
PyProcessGroup.hpp); they are all defined, under the names of torch 2.8 and of 2.13. Nothing is registered behind the
group, so that a call which is not ours raises instead of running with the GIL held.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from cputrain.distributed import failures, native_calls
from cputrain.distributed.failures import CollectiveError, PeerLate
from cputrain.distributed.tensors import Outputs, cut, in_place, parts_of, sparse_all_reduce, to_read
from cputrain.distributed.transport import Tensors, Transport
from cputrain.distributed.work import Lane, Operation, SeveralWorks, Work, run_profiled

_Splits = Sequence[int]
_Inputs = Tensors | None
_live: weakref.WeakSet[CclProcessGroup] = weakref.WeakSet()
# How long the end of a group waits for operations that were queued and not waited for.
_GRACE = 1.0


class _NamedGroup(dist.ProcessGroup):
    """What torch asks of every group besides operations; it keeps these in backends, of which ccl's group has none."""

    supports_coalescing = supports_splitting = supports_time_estimate = False
    _sequence, _name, _description = 0, "", ""

    def getBackendName(self) -> str:
        return "ccl"

    name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> _NamedGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"ccl has no backend for {device}.")
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence


class CclProcessGroup(_NamedGroup):
    def __init__(self, transport: Transport, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.transport = transport
        self._rank, self._size, self._timeout = rank, size, timeout.total_seconds()
        self._collectives = Lane("collectives")
        self._lanes: dict[tuple[str, int, int], Lane] = {("collectives", -1, -1): self._collectives}
        self._process = os.getpid()
        self._coalesced: list[Work] | None = None
        self._closed = False
        _live.add(self)

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reduction, limit = _reduction(opts), self._limit(opts, timeout)
        _check_reduction(tensors, reduction)
        if tensors[0].layout is not torch.strided:
            run_sparse = sparse_all_reduce(self.transport, tensors, reduction, self._size, limit)
            return self._run("sparse_all_reduce", run_sparse, tensors, opts)
        if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].is_cpu and not tensors[0].is_conj():
            tensor = tensors[0]  # the common case, without a detour
            return self._run("all_reduce", lambda _: self.transport.all_reduce(tensor, reduction, limit), tensors, opts)
        move = partial(self.transport.all_reduce, reduction=reduction, timeout=limit)
        return self._run("all_reduce", lambda _: in_place(tensors, move), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        reduction, limit, root = _reduction(opts), self._limit(opts), opts.rootRank
        _check_reduction(tensors, reduction)
        move = partial(self.transport.reduce, reduction=reduction, root=root, timeout=limit)
        return self._run("reduce", lambda _: in_place(tensors, move), list(tensors), opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        reduction, limit = _reduction(opts), self._limit(opts)
        _check_reduction(outputs, reduction)
        for output, parts in zip(outputs, inputs, strict=True):
            if len(parts) != self._size or any(part.numel() != output.numel() for part in parts):
                raise ValueError(f"reduce_scatter needs {self._size} inputs of the output's size on every rank.")

        def run(_: Work) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                with Outputs() as places:
                    sources = [to_read(part) for part in parts]
                    self.transport.reduce_scatter(places.place(output), sources, reduction, limit)

        return self._run("reduce_scatter", run, list(outputs), opts, [part for parts in inputs for part in parts])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        parts = [parts_of(to_read(tensor), self._size, "the input") for tensor in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        move = partial(self.transport.broadcast, root=root, timeout=self._limit(opts, timeout))
        return self._run("broadcast", lambda _: in_place(tensors, move), tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors | Tensor, opts: Any = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]  # type: ignore[list-item]
        pairs = [(list(targets), tensor) for targets, tensor in zip(outputs, inputs, strict=True)]
        for targets, tensor in pairs:
            if len(targets) != self._size or targets[self._rank].nbytes != tensor.nbytes:
                raise ValueError(
                    f"all_gather needs {self._size} outputs, of which number {self._rank} has the input's size."
                )
        return self._gather_all(pairs, opts)

    def _gather_all(self, pairs: Sequence[tuple[list[Tensor], Tensor]], opts: Any) -> Work:
        limit = self._limit(opts)

        def run(_: Work) -> None:
            for targets, tensor in pairs:
                with Outputs() as places:
                    self.transport.all_gather([places.place(t) for t in targets], to_read(tensor), limit)

        targets_of_all = [target for targets, _ in pairs for target in targets]
        return self._run("all_gather", run, targets_of_all, opts, [tensor for _, tensor in pairs])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        limit = self._limit(opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.nbytes != tensor.nbytes * self._size:
                raise ValueError(
                    f"the output has {output.numel()} elements; {self._size} ranks gather "
                    f"{self._size} × {tensor.numel()} of {tensor.dtype}."
                )

        def run(_: Work) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                with Outputs() as places:
                    targets = parts_of(places.place(output), self._size, "the output")
                    self.transport.all_gather(targets, to_read(tensor), limit)

        return self._run("all_gather", run, list(outputs), opts, inputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Here the outer list is of ranks, the inner one of tensors."""
        pairs = [([outputs[rank][i] for rank in range(self._size)], tensor) for i, tensor in enumerate(inputs)]
        return self._gather_all(pairs, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        limit, root, tensor = self._limit(opts), opts.rootRank, inputs[0]
        targets = list(outputs[0]) if self._rank == root and outputs else []
        if self._rank == root and (len(targets) != self._size or any(t.nbytes != tensor.nbytes for t in targets)):
            raise ValueError(f"gather needs {self._size} outputs of the input's size at the root.")

        def run(_: Work) -> None:
            with Outputs() as places:
                self.transport.gather([places.place(t) for t in targets], to_read(tensor), root, limit)

        return self._run("gather", run, targets, opts, inputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        limit, root, output = self._limit(opts), opts.rootRank, outputs[0]
        sources = list(inputs[0]) if self._rank == root and inputs else []
        if self._rank == root and (len(sources) != self._size or any(s.nbytes != output.nbytes for s in sources)):
            raise ValueError(f"scatter needs {self._size} inputs of the output's size at the root.")

        def run(_: Work) -> None:
            with Outputs() as places:
                self.transport.scatter(places.place(output), [to_read(s) for s in sources], root, limit)

        return self._run("scatter", run, [output], opts, sources)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all needs {self._size} inputs and outputs.")
        if outputs[self._rank].nbytes != inputs[self._rank].nbytes:
            raise ValueError("all_to_all: a rank's own input and output differ in size.")
        limit = self._limit(opts)

        def run(_: Work) -> None:
            with Outputs() as places:
                targets = [places.place(output) for output in outputs]
                self.transport.all_to_all(targets, [to_read(tensor) for tensor in inputs], limit)

        return self._run("all_to_all", run, list(outputs), opts, inputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: _Splits, input_splits: _Splits, opts: Any = None
    ) -> Work:
        limit = self._limit(opts)
        sources = cut(to_read(tensor), input_splits, self._size, "the input")
        places = Outputs()
        targets = cut(places.place(output), output_splits, self._size, "the output")

        def run(_: Work) -> None:
            with places:
                self.transport.all_to_all(targets, sources, limit)

        return self._run("all_to_all", run, [output], opts, [tensor])

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        tensor = to_read(tensors[0])
        return self._run_beside(
            ("send", peer, tag), lambda _: self.transport.send(tensor, peer, tag, self._timeout), list(tensors)
        )

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        return self._receive(tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, peer: int | None, tag: int) -> Work:
        places = Outputs()
        target = places.place(tensors[0])

        def run(work: Work) -> None:
            with places:
                work._source = self.transport.receive(target, peer, tag, self._timeout)

        key = ("recvAnySource", -1, tag) if peer is None else ("recv", peer, tag)
        return self._run_beside(key, run, list(tensors))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        limit = self._limit(opts, timeout)
        return self._run("barrier", lambda _: self.transport.barrier(limit), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names a rank which did not come in time, or with `wait_all_ranks` every one of them."""
        # To a transport, 0 is no limit; torch means a limit that is over at once.
        limit = self._timeout if timeout is None else max(timeout.total_seconds(), 0.001)
        barrier = "monitored_barrier"
        try:
            self._start(barrier, self._collectives, lambda _: self.transport.barrier(limit, barrier), [], False).wait()
        except PeerLate as error:
            if not wait_all_ranks:
                raise
            raise failures.all_late(self.transport.absent(), limit, error) from None

    def _run(self, name: str, operation: Operation, tensors: list[Tensor], opts: Any, inputs: _Inputs = None) -> Work:
        """`tensors` are the results; the profiler shows the shapes of the `inputs`, where those are others."""
        self._sequence += 1
        asynchronous = getattr(opts, "asyncOp", True) or self._coalesced is not None
        return self._start(name, self._collectives, operation, tensors, asynchronous, inputs)

    def _run_beside(self, key: tuple[str, int, int], operation: Operation, tensors: list[Tensor]) -> Work:
        """Messages don't wait for collectives, nor for messages of another rank or tag."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes.setdefault(key, Lane("-".join(map(str, key))))
        return self._start(key[0], lane, operation, tensors, asynchronous=True)

    def _start(
        self, name: str, lane: Lane, run: Operation, tensors: list[Tensor], asynchronous: bool, inputs: _Inputs = None
    ) -> Work:
        if profiler._is_profiler_enabled:
            work = run_profiled(lane, name, run, tensors, tensors if inputs is None else inputs, asynchronous)
        else:
            work = lane.run(run, tensors, asynchronous)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _limit(self, opts: Any = None, timeout: timedelta | None = None) -> float:
        """Seconds: what this call says, else what the group says."""
        asked = timeout if timeout is not None else getattr(opts, "timeout", None)
        return asked.total_seconds() if asked is not None and asked > timedelta(0) else self._timeout

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> SeveralWorks:
        works, self._coalesced = self._coalesced or [], None
        return SeveralWorks(works)  # type: ignore[arg-type]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """Ends the group: what was queued may still run for a moment, what waits for others longer is ended."""
        if self._closed or os.getpid() != self._process:  # a forked worker has only a copy
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.drain(_GRACE)
        self.transport.abort()
        for lane in self._lanes.values():
            lane.close()
        self.transport.close()


# The names that torch had before 2.13, and has still.
for _old, _new in {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}.items():
    setattr(CclProcessGroup, _old, getattr(CclProcessGroup, _new))


def _reduction(opts: Any) -> int:
    """From options that have one, from a reduction itself, or torch's default."""
    if opts is None:
        return native_calls.SUM
    return native_calls.reduction_number(getattr(opts, "reduceOp", opts))


def _check_reduction(tensors: Tensors, reduction: int) -> None:
    for tensor in tensors:
        native_calls.dtype_number(tensor.dtype, reduction)


@atexit.register
def _end_all() -> None:
    """A script that ends without destroy_process_group leaves properly too: its end is no death."""
    for group in list(_live):
        with contextlib.suppress(CollectiveError):
            group.shutdown()
