"""A vocabulary head over real tokens: as a product and a scatter, without a second tensor of the logits' size."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cputrain.formats import FORMATS
from cputrain.formats.int16_guard import Watch
from cputrain.ops import padded_linear as module
from cputrain.ops.padded_linear import padded_linear, plain
from tests.unit.ops.blocks import assert_equals_twin

PLACE = torch.tensor([0, 1, 2, 5, 6, 9, 10, 11])  # of 15 positions: right, left and no padding, and a gap


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """256 columns at a time, so that few hundred are several blocks."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)


@pytest.mark.parametrize("out", [1, 256, 700])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_plain_twin(out, biased):
    inputs = [torch.randn(8, 65), torch.randn(out, 65), *([torch.randn(out)] if biased else [])]
    rest = (PLACE, 15) if biased else (None, PLACE, 15)
    assert_equals_twin(lambda *x: padded_linear(*x, *rest), lambda *x: plain(*x, *rest), inputs)


def _with_gradients(function, dtype, *inputs):
    inputs = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
    out = function(*inputs)
    out.square().sum().backward()
    return out, *(t.grad for t in inputs)


@pytest.mark.parametrize(("kind", "limit"), [("int16", 3e-4), ("bf16_saved", 4e-3), ("bf16", 1e-2)])
def test_low_precision_is_as_exact_as_that_of_a_linear_layer(kind, limit):
    inputs = torch.randn(8, 200), torch.randn(600, 200), torch.randn(600)
    exact = _with_gradients(lambda *x: plain(*x, PLACE, 15), torch.float64, *inputs)
    ours = _with_gradients(lambda *x: padded_linear(*x, PLACE, 15, FORMATS[kind]()), torch.float32, *inputs)
    for a, b in zip(ours, exact, strict=True):
        assert ((a - b).norm() / b.norm()).item() < limit


@pytest.mark.parametrize("kind", ["fp32", "int16", "bf16"])
def test_frozen_parts_get_no_gradient(kind):
    x, w, bias = torch.randn(8, 32), torch.randn(600, 32, requires_grad=True), torch.randn(600)
    padded_linear(x, w, bias, PLACE, 15, FORMATS[kind]()).sum().backward()
    torch.testing.assert_close(w.grad, x.sum(0).expand(600, 32), rtol=1e-2, atol=1e-2)
    assert x.grad is None and bias.grad is None


def test_a_gradient_at_padded_positions_goes_nowhere():
    x, w = torch.randn(8, 32, requires_grad=True), torch.randn(600, 32, requires_grad=True)
    at_padding = torch.ones(15, 600).index_fill_(0, PLACE, 0.0)
    padded_linear(x, w, None, PLACE, 15).backward(at_padding)
    assert not x.grad.any() and not w.grad.any()


@pytest.mark.parametrize("kind", ["fp32", "int16"])
def test_the_logits_exist_once(kind):
    """Of all that forward and backward allocate, nothing but the logits is as large as half of them."""
    x, w = torch.randn(800, 16, requires_grad=True), torch.randn(4096, 16, requires_grad=True)
    place, half = torch.arange(800), 800 * 4096 * 4 // 2
    gradient = torch.ones(1, 1).expand(1000, 4096)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        padded_linear(x, w, None, place, 1000, FORMATS[kind]()).backward(gradient)
    sizes = [event.cpu_memory_usage for event in trace.events() if event.name == "[memory]"]
    own = [event.self_cpu_memory_usage for event in trace.events() if event.name != "[memory]"]
    large = [size for size in (*sizes, *own) if size > half]
    assert large == [1000 * 4096 * 4]


@pytest.mark.parametrize("tokens", [7, 8])
def test_one_block_is_looked_at(monkeypatch, tokens):
    """However many there are: a look may send the layer back to fp32, and each is a chance to be wrong."""
    seen = []
    monkeypatch.setattr(Watch, "_look", lambda self, what, *sides: seen.append(what))
    x, w = torch.randn(tokens, 32, requires_grad=True), torch.randn(600, 32, requires_grad=True)
    padded_linear(x, w, None, PLACE[:tokens], 15, FORMATS["int16"]()).sum().backward()
    assert seen == ["a forward product", "an input gradient", "a weight gradient"]
