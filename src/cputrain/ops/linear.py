"""Matrix products of a linear layer, with as few passes around them as possible.

The products themselves are torch's (MKL). What is ours: the bias rides along with the next elementwise pass, several
layers on one input are one product, and gradients of frozen parameters are not computed.

Shapes: x_TI tokens × in-features, w_OI out × in, y_TO.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def flat(x: Tensor) -> Tensor:
    """All leading dimensions as one: tokens × features."""
    return x.reshape(-1, x.shape[-1])


def weight_grad(grad_TO: Tensor, x_TI: Tensor, needed: bool) -> Tensor | None:
    return grad_TO.t().mm(x_TI) if needed else None


class _JoinedLinear(torch.autograd.Function):
    """Several linear layers on one input as one product; the joined weight is a copy that lives until the backward."""

    @staticmethod
    def forward(ctx, x_TI: Tensor, count: int, *weights_and_biases: Tensor | None) -> Tensor:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        joined = torch.cat(weights)  # type: ignore[arg-type]
        ctx.sizes = [w.shape[0] for w in weights]  # type: ignore[union-attr]
        ctx.save_for_backward(x_TI, joined)
        if biases[0] is None:
            return x_TI.mm(joined.t())
        return torch.addmm(torch.cat(biases), x_TI, joined.t())  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TO: Tensor):
        x_TI, joined = ctx.saved_tensors
        count = len(ctx.sizes)
        needs = ctx.needs_input_grad
        grad_x = grad_TO.mm(joined) if needs[0] else None
        grad_weights: list[Tensor | None] = [None] * count
        grad_biases: list[Tensor | None] = [None] * count
        if all(needs[2 : 2 + count]):
            grad_weights = list(grad_TO.t().mm(x_TI).split(ctx.sizes))
        else:
            parts = grad_TO.split(ctx.sizes, dim=1)
            grad_weights = [
                weight_grad(part, x_TI, need) for part, need in zip(parts, needs[2 : 2 + count], strict=True)
            ]
        if any(needs[2 + count :]):
            grad_biases = list(grad_TO.sum(0).split(ctx.sizes))
        return grad_x, None, *grad_weights, *grad_biases


def joined_linear(x_TI: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """The outputs of several linear layers on `x_TI`, side by side; all have a bias or none has."""
    return _JoinedLinear.apply(x_TI, len(weights), *weights, *biases)


def joined_linear_plain(x_TI: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    parts = [torch.nn.functional.linear(x_TI, w, b) for w, b in zip(weights, biases, strict=True)]
    return torch.cat(parts, dim=-1)
