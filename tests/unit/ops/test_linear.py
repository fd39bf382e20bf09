"""A linear layer in every number format."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn.functional import linear as plain

from cputrain.formats import FORMATS, int16, int16_matmul
from cputrain.formats.int16 import _Latest
from cputrain.native import workspace
from cputrain.ops.linear import linear
from tests.unit.ops.blocks import assert_equals_twin


@pytest.mark.parametrize("rows", [0, 1, 7, 65])
@pytest.mark.parametrize("out", [1, 8, 63])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_plain_twin(rows, out, biased):
    inputs = [torch.randn(rows, 65), torch.randn(out, 65), *([torch.randn(out)] if biased else [])]
    rest = [] if biased else [None]
    assert_equals_twin(lambda *x: linear(*x, *rest), lambda *x: plain(*x, *rest), inputs)


def _with_gradients(function, x, w, bias):
    x, w, bias = (t.clone().requires_grad_() for t in (x, w, bias))
    out = function(x, w, bias)
    out.square().sum().backward()
    return out, x.grad, w.grad, bias.grad


# (kind, the greatest relative error of result and gradients, and of those that nothing was rounded for)
@pytest.mark.parametrize(("kind", "limits"), [
    ("int16", (3e-4, 3e-4, 3e-4, 3e-4)),
    ("bf16_saved", (1e-6, 1e-6, 4e-3, 1e-6)),  # only what was saved is rounded: the weight's gradient alone shows it
    ("bf16", (1e-2, 1e-2, 1e-2, 1e-2)),
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_low_precision_is_as_exact_as_it_says(isa, threads, kind, limits, rows):
    x, w, bias = torch.randn(rows, 200), torch.randn(40, 200), torch.randn(40)
    exact = _with_gradients(plain, x.double(), w.double(), bias.double())
    ours = _with_gradients(lambda *a: linear(*a, FORMATS[kind]()), x, w, bias)
    for a, b, limit in zip(ours, exact, limits, strict=True):
        assert a.dtype is torch.float32
        assert ((a - b).norm() / b.norm()).item() < limit


@pytest.mark.parametrize(("part", "fewest"), [(16, 40), (16, 41), (40, 40), (64, 1)])
def test_a_vocabulary_is_multiplied_in_parts(isa, monkeypatch, part, fewest):
    """Equal to the whole, but for dx, whose sum over the vocabulary is cut into other blocks."""
    x, w, bias = torch.randn(30, 200), torch.randn(40, 200), torch.randn(40)
    whole = _with_gradients(lambda *a: linear(*a, FORMATS["int16"]()), x, w, bias)
    monkeypatch.setattr(int16, "_PART", part)
    monkeypatch.setattr(int16, "_FEWEST", fewest)
    y, dx, dw, dbias = _with_gradients(lambda *a: linear(*a, FORMATS["int16"]()), x, w, bias)
    assert torch.equal(y, whole[0]) and torch.equal(dw, whole[2]) and torch.equal(dbias, whole[3])
    torch.testing.assert_close(dx, whole[1], rtol=0, atol=3e-4 * whole[1].abs().max().item())


@pytest.mark.parametrize("kind", ["fp32", "int16", "bf16_saved"])
def test_any_number_of_threads_gives_the_same_bits(kind, threads):
    x, w, bias = torch.randn(300, 384), torch.randn(130, 384), torch.randn(130)
    found = _with_gradients(lambda *a: linear(*a, FORMATS[kind]()), x, w, bias)
    torch.set_num_threads(1)
    expected = _with_gradients(lambda *a: linear(*a, FORMATS[kind]()), x, w, bias)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["fp32", "int16", "bf16_saved", "bf16"])
def test_frozen_parts_get_no_gradient(kind):
    x, w, bias = torch.randn(5, 8), torch.randn(3, 8, requires_grad=True), torch.randn(3)
    linear(x, w, bias, FORMATS[kind]()).sum().backward()
    torch.testing.assert_close(w.grad, x.sum(0).expand(3, 8), rtol=1e-2, atol=1e-2)
    w.grad = None
    x.requires_grad_(), w.requires_grad_(False)
    linear(x, w, bias, FORMATS[kind]()).sum().backward()
    assert w.grad is None
    torch.testing.assert_close(x.grad, w.sum(0).expand(5, 8), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["fp32", "int16", "bf16_saved", "bf16"])
def test_backward_inside_autocast_is_not_touched_by_it(kind):
    """Stock's own products would become bf16 there, and kernels read floats."""
    x, w, bias = torch.randn(64, 96), torch.randn(32, 96), torch.randn(32)

    def gradients(on):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = linear(a, b, bias, FORMATS[kind]()).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out.backward()
        return a.grad, b.grad

    for with_autocast, without in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(with_autocast, without)


def test_an_input_is_packed_once_for_several_products(monkeypatch):
    """Query, key and value, frozen or not, in any order; until it changes, and only in the shape that was packed."""
    packed = []
    pack = int16_matmul.pack
    monkeypatch.setattr(int16_matmul, "pack", lambda x, **sides: (packed.append(sides), pack(x, **sides))[1])
    x = torch.randn(64, 96)
    weights = [torch.randn(96, 96, requires_grad=i > 0) for i in range(3)]

    def run():
        packed.clear()
        results = [linear(x.view(64, 96), w, None, FORMATS["int16"]()) for w in weights]
        grads = torch.autograd.grad(results[1].sum() + results[2].sum(), weights[1:])
        return [*(y.detach() for y in results), *grads]

    first = run()
    assert [set(sides) for sides in packed] == [{"rows", "columns"}, {"columns"}]
    x += 1
    second = run()
    assert len(packed) == 2 and not torch.equal(first[0], second[0])
    alone = [linear(x.clone(), w, None, FORMATS["int16"]()).detach() for w in weights]
    assert all(torch.equal(a, b) for a, b in zip(second, alone, strict=False))
    wide = linear(x.view(32, 192), torch.randn(8, 192), None, FORMATS["int16"]())
    assert wide.shape == (32, 8)


def test_the_packed_input_is_released_with_the_workspace():
    linear(torch.randn(64, 64), torch.randn(64, 64), None, FORMATS["int16"]())
    assert workspace.object_of_thread("input packed last", _Latest).known is not None
    workspace.clear()
    gc.collect()
    assert not any(isinstance(found, _Latest) for found in gc.get_objects())
