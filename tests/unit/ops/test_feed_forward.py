"""Linear, activation, linear, and what follows."""

from __future__ import annotations

import pytest
import torch

from cputrain.ops import feed_forward as module
from cputrain.ops.dropout import factors
from tests.unit.ops.blocks import assert_equals_twin

KEY = 0x0123456789ABCDEF


def _inputs(rows: int, hidden: int, middle: int) -> list[torch.Tensor]:
    return [
        torch.randn(rows, hidden),
        torch.randn(middle, hidden) / hidden**0.5,
        torch.randn(middle),
        torch.randn(hidden, middle) / middle**0.5,
        torch.randn(hidden),
    ]


@pytest.mark.parametrize("rows", [1, 7, 65])
@pytest.mark.parametrize("hidden, middle", [(8, 63), (65, 7), (96, 384)])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
def test_without_norm(isa, rows, hidden, middle, kind):
    inputs = _inputs(rows, hidden, middle)
    assert_equals_twin(lambda *x: module.feed_forward(*x, kind), lambda *x: module.plain(*x, kind), inputs)


@pytest.mark.parametrize("rows", [1, 7, 65])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_with_norm(isa, rows, p, monkeypatch):
    monkeypatch.setattr(module, "draw_key", lambda: KEY)
    kept = factors(KEY, p, rows, 65) if p else None
    inputs = [*_inputs(rows, 65, 130), torch.randn(65), torch.randn(65)]

    def twin(*x):
        mask = None if kept is None else kept.to(x[0].dtype)
        return module.plain(*x[:5], "gelu", mask, (*x[5:], 1e-12))

    assert_equals_twin(lambda *x: module.feed_forward_norm(*x, "gelu", 1e-12, p), twin, inputs)


def test_keeps_only_the_input_and_the_first_product():
    kept: list[torch.Tensor] = []
    inputs = [x.requires_grad_() for x in _inputs(33, 16, 64)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module.feed_forward(*inputs, "gelu")
    own = {id(x) for x in inputs}
    fresh = {t.untyped_storage().data_ptr(): t.numel() for t in kept if id(t) not in own}
    for x in inputs:
        fresh.pop(x.untyped_storage().data_ptr(), None)
    assert sum(fresh.values()) == 33 * 64
