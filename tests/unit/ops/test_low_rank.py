"""Layers with adapters against float64, forward and every gradient, the dropout masks held equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cputrain.formats import FORMATS, Dense
from cputrain.ops import adapted_feed_forward, adapted_linear, low_rank
from cputrain.ops.adapted_feed_forward import Layers
from cputrain.ops.adapted_linear import Adapted
from cputrain.ops.low_rank import Adapter
from tests.accuracy import assert_as_accurate

SHAPES = [(50, 64, 96, 8), (37, 77, 131, 5), (130, 600, 40, 70), (1, 33, 31, 1), (0, 16, 24, 2)]
NAMES = ("out", "x", "bias", "A", "B")


def adapter(inputs: int, outputs: int, rank: int, p: float) -> Adapter:
    a, b = torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank)
    return Adapter(a.requires_grad_(), b.requires_grad_(), 0.7, p, 1234 + inputs if p else 0)


def as_double(layer: Adapted, leaves: list[Tensor | None]) -> Adapted:
    """On other leaves; the weight's as double."""

    class Double(Dense):
        def dense(self) -> Tensor:
            return self._w

    bias, a, b = leaves
    own = None if layer.adapter is None else layer.adapter._replace(a_RI=a, b_OR=b)
    return Adapted(Double(layer.weight.dense().to(a.dtype if a is not None else torch.float64)), bias, own)


def run(function, inputs: list[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(dy.to(out.dtype))
    return [out.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5])
def test_linear_equals_plain_twin(isa, shape, p):
    tokens, inputs, outputs, rank = shape
    layer = Adapted(Dense(torch.randn(outputs, inputs) / inputs**0.5), None, adapter(inputs, outputs, rank, p))
    operands = [torch.randn(tokens, inputs), torch.randn(outputs), layer.adapter.a_RI, layer.adapter.b_OR]
    dy = torch.randn(tokens, outputs)

    def ours(x, bias, a, b):
        return adapted_linear.adapted_linear(x, Adapted(layer.weight, bias, layer.adapter._replace(a_RI=a, b_OR=b)))

    def twin(x, *leaves):
        return adapted_linear.plain(x, as_double(layer, list(leaves)))

    exact = run(twin, [x.double() for x in operands], dy)
    assert_as_accurate(run(ours, operands, dy), run(twin, operands, dy), exact, NAMES, floor=1e-6)


@pytest.mark.parametrize("format", ["fp32", "int16"])
@pytest.mark.parametrize("without", [None, 0, 1, 2])
def test_feed_forward_equals_plain_twin(isa, format, without):
    tokens, hidden, middle = 70, 96, 160
    sizes = ((hidden, middle), (hidden, middle), (middle, hidden))
    layers = Layers(*(
        Adapted(Dense(torch.randn(o, i) / i**0.5), torch.randn(o), adapter(i, o, 8, 0.3) if n != without else None)
        for n, (i, o) in enumerate(sizes)
    ))  # fmt: skip
    operands, dy = [torch.randn(tokens, hidden), *layers.tensors()], torch.randn(tokens, hidden)

    def ours(x, *leaves):
        own = (Adapted(layer.weight, b, layer.adapter and layer.adapter._replace(a_RI=a, b_OR=bb))
               for layer, (b, a, bb) in zip(layers, zip(*[iter(leaves)] * 3, strict=True), strict=True))  # fmt: skip
        return adapted_feed_forward.adapted_feed_forward(x, Layers(*own), "silu", FORMATS[format]())

    def twin(x, *leaves):
        own = (as_double(layer, list(leaves[3 * i : 3 * i + 3])) for i, layer in enumerate(layers))
        return adapted_feed_forward.plain(x, Layers(*own), "silu")

    exact = run(twin, [None if x is None else x.double() for x in operands], dy)
    for found, truth in zip(run(ours, operands, dy), exact, strict=True):
        assert (found is None) == (truth is None)
        if truth is not None:
            assert ((found - truth).norm() / truth.norm()).item() < {"fp32": 3e-6, "int16": 1e-3}[format]


def test_any_number_of_threads_gives_the_same_bits(isa, threads):
    layer = Adapted(Dense(torch.randn(96, 600)), None, adapter(600, 96, 16, 0.1))
    x, dy = torch.randn(300, 600), torch.randn(300, 96)

    def all_of(count: int) -> list[Tensor | None]:
        torch.set_num_threads(count)
        t = low_rank.down(x, layer.adapter)
        dx = torch.ones(300, 600)
        with torch.no_grad():
            return [t, dx, *low_rank.backward(dy, x, t, layer.adapter, dx, (True, False))]

    with torch.no_grad():
        pairs = zip(all_of(threads), all_of(1), strict=True)
    assert all(a is b or torch.equal(a, b) for a, b in pairs)


def test_adapters_of_half_precision_get_gradients_of_theirs():
    own = adapter(64, 96, 8, 0.0)
    own = own._replace(a_RI=own.a_RI.detach().bfloat16().requires_grad_())
    own = own._replace(b_OR=own.b_OR.detach().bfloat16().requires_grad_())
    y = adapted_linear.adapted_linear(torch.randn(9, 64), Adapted(Dense(torch.randn(96, 64)), None, own))
    y.sum().backward()
    assert own.a_RI.grad.dtype == own.b_OR.grad.dtype == torch.bfloat16


def test_keeps_only_the_input_and_the_narrow_product():
    kept: list[Tensor] = []
    layer = Adapted(Dense(torch.randn(96, 64)), None, adapter(64, 96, 8, 0.3))
    x = torch.randn(50, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        adapted_linear.adapted_linear(x, layer)
    own = {t.untyped_storage().data_ptr() for t in (x, layer.adapter.a_RI, layer.adapter.b_OR)}
    assert [t.shape for t in kept if t.untyped_storage().data_ptr() not in own] == [(50, 8)]


def test_an_adapter_of_another_size_is_refused():
    weight = Dense(torch.randn(96, 64))
    for a, b in (((8, 65), (96, 8)), ((8, 64), (95, 8)), ((8, 64), (96, 7))):
        layer = Adapted(weight, None, Adapter(torch.randn(a), torch.randn(b), 1.0))
        with pytest.raises(ValueError, match="an adapter of a layer 96 × 64 must have A of rank × 64"):
            adapted_linear.adapted_linear(torch.randn(9, 64), layer)
