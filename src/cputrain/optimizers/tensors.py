"""Which tensors the optimizers' kernels can work on, and how a list of them is handed over."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Float32 in ordinary memory of this machine: no subclass that acts on operators, no sparse layout."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.numel() > 0
    )


def is_dense(tensor: Tensor) -> bool:
    """Its elements are one piece of memory without gaps, in whatever order of dimensions (channels_last …)."""
    if tensor.is_contiguous():
        return True
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def lies_like(tensor: Tensor, model: Tensor) -> bool:
    """Each element of `tensor` is as far from its beginning as the element of `model` that belongs to it."""
    if tensor.shape != model.shape:
        return False
    if tensor.is_contiguous() and model.is_contiguous():
        return True
    return tensor.stride() == model.stride() and is_dense(model)


def pointers(tensors: Iterable[Tensor], counts: Iterable[int]) -> array[int]:
    """Their addresses, as a C array (kept alive by its holder; `address` gives its own address).

    `counts` are the elements that the kernel will touch of each; that these have no gaps, `lies_like` or `is_dense` has
    made sure.
    """
    return array("q", [_pointer(tensor, count) for tensor, count in zip(tensors, counts, strict=True)])


def _pointer(tensor: Tensor, count: int) -> int:
    if tensor.dtype is not torch.float32 or tensor.numel() != count or not tensor.is_cpu:
        raise ValueError(
            f"the optimizer's kernel needs {count} elements of float32 on the CPU, "
            f"found {tensor.dtype} on {tensor.device} of shape {tuple(tensor.shape)}."
        )
    place = tensor.data_ptr()
    if not place:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was resized to nothing.")
    return place


def sizes(tensors: Iterable[Tensor]) -> array[int]:
    return array("q", [tensor.numel() for tensor in tensors])


def address(values: array[int]) -> int:
    return values.buffer_info()[0]
