"""Activation of h + bias; the gradient's pass can compute the activation again, so that only h need be kept."""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.operands import address, contiguous, is_bf16, kept_dtype, require, rows_and_cols

# Each kind's number in csrc/kernels/activation.h, and the stock function.
KINDS = {"identity": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}
_STOCK = {
    "identity": lambda x: x,
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def activation_forward(
    h: Tensor, bias: Tensor | None, kind: str, storage: torch.dtype = torch.float32, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """activation(h + bias), and h as it is to be kept (`inplace` then lets the activation take its place)."""
    kept = h if storage is torch.float32 else torch.empty_like(h, dtype=storage)
    out = h if inplace and kept is not h else torch.empty_like(h)
    (bias,), (rows, cols) = contiguous(bias), rows_and_cols(h)
    native.kernels().activation(
        address("activation: h", h, rows * cols),
        address("activation: bias", bias, cols),
        address("activation: out", out, rows * cols),
        None if kept is h else address("activation: kept", kept, rows * cols, storage),
        *(rows, cols, KINDS[kind]),
    )
    return out, kept


def activation_backward(
    grad_a: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    value: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of h and bias; `inplace` writes that of h over grad_a, and `value` receives the activation.

    h is as it was kept.
    """
    grad_h = grad_a if inplace else torch.empty_like(grad_a)
    (bias,), (rows, cols) = contiguous(bias), rows_and_cols(h)
    grad_bias = None if bias is None else torch.empty_like(bias)
    native.kernels().activation_backward(
        address("activation: gradient", grad_a, rows * cols),
        address("activation: h", h, rows * cols, kept_dtype(h)),
        is_bf16(h),
        address("activation: bias", bias, cols),
        address("activation: gradient of h", grad_h, rows * cols),
        address("activation: value", value, rows * cols),
        address("activation: gradient of bias", grad_bias, cols),
        *(rows, cols, KINDS[kind]),
    )
    return grad_h, grad_bias


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bias, kind, storage):
        h, bias = contiguous(h, bias)
        out, kept = activation_forward(h, bias, kind, storage)
        ctx.save_for_backward(kept, bias)
        ctx.kind = kind
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad):
        h, bias = ctx.saved_tensors
        grad_h, grad_bias = activation_backward(grad.contiguous(), h, bias, ctx.kind)
        return grad_h, grad_bias, None, None


def bias_activation(h: Tensor, bias: Tensor | None, kind: str, storage: torch.dtype = torch.float32) -> Tensor:
    """activation(h + bias) for a kind of KINDS; h is kept for the backward as `storage`."""
    if kind not in KINDS:
        raise ValueError(f"bias_activation: kind is {kind!r}; choose one of {', '.join(KINDS)}.")
    require("bias_activation", h.shape, h=h)
    require("bias_activation", h.shape[-1:], bias=bias)
    return _BiasActivation.apply(h, bias, kind, storage)


def plain(h: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The same in PyTorch."""
    return _STOCK[kind](h if bias is None else h + bias)
