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


def give_gradients(step: int, group: list[nn.Parameter]) -> None:
    for parameter, grad in zip(group, gradients(step), strict=True):
        parameter.grad = grad.to(parameter.dtype, copy=True)


def run(
    kind: type[Optimizer], options: dict[str, Any], steps: int, dtype: torch.dtype, ours: bool
) -> list[nn.Parameter]:
    """The parameters after that many steps."""
    group = parameters(dtype)
    optimizer = kind(group, **options)
    if ours:
        assert take_over(optimizer).taken
    for step in range(steps):
        give_gradients(step, group)
        optimizer.step()
    return group


_references: dict[str, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}


def assert_no_worse_than_stock(kind: type[Optimizer], steps: int = 8, **options: Any) -> None:
    """Ours is at most twice as far from the float64 run as stock's float32 run is, and four times in the worst element.

    Where gradient and decay cancel, one rounding of either side decides an element's error, and that differs by CPU.
    """
    key = f"{kind} {options} {steps}"
    if key not in _references:  # the same for every instruction set
        exact = run(kind, options, steps, torch.float64, ours=False)
        _references[key] = exact, run(kind, options, steps, torch.float32, ours=False)
    fused = run(kind, options, steps, torch.float32, ours=True)
    exact, stock, ours = (
        torch.cat([p.detach().double().flatten() for p in each]) for each in (*_references[key], fused)
    )
    for order, times in ((2, 2), (torch.inf, 4)):
        allowed = times * (stock - exact).norm(order) + 1e-9
        assert (ours - exact).norm(order) <= allowed, f"norm of order {order}"


def assert_same_for_every_number_of_threads(kind: type[Optimizer], **options: Any) -> None:
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(kind, options, 3, torch.float32, ours=True))
    torch.set_num_threads(before)
    for one, two, three in zip(*results, strict=True):
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
