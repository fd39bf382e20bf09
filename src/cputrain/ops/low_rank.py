"""The low-rank path of an adapter (LoRA): scaling · dropout(x) Aᵀ Bᵀ, added to what a frozen layer computes.

t = scaling · dropout(x) Aᵀ is so narrow that it is kept for the backward; the mask of its dropout is computed again.

Shapes: x_TI tokens × in-features, a_RI rank × in, b_OR out × rank, t_TR.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cputrain import native
from cputrain.native.operands import address, rows_of
from cputrain.ops import dropout


class Adapter(NamedTuple):
    a_RI: Tensor
    b_OR: Tensor
    scaling: float
    p: float = 0.0  # of the dropout on its input
    key: int = 0


def require_adapter(operator: str, adapter: Adapter | None, in_features: int, out_features: int) -> None:
    """Raises unless A and B fit the layer and one another."""
    if adapter is None:
        return
    a, b = adapter.a_RI, adapter.b_OR
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != in_features or b.shape != (out_features, a.shape[0]):
        raise ValueError(
            f"{operator}: an adapter of a layer {out_features} × {in_features} must have A of rank × {in_features} and "
            f"B of {out_features} × rank, found A of {tuple(a.shape)} and B of {tuple(b.shape)}; load one that was "
            "trained for this model."
        )


def down(x_TI: Tensor, adapter: Adapter) -> Tensor:
    """t = scaling · dropout(x) Aᵀ."""
    a_RI, (tokens, features) = adapter.a_RI, x_TI.shape
    rank = a_RI.shape[0]
    t_TR = x_TI.new_empty(tokens, rank)
    native.kernels().low_rank(
        *rows_of("low_rank: x", x_TI, (tokens, features)),
        address("low_rank: A", a_RI, rank * features),
        address("low_rank: out", t_TR, tokens * rank),
        *(tokens, features, rank, adapter.p, adapter.key),
    )
    return t_TR.mul_(adapter.scaling)


class Gradients(NamedTuple):
    a_RI: Tensor | None
    b_OR: Tensor | None


def backward(
    dy_TO: Tensor, x_TI: Tensor, t_TR: Tensor, adapter: Adapter, dx_TI: Tensor | None, wanted: tuple[bool, bool]
) -> Gradients:
    """The gradients of A and B, as far as they are `wanted`; x's is added to `dx` (or None)."""
    a_RI, b_OR = adapter.a_RI, adapter.b_OR
    grad_b = dy_TO.t().mm(t_TR) if wanted[1] else None
    if not wanted[0] and dx_TI is None:
        return Gradients(None, grad_b)
    dt_TR = dy_TO.mm(b_OR).mul_(adapter.scaling)
    (tokens, features), rank = x_TI.shape, a_RI.shape[0]
    ends = tokens, features, rank, adapter.p, adapter.key
    place = address("low_rank: gradient", dt_TR, tokens * rank)
    grad_a = None
    if wanted[0]:
        grad_a = torch.empty_like(a_RI)
        native.kernels().low_rank_a_grad(
            place,
            *rows_of("low_rank: x", x_TI, (tokens, features)),
            address("low_rank: gradient of A", grad_a, rank * features),
            *ends,
        )
    if dx_TI is not None:
        native.kernels().low_rank_x_grad(
            place,
            address("low_rank: A", a_RI, rank * features),
            address("low_rank: gradient of x", dx_TI, tokens * features),
            *ends,
        )
    return Gradients(grad_a, grad_b)


def plain(x_TI: Tensor, adapter: Adapter) -> Tensor:
    """What the low-rank path adds, in PyTorch."""
    dropped = dropout.plain(x_TI, adapter.p, adapter.key) if adapter.p > 0 else x_TI
    return dropped @ adapter.a_RI.to(x_TI.dtype).t() @ adapter.b_OR.to(x_TI.dtype).t() * adapter.scaling
