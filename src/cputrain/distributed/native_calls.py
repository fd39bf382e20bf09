"""The shared-memory collectives of the native library: structures, numbers and calls, as in csrc/api_collectives.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp

from cputrain import native

DONE, DIED, TIMEOUT, MISMATCH, LEFT, INTERRUPTED, ABORTED = range(7)
REDUCE_ALL, REDUCE_SCATTER, PUBLISH, EXCHANGE = range(4)

# What the other ranks are shown, and messages are made of. Only ever extended at the end.
_MOVES = ("broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
OPERATIONS = ("barrier", "all_reduce", *_MOVES, "monitored_barrier")
_OPERATION_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}

# torch's names of them; a machine's part of a mean is a sum, but ranks that take it for one are told.
REDUCTION_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "avg")
SUM, MEAN, PART_OF_MEAN = 0, 1, 8
_REDUCTIONS = {getattr(ReduceOp, name.upper()): number for number, name in enumerate(REDUCTION_NAMES[:PART_OF_MEAN])}

_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*_WHOLE, *_UNSIGNED, *_FLOATS, *_COMPLEX)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
MOST_RANKS = 1024  # as in csrc/api_collectives.h
BYTES = 255  # any dtype: moved, not computed with


def dtype_name(number: int) -> str:
    return str(DTYPES[number]).removeprefix("torch.") if 0 <= number < len(DTYPES) else "bytes"


def reduction_number(operation: ReduceOp | ReduceOp.RedOpType) -> int:
    """The number of a reduction; a ReduceOp and its RedOpType are equal but don't hash alike."""
    kind = getattr(operation, "op", operation)
    number = _REDUCTIONS.get(kind)
    if number is None:
        raise ValueError(f"ccl has no reduction {operation}; it has {', '.join(dict.fromkeys(REDUCTION_NAMES))}.")
    return number


def dtype_number(dtype: torch.dtype, reduction: int) -> int:
    """The number of a dtype that has this reduction; others are refused in one sentence, before any rank waits."""
    number = _DTYPE_NUMBERS.get(dtype)
    reduction = MEAN if reduction == PART_OF_MEAN else reduction
    # Floats have no bits to combine, complex numbers no order either.
    most = 4 if dtype in _FLOATS else 2 if dtype in _COMPLEX else PART_OF_MEAN
    if number is None or reduction > most or (dtype == torch.bool and reduction == MEAN):
        raise ValueError(f"ccl can't compute the {REDUCTION_NAMES[reduction]} of {dtype} tensors.")
    return number


_Numbers = Sequence[int]
_Pieces = tuple[_Numbers, _Numbers]  # addresses and sizes
_Kind = TypeVar("_Kind", ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64)


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class Status(ctypes.Structure):
    _fields_ = _fields(
        ctypes.c_int64, "kind", "culprit", "reporter", "sequence", "operation", "dtype", "root", "bytes", "reduction"
    )


_SignalCallback = ctypes.CFUNCTYPE(ctypes.c_int64)


class Call(ctypes.Structure):
    _fields_ = _fields(ctypes.c_int64, "sequence", "operation", "dtype", "reduction", "root", "bytes")


class Group(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "base", "pidfds"),
        ("on_signal", _SignalCallback),
        ("reduce", ctypes.c_void_p),
        *_fields(ctypes.c_int64, "rank", "ranks", "spin", "aborted"),
        ("sequence", ctypes.c_uint64),
        *_fields(ctypes.c_uint32, "round", "spins"),
        ("call", Call),
    ]


class Collective(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int64, "way", "operation", "dtype", "reduction", "root", "bytes"),
        *_fields(ctypes.c_void_p, "input", "output", "parts", "sizes", "send_parts", "send_sizes"),
    ]


def check_ranks(ranks: int) -> None:
    """Before memory is made for them: the kernels keep an address for each rank on the stack."""
    if ranks > MOST_RANKS:
        raise ValueError(
            f"ccl shares memory among at most {MOST_RANKS:,} ranks of a machine, found {ranks:,}: start fewer, with "
            "more threads each."
        )


def segment_bytes(ranks: int) -> int:
    """How much memory a group of so many ranks shares (most of it is never touched)."""
    check_ranks(ranks)
    size = ctypes.c_int64()
    native.kernels().ccl_segment_bytes(ranks, ctypes.byref(size))
    return size.value


def reduce_tensors(out: torch.Tensor, sources: Sequence[torch.Tensor], reduction: int, divisor: int) -> None:
    """out = element-wise reduction of the sources (a mean: their sum / divisor), in one process."""
    if len(sources) > MOST_RANKS:
        raise ValueError(f"ccl reduces at most {MOST_RANKS} tensors at once, found {len(sources)}.")
    for tensor in (out, *sources):
        if (
            tensor.dtype is not out.dtype
            or tensor.numel() != out.numel()
            or not (tensor.is_contiguous() and tensor.is_cpu)
        ):
            raise ValueError(
                f"ccl reduces contiguous tensors on the CPU of one dtype and size, here {out.dtype} of {out.numel()} "
                f"elements, found {tensor.dtype} on {tensor.device} of shape {tuple(tensor.shape)}."
            )
    known = ctypes.c_int64()
    addresses = array_of(ctypes.c_void_p, [source.data_ptr() for source in sources])
    what = dtype_number(out.dtype, reduction), reduction, out.data_ptr(), addresses
    native.kernels().ccl_reduce(*what, len(sources), out.numel(), divisor, ctypes.byref(known))
    assert known.value, "dtype_number lets only known reductions pass"


def array_of(kind: type[_Kind], values: Sequence[int]) -> ctypes.Array[_Kind]:
    return (kind * len(values))(*values)


