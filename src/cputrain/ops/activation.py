"""Activation of h + bias; the gradient's pass can compute the activation again, so that only h need be saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats import int16_matmul
from cputrain.native.operands import address, contiguous, is_bf16, require, rows_and_cols, saved_dtype
from cputrain.ops.gradient import fp32_backward

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
    h: Tensor, bias: Tensor | None, kind: str, saves: torch.dtype = torch.float32, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """activation(h + bias), and h as it is saved (`inplace` then lets the activation take its place)."""
    saved = h if saves is torch.float32 else torch.empty_like(h, dtype=saves)
    out = h if inplace and saved is not h else torch.empty_like(h)
    (bias,), (rows, cols) = contiguous(bias), rows_and_cols(h)
    native.kernels().activation(
        address("activation: h", h, rows * cols),
        address("activation: bias", bias, cols),
        address("activation: out", out, rows * cols),
        None if saved is h else address("activation: saved h", saved, rows * cols, saves),
        *(rows, cols, KINDS[kind]),
    )
    return out, saved


def activation_backward(
    grad_a: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    value: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of h and bias; `inplace` writes that of h over grad_a, and `value` receives the activation.

    h is as it was saved.
    """
    grad_h = grad_a if inplace else torch.empty_like(grad_a)
    (bias,), (rows, cols) = contiguous(bias), rows_and_cols(h)
    grad_bias = None if bias is None else torch.empty_like(bias)
    native.kernels().activation_backward(
        address("activation: gradient", grad_a, rows * cols),
        address("activation: h", h, rows * cols, saved_dtype(h)),
        is_bf16(h),
        address("activation: bias", bias, cols),
        address("activation: gradient of h", grad_h, rows * cols),
        address("activation: value", value, rows * cols),
        address("activation: gradient of bias", grad_bias, cols),
        *(rows, cols, KINDS[kind]),
    )
    return grad_h, grad_bias


@dataclass
class Activated:
    """activation(h + bias) on its way into a product."""

    h: Tensor
    bias: Tensor | None
    kind: str

    def values(self, saves: torch.dtype = torch.float32, inplace: bool = False) -> tuple[Tensor, Tensor]:
        return activation_forward(self.h, self.bias, self.kind, saves, inplace)

    def packed(self) -> int16_matmul.Operand:
        return int16_matmul.pack_activated(self.h, self.bias, KINDS[self.kind])


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bias, kind, saves):
        h, bias = contiguous(h, bias)
        out, saved = activation_forward(h, bias, kind, saves)
        ctx.save_for_backward(saved, bias)
        ctx.kind = kind
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad):
        h, bias = ctx.saved_tensors
        grad_h, grad_bias = activation_backward(grad.contiguous(), h, bias, ctx.kind)
        return grad_h, grad_bias, None, None


def bias_activation(h: Tensor, bias: Tensor | None, kind: str, saves: torch.dtype = torch.float32) -> Tensor:
    """activation(h + bias) for a kind of KINDS; h is saved for the backward as `saves`."""
    if kind not in KINDS:
        raise ValueError(f"bias_activation: kind is {kind!r}; choose one of {', '.join(KINDS)}.")
    require("bias_activation", h.shape, h=h)
    require("bias_activation", h.shape[-1:], bias=bias)
    return _BiasActivation.apply(h, bias, kind, saves)


def plain(h: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The same in PyTorch."""
    return _STOCK[kind](h if bias is None else h + bias)
