"""Activation of h + bias; the gradient's pass can compute the activation again, so that only h need be kept."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cputrain import native
from cputrain.ops.operands import address, contiguous, require_float32, require_size, rows_and_cols

# Each kind's number in csrc/kernels/activation.cpp, and the stock function.
KINDS = {"identity": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}
_STOCK = {
    "identity": lambda x: x,
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def activation_forward(h: Tensor, bias: Tensor | None, kind: str, out: Tensor | None = None) -> Tensor:
    """activation(h + bias), written into `out` (which may be h) or a new tensor; h is contiguous."""
    out = torch.empty_like(h) if out is None else out
    native.kernels().activation(address(h), address(bias), address(out), *rows_and_cols(h), KINDS[kind])
    return out


def activation_backward(
    grad_a: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    want_activation: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of h and bias and, if wanted, the activation; `inplace` writes the gradient of h over grad_a."""
    grad_h = grad_a if inplace else torch.empty_like(grad_a)
    grad_bias = None if bias is None else torch.empty_like(bias)
    activation = torch.empty_like(h) if want_activation else None
    native.kernels().activation_backward(
        *map(address, (grad_a, h, bias, grad_h, activation, grad_bias)), *rows_and_cols(h), KINDS[kind]
    )
    return grad_h, grad_bias, activation


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bias, kind):
        h, bias = contiguous(h, bias)
        ctx.save_for_backward(h, bias)
        ctx.kind = kind
        return activation_forward(h, bias, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        h, bias = ctx.saved_tensors
        grad_h, grad_bias, _ = activation_backward(grad.contiguous(), h, bias, ctx.kind)
        return grad_h, grad_bias, None


def bias_activation(h: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """activation(h + bias) for a kind of KINDS."""
    if kind not in KINDS:
        raise ValueError(f"bias_activation: kind is {kind!r}; choose one of {', '.join(KINDS)}.")
    require_float32("bias_activation", h=h, bias=bias)
    require_size("bias_activation", tuple(h.shape[-1:]), bias=bias)
    return _BiasActivation.apply(h, bias, kind)


def plain(h: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The same in PyTorch."""
    return _STOCK[kind](h if bias is None else h + bias)
