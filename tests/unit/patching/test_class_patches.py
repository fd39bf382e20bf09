"""A class that is patched after `optimize` runs as patched: methods are looked up at each call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import cputrain


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@pytest.fixture
def pair():
    stock = Mlp()
    return stock, cputrain.optimize(copy.deepcopy(stock)), torch.randn(4, 64)


def test_the_patched_method_runs(pair, monkeypatch) -> None:
    stock, ours, x = pair
    torch.testing.assert_close(ours(x), stock(x))
    monkeypatch.setattr(Mlp, "forward", lambda self, x: self.up(x).sum(-1))
    torch.testing.assert_close(ours(x), stock(x))
    assert "not the one that optimize found" in str(cputrain.explain(ours))
    monkeypatch.undo()
    torch.testing.assert_close(ours(x), stock(x))
    assert "not the one" not in str(cputrain.explain(ours))


@pytest.mark.parametrize("kind", [nn.Linear, nn.GELU])
def test_patched_parts_are_called(pair, monkeypatch, kind) -> None:
    stock, ours, x = pair
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * plain(self, x))
    torch.testing.assert_close(ours(x), stock(x))
    assert "replaced in the class" in str(cputrain.explain(ours))


def test_a_class_patched_before_optimize_is_what_is_probed(monkeypatch) -> None:
    monkeypatch.setattr(Mlp, "forward", lambda self, x: self.up(x).sum(-1))
    ours = cputrain.optimize(Mlp())
    assert "activation + linear" not in str(cputrain.explain(ours))
