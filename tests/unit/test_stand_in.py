"""Stand-ins: every operator, function and attribute of the tensor that they stand for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from cputrain.blocks.embedding import PendingRows
from cputrain.blocks.stack import RaggedStates
from cputrain.padding import OPERATORS, PaddingMask, StandIn

REAL = torch.tensor([[True, True, True], [True, False, False]])


class Of(StandIn):
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def compute(self) -> Tensor:
        return self.tensor


def ragged() -> RaggedStates:
    padding = PaddingMask(2, 3, REAL, False, lambda: None)
    return RaggedStates(torch.arange(1.0, 9).view(1, 4, 2), padding.ragged)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_the_tensors(name: str) -> None:
    """With as many arguments as it takes; what the tensor refuses, its stand-in refuses with the same words."""
    found = []
    for make in (lambda x: x, Of):
        x = torch.tensor([[3.0, 4.0], [5.0, 6.0]])
        for others in ((), (torch.tensor(1),), (0, 2.0)):
            try:
                found.append(getattr(type(make(x)), name)(make(x), *others))
            except (TypeError, RuntimeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
                found.append(str(error))
    half = len(found) // 2
    for expected, result in zip(found[:half], found[half:], strict=True):
        if isinstance(expected, Tensor):
            torch.testing.assert_close(result, expected)
        elif not isinstance(expected, str):
            assert type(result) is type(expected)


def test_what_python_looks_up_on_the_class() -> None:
    x, y = ragged(), ragged().compute()
    assert torch.equal(x == 0, y == 0) and torch.equal(x != 0, y != 0)
    assert torch.equal(x < 2, y < 2) and torch.equal(x <= 2, y <= 2)
    assert torch.equal(abs(-x), y) and torch.equal(x // 2, y // 2) and torch.equal(x % 3, y % 3)
    assert torch.equal((x > 1) & (x < 5), (y > 1) & (y < 5)) and torch.equal(2**x, 2**y)
    assert len(x) == len(y) and [row.shape for row in x] == [row.shape for row in y]
    assert torch.equal(torch.cat([x, x], dim=1), torch.cat([y, y], dim=1))
    assert x.shape == y.shape and x.mean() == y.mean()


def test_masks_are_stocks_for_the_models_own_code() -> None:
    stock = torch.where(REAL, 0.0, -1e9)[:, None, None, :].expand(2, 1, 3, 3)
    mask = PaddingMask(2, 3, REAL, False, lambda: stock)
    assert torch.equal(torch.cat([mask, stock], dim=-1), torch.cat([stock, stock], dim=-1))
    assert torch.equal(mask[:, :, :, :2], stock[..., :2]) and torch.equal(mask == 0, stock == 0)
    assert mask.shape == stock.shape and mask.dtype == stock.dtype and mask.dim() == 4
    assert isinstance(copy.copy(mask), PaddingMask)


def test_changes_in_place_are_seen_under_every_name() -> None:
    x = ragged()
    same = x
    x += 1
    assert torch.equal(same.of(same.ragged), ragged().rows + 1)
    first, second = nn.Embedding(5, 2), nn.Embedding(7, 2)
    ids = torch.tensor([[1, 2, 3]])
    rows, expected = PendingRows((first,), (ids,)), first(ids) + second(ids)
    alias = rows
    rows += PendingRows((second,), (ids,))
    torch.testing.assert_close(alias.compute(), expected)
    alias *= 2
    torch.testing.assert_close(torch.as_tensor(rows.compute()), 2 * expected)
