"""What the optimizer tests share: parameters of odd sizes, made-up gradients, and the three runs that are compared."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cputrain.optimizers import take_over

# Around the vector widths (4, 8, 16), around the kernels' block of 16384 elements, and none at all.
SHAPES = [(1,), (7, 9), (65,), (0, 3), (33, 5), (3, 5, 7), (), (16384,), (2, 16385)]

ROUNDING = torch.finfo(torch.float32).eps


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype) * 0.1) for shape in SHAPES]


@cache
def gradients(step: int) -> list[Tensor]:
    """The same float32 numbers for every run: magnitudes from 1e-6 to 10, and rows of zeros."""
    generator = torch.Generator().manual_seed(1000 + step)
    made = [
        torch.randn(shape, generator=generator) * 10.0 ** (1 - 7 * torch.rand(shape, generator=generator))
        for shape in SHAPES
    ]
    made[4][::3] = 0
    return made


def give_gradients(step: int, group: list[nn.Parameter], factor: float = 1.0) -> None:
    for parameter, grad in zip(group, gradients(step), strict=True):
        parameter.grad = grad.to(parameter.dtype, copy=True) * factor


def run(
    kind: type[Optimizer],
    options: dict[str, Any],
    steps: int,
    dtype: torch.dtype,
    ours: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """All parameters after that many steps with gradients times factor, as one vector of float64."""
    group = parameters(dtype)
    optimizer = kind(group, **options)
    if ours:
        assert take_over(optimizer).taken
    for step in range(steps):
        give_gradients(step, group, factor)
        optimizer.step()
    return torch.cat([parameter.detach().double().flatten() for parameter in group])


_references: dict[str, tuple[Tensor, Tensor, Tensor]] = {}


def assert_no_worse_than_stock(kind: type[Optimizer], steps: int = 8, **options: Any) -> None:
    """Ours is at most twice as far from the float64 run as stock's float32 run is, in all and in the worst element.

    The worst of those that can be told: where gradient and decay cancel, a rounding of the gradient moves the float64
    run itself by more than stock's worst error, and which side is nearer is chance.
    """
    key = f"{kind} {options} {steps}"
    if key not in _references:  # the same for every instruction set
        exact = run(kind, options, steps, torch.float64)
        moved = run(kind, options, steps, torch.float64, factor=1 + ROUNDING)
        _references[key] = exact, moved, run(kind, options, steps, torch.float32)
    exact, moved, stock = _references[key]
    ours = run(kind, options, steps, torch.float32, ours=True)
    errors, of_stock = (ours - exact).abs(), (stock - exact).abs()
    assert errors.norm() <= 2 * of_stock.norm() + 1e-9
    steady = (moved - exact).abs() <= of_stock.max()
    assert steady.float().mean() > 0.99
    assert errors[steady].max() <= 2 * of_stock[steady].max() + 1e-9


def assert_same_for_every_number_of_threads(kind: type[Optimizer], **options: Any) -> None:
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(kind, options, 3, torch.float32, ours=True))
    torch.set_num_threads(before)
    one, two, three = results
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def stock_and_ours(kind: type[Optimizer], **options: Any) -> list[tuple[list[nn.Parameter], Optimizer]]:
    """Two equal sets of parameters with their optimizers, the second of which is taken over."""
    groups = [parameters(), parameters()]
    optimizers = [kind(group, **options) for group in groups]
    assert take_over(optimizers[1]).taken
    return list(zip(groups, optimizers, strict=True))


def assert_alike(ours: Any, stock: Any) -> None:
    """State dicts or lists of tensors: the same keys, types and layouts, and values within rounding."""
    if isinstance(stock, Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (stock.dtype, stock.shape, stock.stride())
        scale = stock.abs().max().item() if stock.numel() else 0.0
        torch.testing.assert_close(ours.detach(), stock.detach(), rtol=1e-5, atol=1e-6 * scale)
    elif isinstance(stock, dict):
        assert ours.keys() == stock.keys()
        for key in stock:
            assert_alike(ours[key], stock[key])
    elif isinstance(stock, list | tuple):
        for one, other in zip(ours, stock, strict=True):
            assert_alike(one, other)
    else:
        assert ours == stock
