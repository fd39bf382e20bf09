"""LayerNorm(residual + dropout(linear(x)))."""

from __future__ import annotations

import pytest
import torch

from cputrain.ops import residual_block as module
from cputrain.ops.dropout import factors
from tests.unit.ops.blocks import assert_equals_twin

KEY = 0x0123456789ABCDEF


@pytest.mark.parametrize("rows", [1, 7, 65])
@pytest.mark.parametrize("wide, narrow", [(63, 8), (16, 65), (384, 96)])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_equals_plain_twin(isa, rows, wide, narrow, p, monkeypatch):
    monkeypatch.setattr(module, "draw_key", lambda: KEY)
    kept = factors(KEY, p, rows, narrow) if p else None
    inputs = [
        torch.randn(rows, wide),
        torch.randn(rows, narrow),
        torch.randn(narrow, wide) / wide**0.5,
        torch.randn(narrow),
        torch.randn(narrow),
        torch.randn(narrow),
    ]
    assert_equals_twin(
        lambda *x: module.residual_block(*x, 1e-5, p),
        lambda *x: module.plain(*x, 1e-5, None if kept is None else kept.to(x[0].dtype)),
        inputs,
    )
