"""Tensors as the transports want them: on the CPU, dense, contiguous, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
    """Contiguous places to write to; `deliver` brings what was written into tensors that aren't contiguous."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

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

    def deliver(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def in_place(tensors: Sequence[Tensor], run: Callable[[Tensor], None]) -> None:
    """Runs an operation that reads and writes each tensor."""
    for tensor in tensors:
        outputs = Outputs()
        run(outputs.place(tensor, keep=True))
        outputs.deliver()


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
