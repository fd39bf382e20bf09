"""SGD: stock's numbers on stock's state, with every option."""

from __future__ import annotations

import pytest
from torch.optim import SGD

from tests.unit.optimizers.runs import (
    assert_alike,
    assert_no_worse_than_stock,
    assert_same_for_every_number_of_threads,
    give_gradients,
    stock_and_ours,
)

OPTIONS = [
    {},
    {"weight_decay": 0.2},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.8, "nesterov": True},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "fused": True},
    {"momentum": 0.9, "foreach": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_worse_than_stock(isa, options):
    # A float64 run that starts from the same float32 numbers: rates such as 0.05 aren't float32 numbers, in stock too.
    assert_no_worse_than_stock(SGD, lr=0.05, **options)


@pytest.mark.parametrize("options", OPTIONS[:6:2], ids=str)
def test_same_for_every_number_of_threads(options):
    assert_same_for_every_number_of_threads(SGD, lr=0.01, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_is_stocks(options):
    (_, stock), (_, ours) = pairs = stock_and_ours(SGD, lr=0.1, **options)
    for group, optimizer in pairs:
        for step in range(3):
            give_gradients(step, group)
            optimizer.step()
    assert_alike(ours.state_dict(), stock.state_dict())


def test_momentum_switched_on_later():
    """A group's momentum may change between steps: the buffer then starts from that step's gradient."""
    (stock, _), (ours, _) = pairs = stock_and_ours(SGD, lr=0.1)
    for group, optimizer in pairs:
        for step in range(4):
            optimizer.param_groups[0]["momentum"] = 0.0 if step < 2 else 0.9
            give_gradients(step, group)
            optimizer.step()
    assert_alike(ours, stock)
