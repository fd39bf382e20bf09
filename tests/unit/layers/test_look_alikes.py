"""Modules that have the parts of one that is fused but compute something else are left alone: they are asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

import cputrain


class Block(nn.Module):
    """The parts of a residual block, and a formula of its own."""

    def __init__(self, formula: Callable[[Block, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = nn.Linear(16, 16), nn.Dropout(0.1), nn.LayerNorm(16)
        self.formula = formula

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.formula(self, hidden_states, input_tensor)


class FeedForward(nn.Module):
    """The parts of a feed-forward, and a formula of its own."""

    def __init__(self, formula: Callable[[FeedForward, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.act, self.down, self.dropout = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def what_runs(model: nn.Module) -> str:
    """What was put in the place of the module as a whole."""
    return next(how for where, _, how in cputrain.explain(cputrain.optimize(model)).modules if where == "(the model)")


@pytest.mark.parametrize(
    ("formula", "fused"),
    [
        (lambda m, x, r: m.LayerNorm(r + m.dropout(m.dense(x))), True),
        (lambda m, x, r: m.LayerNorm(m.dropout(m.dense(x)) + r), True),
        (lambda m, x, r: m.LayerNorm(r + m.dense(m.dropout(x))), False),
        (lambda m, x, r: m.dropout(m.LayerNorm(r + m.dense(x))), False),
        (lambda m, x, r: m.LayerNorm(m.dropout(r + m.dense(x))), False),
        (lambda m, x, r: m.LayerNorm(r + m.dense(x)), False),
        (lambda m, x, r: r + m.dropout(m.dense(m.LayerNorm(x))), False),
        (lambda m, x, r: m.LayerNorm(2 * r + m.dropout(m.dense(x))), False),
        (lambda m, x, r: m.LayerNorm(x + m.dropout(m.dense(r))), False),
    ],
)
def test_residual_blocks(formula, fused: bool) -> None:
    assert what_runs(Block(formula)).startswith("linear + dropout + residual" if fused else "as stock")


@pytest.mark.parametrize(
    ("formula", "fused"),
    [
        (lambda m, x: m.dropout(m.down(m.act(m.up(x)))), True),
        (lambda m, x: m.down(m.dropout(m.act(m.up(x)))), False),
        (lambda m, x: m.down(m.act(m.up(x))), False),
        (lambda m, x: x + m.dropout(m.down(m.act(m.up(x)))), False),
        (lambda m, x: m.dropout(m.down(m.up(x))), False),
    ],
)
def test_feed_forwards(formula, fused: bool) -> None:
    assert what_runs(FeedForward(formula)).startswith("linear + activation + linear" if fused else "as stock")
