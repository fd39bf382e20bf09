"""The three matrix products of a linear layer, in the precision asked for, with as few passes around them as possible.

In fp32 the products are torch's (MKL); in int16 they are ours (ops/matmul.py). What either saves: the bias rides along,
several layers on one input are one product, gradients of frozen parameters are not computed, and in int16 the input is
kept as it was packed for the weight's gradient, at half its size.

Shapes: x_TI tokens × in-features, w_OI out × in, y_TO.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cputrain.ops import matmul

Precision = Literal["fp32", "int16"]


def flat(x: Tensor) -> Tensor:
    """All leading dimensions as one: tokens × features."""
    return x.reshape(-1, x.shape[-1])


def forward_product(
    x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None, precision: Precision, keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    """y_TO = x wᵀ + bias, and what the weight's gradient will need of x (None unless `keep`)."""
    if precision == "fp32":
        y = x_TI.mm(w_OI.t()) if bias_O is None else torch.addmm(bias_O, x_TI, w_OI.t())
        return y, x_TI if keep else None
    rows, columns = matmul.pack(x_TI, rows="left", columns="right" if keep else None)
    assert rows is not None
    y = matmul.product(rows, matmul.by_rows(w_OI, "right"), bias=bias_O)
    return y, columns.memory if columns is not None else None


def kept_input(x_TI: Tensor, precision: Precision) -> Tensor:
    """What `forward_product` would have kept of x: for an input that is computed again in the backward."""
    if precision == "fp32":
        return x_TI
    _, columns = matmul.pack(x_TI, columns="right")
    assert columns is not None
    return columns.memory


class OutputGradient:
    """The gradient of a linear layer's output, packed once: those of its input, weight and bias follow from it."""

    def __init__(
        self, dy_TO: Tensor, precision: Precision, need_x: bool, need_w: bool, need_bias: bool = False
    ) -> None:
        self.precision = precision
        self.bias: Tensor | None = None
        if precision == "fp32":
            self.dy = dy_TO
            self.bias = dy_TO.sum(0) if need_bias else None
            return
        self.bias = dy_TO.new_empty(dy_TO.shape[1]) if need_bias else None
        columns = need_w or need_bias
        self.rows, self.columns = (None, None)
        if need_x or columns:
            self.rows, self.columns = matmul.pack(
                dy_TO, rows="left" if need_x else None, columns="left" if columns else None, sums=self.bias
            )

    def of_input(self, w_OI: Tensor, add_to: Tensor | None = None) -> Tensor:
        """dx_TI = dy w, added to `add_to` in place if given."""
        if self.precision == "fp32":
            return self.dy.mm(w_OI) if add_to is None else add_to.addmm_(self.dy, w_OI)
        assert self.rows is not None
        return matmul.product(self.rows, matmul.by_columns(w_OI, "right"), out=add_to, accumulate=add_to is not None)

    def of_weight(self, kept: Tensor, in_features: int) -> Tensor:
        """dw_OI = dyᵀ x, from what `forward_product` or `kept_input` kept of x."""
        if self.precision == "fp32":
            return self.dy.t().mm(kept)
        assert self.columns is not None
        return matmul.product(self.columns, matmul.Operand(kept, in_features, self.columns.depth, "right"))


class _JoinedLinear(torch.autograd.Function):
    """Several linear layers on one input as one product; the joined weight is a copy that lives until the backward."""

    @staticmethod
    def forward(ctx, x_TI: Tensor, precision: Precision, count: int, *weights_and_biases: Tensor | None) -> Tensor:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        joined = torch.cat(weights) if count > 1 else weights[0]  # type: ignore[arg-type]
        bias = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
        y, kept = forward_product(x_TI, joined, bias, precision, keep=any(ctx.needs_input_grad[3 : 3 + count]))
        ctx.sizes = [w.shape[0] for w in weights]  # type: ignore[union-attr]
        ctx.precision = precision
        ctx.save_for_backward(kept, joined)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TO: Tensor):
        kept, joined = ctx.saved_tensors
        count = len(ctx.sizes)
        need_x, _, _, *need_rest = ctx.needs_input_grad
        need_weights, need_biases = need_rest[:count], need_rest[count:]
        grad = OutputGradient(grad_TO.contiguous(), ctx.precision, need_x, any(need_weights), any(need_biases))
        grad_x = grad.of_input(joined) if need_x else None
        grad_weight = grad.of_weight(kept, joined.shape[1]) if any(need_weights) else None
        grads = [*_parts(grad_weight, ctx.sizes, need_weights), *_parts(grad.bias, ctx.sizes, need_biases)]
        return grad_x, None, None, *grads


def _parts(joined: Tensor | None, sizes: list[int], needed: list[bool]) -> list[Tensor | None]:
    """The joined gradient cut up again; parts that nobody needs are left out."""
    if joined is None:
        return [None] * len(sizes)
    return [part if need else None for part, need in zip(joined.split(sizes), needed, strict=True)]


def joined_linear(
    x_TI: Tensor, weights: list[Tensor], biases: list[Tensor | None], precision: Precision = "fp32"
) -> Tensor:
    """The outputs of several linear layers on `x_TI`, side by side; all have a bias or none has."""
    return _JoinedLinear.apply(x_TI, precision, len(weights), *weights, *biases)


def joined_linear_plain(x_TI: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    parts = [torch.nn.functional.linear(x_TI, w, b) for w, b in zip(weights, biases, strict=True)]
    return torch.cat(parts, dim=-1)
