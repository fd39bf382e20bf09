"""The gated feed-forward of language models: forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from cputrain.formats import FORMATS
from cputrain.ops import gated_feed_forward as module
from tests.unit.ops.blocks import assert_equals_twin

NAMES = ("x", "gate", "gate_bias", "up", "up_bias", "down", "down_bias")


def _inputs(rows: int, hidden: int, middle: int, bias: bool = True) -> list[torch.Tensor | None]:
    def weight(out: int, features: int) -> list[torch.Tensor | None]:
        return [torch.randn(out, features) / features**0.5, torch.randn(out) if bias else None]

    return [torch.randn(rows, hidden), *weight(middle, hidden), *weight(middle, hidden), *weight(hidden, middle)]


@pytest.mark.parametrize("rows", [1, 7, 65])
@pytest.mark.parametrize("hidden, middle", [(8, 63), (65, 7), (96, 384)])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_plain_twin(isa, rows, hidden, middle, kind, bias):
    inputs = _inputs(rows, hidden, middle, bias)
    assert_equals_twin(lambda *x: module.gated_feed_forward(*x, kind), lambda *x: module.plain(*x, kind), inputs)


def _run(inputs, frozen, format):
    leaves = [None if t is None else t.clone().requires_grad_(i not in frozen) for i, t in enumerate(inputs)]
    y = module.gated_feed_forward(*leaves, "silu", FORMATS[format]())
    (y * torch.linspace(-1, 1, y.shape[1])).sum().backward()
    return [y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def _exact(inputs):
    leaves = [t.double().requires_grad_() for t in inputs]
    y = module.plain(*leaves, "silu")
    (y * torch.linspace(-1, 1, y.shape[1], dtype=torch.float64)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("frozen", [(), (0,), (1, 3, 5), (1, 2), (3, 4), (5, 6), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("format", ["fp32", "int16"])
def test_frozen_parts_get_no_gradient(frozen, format):
    inputs = _inputs(130, 96, 160)
    for i, (ours, exact) in enumerate(zip(_run(inputs, frozen, format), _exact(inputs), strict=True)):
        assert (ours is None) == (i - 1 in frozen)
        if ours is not None:
            assert ((ours - exact).norm() / exact.norm()).item() < 1e-3, i


def test_same_bits_with_any_number_of_threads(isa, threads):
    inputs = _inputs(150, 96, 250)
    ours = _run(inputs, (), "int16")
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(ours, _run(inputs, (), "int16"), strict=True))


@pytest.mark.parametrize(
    "format, dtype, width, columns", [("fp32", torch.float32, 96, 0), ("int16", torch.int16, 132, 1)]
)
def test_keeps_only_the_input_and_the_first_products(format, dtype, width, columns):
    kept: list[torch.Tensor] = []
    inputs = [t.requires_grad_() for t in _inputs(64, 32, 96)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module.gated_feed_forward(*inputs, "silu", FORMATS[format]())
    own = {t.untyped_storage().data_ptr() for t in inputs}
    fresh = [t for t in kept if t.untyped_storage().data_ptr() not in own]
    assert [t.shape for t in fresh if t.dtype == dtype and t.dim() == 2] == [(64, width), (64, width)]
    assert len(fresh) == 2 + columns


def test_wrong_shapes_are_refused():
    inputs = _inputs(3, 8, 16)
    for place, wrong in ((0, torch.randn(3, 9)), (3, torch.randn(15, 8)), (5, torch.randn(8, 15)), (6, torch.randn(7))):
        broken = list(inputs)
        broken[place] = wrong
        with pytest.raises(ValueError, match="gated_feed_forward"):
            module.gated_feed_forward(*broken, "silu")
