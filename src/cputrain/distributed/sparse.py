"""all_reduce of sparse tensors: every rank gets the entries of all, summed where they have the same place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cputrain.distributed import native_calls
from cputrain.distributed.failures import CollectivesDiffer
from cputrain.distributed.transport import Transport


def operation(
    transport: Transport, tensors: list[Tensor], reduction: int, ranks: int, timeout: float
) -> Callable[[object], None]:
    """all_reduce of each tensor, to be run later. What gloo refuses is refused now, before any rank waits."""
    for tensor in tensors:
        _check(tensor, reduction)

    def run(_: object) -> None:
        for tensor in tensors:
            _all_reduce(transport, tensor, reduction, ranks, timeout)

    return run


def _check(tensor: Tensor, reduction: int) -> None:
    if tensor.layout is not torch.sparse_coo or tensor.device.type != "cpu":
        raise ValueError(f"ccl reduces sparse CPU tensors of layout torch.sparse_coo, found {tensor.layout}.")
    if reduction not in (native_calls.SUM, native_calls.MEAN):
        name = native_calls.REDUCTION_NAMES[reduction]
        raise ValueError(f"ccl can't compute the {name} of sparse tensors, only their sum and avg.")


@torch.no_grad()  # a detached sparse tensor has entries of its own as soon as it is written to
def _all_reduce(transport: Transport, tensor: Tensor, reduction: int, ranks: int, timeout: float) -> None:
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
    """Everybody's tensor; they differ in one dimension only."""
    shapes = [[count if d == dim else size for d, size in enumerate(mine.shape)] for count in counts]
    found = [torch.empty(shape, dtype=mine.dtype) for shape in shapes]
    transport.all_gather(found, mine.contiguous(), timeout)
    return found
