"""AdamW and Adam: stock's numbers on stock's state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from cputrain.optimizers import take_over
from tests.unit.optimizers.runs import (
    ROUNDING,
    SHAPES,
    assert_alike,
    assert_no_worse_than_stock,
    assert_same_for_every_number_of_threads,
    give_gradients,
    stock_and_ours,
)

OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "lr": 0.02},
    {"betas": (0.3, 0.9), "eps": 1e-6},
    {"betas": (0.0, 0.0)},
    {"lr": 0.0},
    {"lr": 1},
    {"fused": True},
    {"foreach": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_no_worse_than_stock(isa, kind, options):
    assert_no_worse_than_stock(kind, **options)


def test_same_for_every_number_of_threads(isa):
    assert_same_for_every_number_of_threads(AdamW, lr=0.01)


def test_rounds_as_stock(isa):
    """Moments come out bit for bit; parameters within a rounding, because stock's square root isn't the nearest one."""
    if isa == "portable" or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("stock fuses multiply and add where this build can't")
    whole_vectors = SHAPES.index((16384,))
    found = []
    for group, optimizer in stock_and_ours(AdamW, weight_decay=0.1):
        give_gradients(0, group)
        optimizer.step()
        parameter = group[whole_vectors]
        found.append((parameter.detach(), optimizer.state[parameter]))
    (stock, stock_state), (ours, our_state) = found
    assert torch.equal(our_state["exp_avg"], stock_state["exp_avg"])
    assert torch.equal(our_state["exp_avg_sq"], stock_state["exp_avg_sq"])
    assert ((ours - stock).abs() <= ROUNDING * (stock.abs() + 1e-3)).all()  # of the parameter, or of its change by lr


def test_without_eps(isa):
    """With eps = 0 nothing may be flushed to zero: the update of a tiny gradient is still ±lr."""
    parameter = nn.Parameter(torch.ones(40))
    optimizer = AdamW([parameter], lr=0.01, eps=0.0, weight_decay=0.0)
    take_over(optimizer)
    parameter.grad = torch.full((40,), 1e-18)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((40,), 0.99))


def test_denormal_moments_change_nothing(isa):
    """Flushing them to zero is far below what a parameter can show."""
    pair = [nn.Parameter(torch.ones(100)) for _ in range(2)]
    optimizers = [AdamW([parameter]) for parameter in pair]
    take_over(optimizers[1])
    for parameter, optimizer in zip(pair, optimizers, strict=True):
        parameter.grad = torch.full((100,), 1e-30)
        optimizer.step()
        optimizer.state[parameter]["exp_avg"].fill_(1e-42)
        optimizer.state[parameter]["exp_avg_sq"].fill_(1e-42)
        parameter.grad.zero_()
        optimizer.step()
    assert torch.equal(pair[0], pair[1])
    assert (torch.full((100,), 1e-40) * 0.5 != 0).all(), "the mode of the threads must be put back"


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_state_is_stocks(kind, fused):
    (_, stock), (_, ours) = pairs = stock_and_ours(kind, fused=fused)
    for group, optimizer in pairs:
        for step in range(3):
            give_gradients(step, group)
            optimizer.step()
    assert_alike(ours.state_dict(), stock.state_dict())


def test_each_parameter_has_its_own_step_count(isa):
    """A parameter that missed steps has another bias correction than its neighbours."""
    (stock, _), (ours, optimizer) = pairs = stock_and_ours(AdamW, lr=0.01)
    for group, each in pairs:
        for step in range(4):
            give_gradients(step, group)
            for number in range(step, len(group), 3):
                group[number].grad = None
            each.step()
    assert len({int(state["step"]) for state in optimizer.state.values()}) > 1
    assert_alike(ours, stock)


def test_every_row_of_an_embedding_is_visited(isa):
    """Rows without a gradient still decay and still follow their old moments, as in stock."""
    tables = [nn.Embedding(50, 17) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [AdamW(table.parameters(), lr=0.1, weight_decay=0.1) for table in tables]
    take_over(optimizers[1])
    before = tables[1].weight.detach().clone()
    for rows in ([1, 2, 3], [3, 4, 49], [7]):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
    assert (tables[1].weight != before).all()
    assert_alike(tables[1].weight, tables[0].weight)
