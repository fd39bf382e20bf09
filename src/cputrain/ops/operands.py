"""What the operators ask of their tensors before the kernels, which check nothing, get the pointers."""

from __future__ import annotations

import torch
from torch import Tensor


def require_float32(operator: str, **tensors: Tensor | None) -> None:
    """Raises unless every tensor given is float32 on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype != torch.float32 or tensor.device.type != "cpu"):
            raise ValueError(
                f"{operator}: {name} must be float32 on the CPU, found {tensor.dtype} on {tensor.device}; "
                "convert it, or use the operator's plain twin."
            )


def require_size(operator: str, size: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raises unless every tensor given has exactly this shape."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != size:
            raise ValueError(f"{operator}: {name} must have the shape {size}, found {tuple(tensor.shape)}.")


def rows_and_cols(x: Tensor) -> tuple[int, int]:
    """All leading dimensions as one, and the last."""
    cols = x.shape[-1] if x.dim() else 1
    return x.numel() // max(cols, 1), cols


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def is_bf16(tensor: Tensor) -> int:
    """The flag by which kernels are told how something was kept."""
    return int(tensor.dtype == torch.bfloat16)


def address(tensor: Tensor | None) -> int | None:
    """Where the data of a contiguous tensor begins; None is a null pointer."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
