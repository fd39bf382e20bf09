"""Tensors as the transports want them: on the CPU, dense, contiguous, without gradients; sparse as entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cputrain.distributed import native_calls
from cputrain.distributed.failures import CollectivesDiffer
from cputrain.distributed.transport import Tensors, Transport


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, without its history; refuses what lies elsewhere than in CPU memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(f"ccl moves dense CPU tensors, found one on {tensor.device} with layout {tensor.layout}.")
    return tensor.detach()


def to_read(tensor: Tensor) -> Tensor:
    """Contiguous, copied if need be; also resolves lazy conjugation and negation."""
    tensor = plain(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous()


class Outputs:
    """Contiguous places to write to; at the end what was written goes to the tensors that aren't contiguous."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for tensor, copy in self._copies:
                tensor.copy_(copy)

    def place(self, tensor: Tensor, keep: bool = False) -> Tensor:
        """Where to write; `keep`: what the tensor holds is read, too."""
        tensor = plain(tensor)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if keep:
            copy.copy_(tensor)
        self._copies.append((tensor, copy))
        return copy


def in_place(tensors: Tensors, run: Callable[[Tensor], None]) -> None:
    """Runs an operation that reads and writes each tensor."""
    for tensor in tensors:
        with Outputs() as outputs:
            run(outputs.place(tensor, keep=True))


def parts_of(tensor: Tensor, count: int, what: str) -> list[Tensor]:
    """A contiguous tensor cut into `count` equal pieces of its memory."""
    if tensor.numel() % count:
        raise ValueError(f"{what} has {tensor.numel()} elements, which {count} ranks can't share equally.")
    return list(tensor.reshape(-1).split(tensor.numel() // count)) if tensor.numel() else [tensor] * count


def cut(tensor: Tensor, splits: Sequence[int], count: int, what: str) -> list[Tensor]:
    """A contiguous tensor cut along its first dimension by `splits`, or equally where there are none."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % count:
            raise ValueError(f"{what} has {rows} rows, which {count} ranks can't share equally; give split sizes.")
        splits = [rows // count] * count
    if len(splits) != count or sum(splits) != rows:
        raise ValueError(f"{what} has {rows} rows for {count} ranks, but its split sizes are {list(splits)}.")
    return list(tensor.split(list(splits)))


# --- Sparse tensors: every rank gets the entries of all, summed where they have the same place ---------------------


def sparse_all_reduce(
    transport: Transport, tensors: list[Tensor], reduction: int, ranks: int, timeout: float
) -> Callable[[object], None]:
    """all_reduce of each tensor, to be run later. What gloo refuses is refused now, before any rank waits."""
    for tensor in tensors:
        _check_sparse(tensor, reduction)

    def run(_: object) -> None:
        for tensor in tensors:
            _all_reduce_sparse(transport, tensor, reduction, ranks, timeout)

    return run


def _check_sparse(tensor: Tensor, reduction: int) -> None:
    if tensor.layout is not torch.sparse_coo or tensor.device.type != "cpu":
        raise ValueError(f"ccl reduces sparse CPU tensors of layout torch.sparse_coo, found {tensor.layout}.")
    if reduction not in (native_calls.SUM, native_calls.MEAN):
        name = native_calls.REDUCTION_NAMES[reduction]
        raise ValueError(f"ccl can't compute the {name} of sparse tensors, only their sum and avg.")


@torch.no_grad()  # a detached sparse tensor has entries of its own as soon as it is written to
def _all_reduce_sparse(transport: Transport, tensor: Tensor, reduction: int, ranks: int, timeout: float) -> None:
    """In place. The result is coalesced: its places are sorted, and each is there once."""
    mine = tensor.coalesce()
    counts = _counts(transport, mine, ranks, timeout)
    places = _gathered(transport, mine.indices(), 1, counts, timeout)
    values = _gathered(transport, mine.values(), 0, counts, timeout)
    total = torch.sparse_coo_tensor(torch.cat(places, 1), torch.cat(values), mine.shape, check_invariants=False)
    total = total.coalesce()
    tensor.copy_(total / ranks if reduction == native_calls.MEAN else total)


def _counts(transport: Transport, mine: Tensor, ranks: int, timeout: float) -> list[int]:
    """How many entries each rank has; the shapes must be the same."""
    head = torch.tensor([mine._nnz(), mine.sparse_dim(), *mine.shape])
    heads = [torch.empty_like(head) for _ in range(ranks)]
    transport.all_gather(heads, head, timeout)
    for rank, other in enumerate(heads):
        if not torch.equal(other[1:], head[1:]):
            raise CollectivesDiffer(
                f"sparse all_reduce: rank {rank} of the group has a tensor of shape {tuple(other[2:].tolist())} with "
                f"{int(other[1])} sparse dimensions, this rank one of {tuple(mine.shape)} with {mine.sparse_dim()}."
            )
    return [int(other[0]) for other in heads]


def _gathered(transport: Transport, mine: Tensor, dim: int, counts: list[int], timeout: float) -> list[Tensor]:
    """All ranks' tensors; they differ in one dimension only."""
    shapes = [[count if d == dim else size for d, size in enumerate(mine.shape)] for count in counts]
    found = [torch.empty(shape, dtype=mine.dtype) for shape in shapes]
    transport.all_gather(found, mine.contiguous(), timeout)
    return found
