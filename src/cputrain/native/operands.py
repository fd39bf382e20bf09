"""What the operators ask of their tensors before the kernels, which check nothing, get the pointers.

A kernel gets an address only from here, together with what it will read or write there. `require` names an operand that
a caller got wrong; `address` and `rows_of` are the last gate, also for what comes back in a backward.
"""

from __future__ import annotations

import torch
from torch import Tensor


def require(operator: str, shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raises unless every tensor given is float32 on the CPU and has exactly this shape."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            raise ValueError(
                f"{operator}: {name} must be float32 on the CPU, found {tensor.dtype} on {tensor.device}; "
                "convert it, or use the operator's plain twin."
            )
        if tensor.shape != shape:
            raise ValueError(f"{operator}: {name} must have the shape {tuple(shape)}, found {tuple(tensor.shape)}.")


def require_linear(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, number: str = "") -> None:
    """Raises unless x (tokens × in), weight (out × in) and bias (out) fit; `number` follows the names in messages."""
    for name, tensor in (("x", x), (f"weight{number}", weight)):
        if tensor.dim() != 2:
            raise ValueError(f"{operator}: {name} must have two dimensions, found {tensor.dim()}; flatten the others.")
    require(operator, (x.shape[0], weight.shape[1]), x=x)
    if weight.requires_grad or weight.dtype not in (torch.bfloat16, torch.float16):  # frozen ones may be of two bytes
        require(operator, weight.shape, **{f"weight{number}": weight})
    require(operator, weight.shape[:1], **{f"bias{number}": bias})


def rows_and_cols(x: Tensor) -> tuple[int, int]:
    """All leading dimensions as one, and the last."""
    cols = x.shape[-1] if x.dim() else 1
    return x.numel() // max(cols, 1), cols


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def underlying(x: Tensor) -> Tensor | None:
    """x, or the tensor that x shows all of in another shape; None if they lie in memory otherwise, or have no version.

    What was computed from a tensor is found again by it and its version.
    """
    source = x if x._base is None else x._base
    alike = x.is_contiguous() and source.is_contiguous() and source.numel() == x.numel()
    return source if alike and source.dtype == x.dtype and not x.is_inference() else None


def is_bf16(tensor: Tensor) -> int:
    """The flag by which kernels are told how something was saved."""
    return int(tensor.dtype == torch.bfloat16)


def saved_dtype(tensor: Tensor) -> torch.dtype:
    """What `address` expects of something that was saved, as float or as bf16; `is_bf16` tells the kernel which."""
    return torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32


def address(what: str, tensor: Tensor | None, count: int, dtype: torch.dtype = torch.float32) -> int | None:
    """Where exactly `count` elements of `dtype` lie one behind the other in ordinary memory; None is a null pointer."""
    if tensor is None:
        return None
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{what} must be {count} contiguous elements of {dtype} on the CPU, found {_described(tensor)}."
        )
    return _place(what, tensor, count)


def rows_of(what: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[int, ...]:
    """Where a tensor of this shape lies whose last dimension is contiguous, and the strides of the others.

    What is only read may overlap (an expanded tensor).
    """
    strides = x.stride()
    if x.dtype is not dtype or x.shape != shape or (shape[-1] > 1 and strides[-1] != 1) or not x.is_cpu:
        raise ValueError(
            f"{what} must be {dtype} on the CPU of shape {tuple(shape)} with a contiguous last dimension, "
            f"found {_described(x)}."
        )
    return _place(what, x, x.numel()), *strides[:-1]


def _place(what: str, tensor: Tensor, count: int) -> int:
    place = tensor.data_ptr()
    if not place and count:
        raise ValueError(f"{what} has no memory: its storage was resized to nothing, as sharding does between uses.")
    return place


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
