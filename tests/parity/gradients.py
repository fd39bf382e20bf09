"""The yardstick of the parity tests: every parameter's gradient against stock in float64.

An error counts against stock fp32's own error of the same parameter: at most twice that, plus 1e-7 of the norm of the
whole gradient (some gradients are zero in exact arithmetic, and then stock's error is luck).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Gradients:
    model.zero_grad(set_to_none=True)
    loss(model).backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def in_float64(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def exact_and_stock(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], loss64: Callable
) -> tuple[Gradients, Gradients]:
    """Gradients of a stock model in float64 and in float32."""
    return gradients(copy.deepcopy(model).double(), loss64), gradients(model, loss)


def assert_as_exact_as_stock(ours: Gradients, stock: Gradients, exact: Gradients) -> None:
    assert ours.keys() == stock.keys() == exact.keys()
    whole = torch.stack([g.norm() for g in exact.values()]).norm()
    for name in exact:
        error, allowed = (ours[name] - exact[name]).norm(), 2 * (stock[name] - exact[name]).norm() + 1e-7 * whole
        assert error <= allowed, (
            f"{name}: error {error:.2e}, stock's {allowed / 2:.2e}, gradient {exact[name].norm():.2e}"
        )


def distance(a, b):
    """Of two gradients as a whole, relative to the second."""
    whole = torch.stack([g.norm() for g in b.values()]).norm()
    return (torch.stack([(a[name] - b[name]).norm() for name in b]).norm() / whole).item()


def in_bf16(model, batch):
    def loss(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(**batch).loss

    return gradients(copy.deepcopy(model), loss)


def with_loss(model: nn.Module, batch: dict) -> Gradients:
    """Of a model that computes its own loss, and that loss."""
    losses: list[Tensor] = []
    found = gradients(model, lambda m: losses.append(m(**batch).loss) or losses[0])
    return found | {"loss": losses[0].detach().double()}


def worst(found: Gradients, exact: Gradients) -> float:
    """The largest error of a tensor, as a part of it."""
    assert found.keys() == exact.keys()
    return max(((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact)