def _arrays(addresses: _Numbers, sizes: _Numbers) -> tuple[ctypes.Array, ctypes.Array]:
    return array_of(ctypes.c_void_p, addresses), array_of(ctypes.c_int64, sizes)


class CallFailed(Exception):
    """A native call that didn't end well; its status is for failures.py to put into words."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.kind)
        self.status = status


class _Interruption:
    """Lets Python's signal handlers run while a native call waits, and keeps what they raise (Ctrl-C).

    Handlers run as soon as Python code does. A function would be left by the exception before its first line, and
    ctypes would drop it; a generator that is resumed inside its try block catches it.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        answers = self._answers()
        next(answers)
        self.callback = _SignalCallback(answers.__next__)

    def _answers(self) -> Iterator[int]:
        answer = 0
        while True:
            try:
                yield answer
                answer = 0
            except GeneratorExit:
                return
            except BaseException as error:  # noqa: BLE001 - raised again as soon as the native call is left
                self.error, answer = error, 1


class SharedMemory:
    """One rank's side of the memory that a group's ranks on this machine share. One collective at a time."""

    def __init__(self, address: int, rank: int, ranks: int, pidfds: _Numbers, spin: int) -> None:
        check_ranks(ranks)
        assert 0 <= rank < ranks
        self._pidfds = array_of(ctypes.c_int32, pidfds)
        self._interruption = _Interruption()
        self.ranks, self._kernels = ranks, native.kernels()
        self._group = Group(
            base=address,
            pidfds=ctypes.addressof(self._pidfds),
            on_signal=self._interruption.callback,
            reduce=ctypes.cast(self._kernels.ccl_reduce, ctypes.c_void_p),
            rank=rank,
            ranks=ranks,
            spin=spin,
        )
        self._group_pointer = ctypes.addressof(self._group)

    def begin_call(self, name: str, number: int, dtype: object, size: int, root: int, reduction: int | None) -> None:
        """What follows are steps of this collective, which the other ranks are shown in their place."""
        kind = _DTYPE_NUMBERS.get(dtype, BYTES) if isinstance(dtype, torch.dtype) else BYTES
        self._group.call = Call(number, _OPERATION_NUMBERS[name], kind, reduction or 0, root, size)

    def abort(self) -> None:
        """Ends whatever waits in other threads, and all later calls."""
        self._group.aborted = 1

    def leave(self) -> None:
        """Tells the others that the end of this process is no death."""
        self._kernels.ccl_leave(self._group_pointer)

    def report(self, kind: int, culprit: int) -> None:
        """Ends the group on this machine for a reason from outside; `culprit` counts from `ranks` on."""
        self._kernels.ccl_report(self._group_pointer, kind, self.ranks + culprit)

    def absent(self) -> list[bool]:
        """Of each rank, whether it is behind this one, which has not got on."""
        answer = array_of(ctypes.c_int64, [0] * self.ranks)
        self._kernels.ccl_absent(self._group_pointer, ctypes.addressof(answer))
        return [bool(one) for one in answer]

    def reduce(self, name: str, address: int, size: int, dtype: int, reduction: int, root: int, timeout: int) -> None:
        """In place: the reduction of all ranks' memory, at the root or (-1) everywhere."""
        self._collective(timeout, REDUCE_ALL, name, dtype, reduction, root, size, 0, address)

    def reduce_scatter(self, target: int, parts: _Numbers, size: int, dtype: int, reduction: int, timeout: int) -> None:
        sources = array_of(ctypes.c_void_p, parts)
        what = dtype, reduction, -1, size, 0, target, ctypes.addressof(sources)
        self._collective(timeout, REDUCE_SCATTER, "reduce_scatter", *what)

    def publish(self, name: str, source: int, sizes: _Numbers, targets: _Numbers, root: int, timeout: int) -> None:
        """Every rank's source, sizes[r] bytes long, goes to the ranks with a place for it (targets[r] not 0)."""
        arrays = _arrays(targets, sizes)
        self._collective(timeout, PUBLISH, name, BYTES, 0, root, max(sizes), source, 0, *map(ctypes.addressof, arrays))

    def exchange(self, name: str, sources: _Pieces, targets: _Pieces, root: int, timeout: int) -> None:
        """What rank r has for this rank goes to targets[r]; the rank's own part is the caller's."""
        arrays = *_arrays(*targets), *_arrays(*sources)
        self._collective(timeout, EXCHANGE, name, BYTES, 0, root, 0, 0, 0, *map(ctypes.addressof, arrays))

    def _collective(self, timeout: int, way: int, name: str, *what: int) -> None:
        collective = Collective(way, _OPERATION_NUMBERS[name], *what)
        self._checked(self._kernels.ccl_collective, ctypes.addressof(collective), timeout=timeout)

    def send(self, peer: int, address: int, size: int, timeout: int) -> None:
        self._checked(self._kernels.ccl_send, peer, address, size, timeout=timeout)

    def receive(self, peer: int, address: int, size: int, timeout: int) -> None:
        self._checked(self._kernels.ccl_receive, peer, address, size, timeout=timeout)

    def is_readable(self, peer: int) -> bool:
        answer = ctypes.c_int64()
        self._kernels.ccl_readable(self._group_pointer, peer, ctypes.byref(answer))
        return bool(answer.value)

    def _checked(self, kernel: Callable[..., None], *arguments: int, timeout: int) -> None:
        status = Status()
        kernel(self._group_pointer, *arguments, ctypes.addressof(status), timeout)
        if not status.kind:
            return
        error, self._interruption.error = self._interruption.error, None
        if status.kind == INTERRUPTED and error is not None:
            raise error
        raise CallFailed(status)
