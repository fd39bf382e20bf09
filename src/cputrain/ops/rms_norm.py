"""RMSNorm over the last dimension: x · rstd · (offset + weight).

Saved are x, as the format keeps it, and one number a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats import FP32, Format
from cputrain.formats.int16_saving import as_float
from cputrain.native.operands import address, contiguous, require, rows_and_cols
from cputrain.ops.gradient import fp32_backward


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, offset: float, eps: float, format: Format) -> Tensor:
        x, weight = contiguous(x, weight)  # type: ignore[assignment]
        rows, cols = rows_and_cols(x)
        out, rstd = torch.empty_like(x), x.new_empty(rows)
        native.kernels().rms_norm(
            *(address("rms_norm: x", x, rows * cols), address("rms_norm: weight", weight, cols), offset),
            *(address("rms_norm: out", out, rows * cols), address("rms_norm: rstd", rstd, rows)),
            *(rows, cols, eps),
        )
        ctx.save_for_backward(format.keep(x.view(rows, cols)), rstd, weight)
        ctx.offset = offset
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor):
        kept, rstd, weight = ctx.saved_tensors
        (rows, cols), grad = rows_and_cols(grad), grad.contiguous()
        x = as_float(kept, cols, "norm")
        grad_x, grad_weight = torch.empty_like(grad), None if weight is None else torch.empty_like(weight)
        native.kernels().rms_norm_backward(
            *(address("rms_norm: gradient", grad, rows * cols), address("rms_norm: x", x, rows * cols)),
            *(address("rms_norm: rstd", rstd, rows), address("rms_norm: weight", weight, cols), ctx.offset),
            address("rms_norm: gradient of x", grad_x, rows * cols),
            address("rms_norm: gradient of weight", grad_weight, cols),
            *(rows, cols),
        )
        return grad_x, grad_weight, None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, format: Format = FP32) -> Tensor:
    """x / √(mean of x² + eps) · (offset + weight); without a weight, without the last factor."""
    require("rms_norm", x.shape, x=x)
    require("rms_norm", x.shape[-1:], weight=weight)
    return _RmsNorm.apply(x, weight, offset, eps, format)


def plain(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """The same in PyTorch."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight + offset)
