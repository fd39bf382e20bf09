"""The look at a sample of int16 products, which stays quiet on ordinary numbers and finds a layer that int16 spoils;
and what is kept in bf16."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from cputrain.ops import arithmetic as module
from cputrain.ops import int16_sample
from cputrain.ops.arithmetic import Arithmetic, kept_as_float, rounded, sampled_error
from cputrain.ops.layer_norm import layer_norm_forward
from cputrain.ops.linear import linear


def _spoiled(rows=64, features=128, out=48):
    """One huge feature that no weight listens to: int16 rounds all others to its unit, bf16 each by itself."""
    x, w = torch.randn(rows, features), torch.randn(out, features)
    x[:, 3], w[:, 3] = 3e5, 0.0
    return x, w


_ORDINARY = [
    lambda *s: torch.randn(s),
    lambda *s: torch.randn(s).exp(),
    lambda *s: torch.randn(s) * 10.0 ** torch.randn(s[0], 1),
    lambda *s: (torch.rand(s) > 0.9).float(),
    lambda *s: torch.zeros(s),
    lambda *s: torch.full(s, 1e-30),
    lambda *s: torch.randn(s) ** 5,
]


@pytest.mark.parametrize("make", _ORDINARY)
def test_ordinary_numbers_give_no_trouble(make):
    arithmetic = Arithmetic("int16")
    x, w = make(96, 300).requires_grad_(), make(64, 300).requires_grad_()
    linear(x, w, None, arithmetic).backward(torch.randn(96, 64))
    assert arithmetic.trouble is None


def test_a_spoiled_forward_returns_to_fp32(caplog):
    arithmetic = Arithmetic("int16")
    x, w = _spoiled()
    exact = (x.double() @ w.double().t()).float()
    first, second = (linear(x, w, None, arithmetic) for _ in range(2))
    assert "forward product" in str(arithmetic.trouble) and "return to fp32" in caplog.text
    assert (first - exact).norm() > 100 * (second - exact).norm()
    torch.testing.assert_close(second, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("what", "gradient_of"), [("input gradient", "x"), ("weight gradient", "w")])
def test_spoiled_gradients_are_found_too(what, gradient_of):
    x, w, dy = torch.randn(64, 40), torch.randn(48, 40), torch.randn(64, 48)
    if gradient_of == "x":  # sums over out-features
        dy[:, 5], w[5] = 3e5, 0.0
    else:  # sums over tokens
        dy[5], x[5] = 3e5, 0.0
    x.requires_grad_(gradient_of == "x"), w.requires_grad_(gradient_of == "w")
    arithmetic = Arithmetic("int16")
    linear(x, w, None, arithmetic).backward(dy)
    assert what in str(arithmetic.trouble)


WIDE = 1024  # of most models, the width is a multiple of the sample's size


def _outlier(product, side):
    """x, w and dy of which one vector of one product, at position 0, has a huge value that the other side ignores."""
    # No value is near 0: where the outlier met one in another product, that product would be spoiled as well.
    x, w, dy = (torch.randn(WIDE, WIDE).sign() * (torch.rand(WIDE, WIDE) + 0.5) for _ in range(3))
    left, right = {"forward product": (x, w), "input gradient": (dy, w.t()), "weight gradient": (dy.t(), x.t())}[
        product
    ]
    spoiled, other = (left, right) if side == "left" else (right, left)
    spoiled[0, 5], other[:, 5] = 3e5, 0.0
    return x, w, dy


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("product", ["forward product", "input gradient", "weight gradient"])
def test_one_spoiled_vector_among_many_is_found_at_once(product, side):
    x, w, dy = _outlier(product, side)
    x.requires_grad_(product == "input gradient"), w.requires_grad_(product == "weight gradient")
    arithmetic = Arithmetic("int16")
    y = linear(x, w, None, arithmetic)
    if y.requires_grad:
        y.backward(dy)
    assert product in str(arithmetic.trouble)


def _hidden_among_outliers(place):
    """Every row has a huge value; the weights ignore that of one row, which is not the largest."""
    x, w = torch.randn(WIDE, 64), torch.randn(WIDE, 64)
    x[:, 3], w[:, 4] = 6e5, 0.0
    x[place, 3], x[place, 4] = 0.0, 3e5
    return x, w


@pytest.mark.parametrize("place", [0, 1, 500, WIDE - 1])
def test_a_spoiled_vector_that_does_not_stand_out_is_found_in_time(place):
    x, w = _hidden_among_outliers(place)
    arithmetic = Arithmetic("int16")
    for look in range(3 * WIDE // int16_sample.SPREAD):
        arithmetic.forwards = look * module.LOOK_EVERY
        linear(x, w, None, arithmetic)
        if arithmetic.trouble:
            return
    raise AssertionError("not found")


@pytest.mark.parametrize("count", [17, 300, 512, 768, 1024, 2048])
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_place_has_its_look(count, side):
    seen = [int16_sample._spread(count, look, side) for look in range(3 * count // int16_sample.SPREAD + 3)]
    assert set(torch.cat(seen).tolist()) == set(range(count))
    assert all(len(places.unique()) > int16_sample.SPREAD // 2 for places in seen)


def test_a_vector_is_judged_by_itself():
    """A row with huge results, which int16 computes well, doesn't hide that another is spoiled."""
    x, w = torch.randn(20, 64), torch.randn(20, 64)
    x[7] *= 1e9
    w[:, 3], x[4, 3] = 0.0, 3e5
    error, bound = sampled_error(x, w)
    assert error > 0.1 > bound


def test_what_no_format_can_compute_is_not_judged():
    x, w = torch.randn(20, 64), torch.randn(20, 64)
    x[3], x[4], x[5], x[6], x[7] = torch.nan, torch.inf, 0.0, 1e-40, 3e38
    error, bound = sampled_error(x, w)
    assert 1e-6 < error < bound
    assert sampled_error(torch.zeros(4, 8), torch.zeros(4, 8))[0] == 0
    places = int16_sample._outliers(x.fill_(torch.nan), 1)
    assert len(places) == 2 * int16_sample.OUTLIERS


def test_looks_only_now_and_then(monkeypatch):
    looked = []
    monkeypatch.setattr(module, "sampled_error", lambda *a: looked.append(a) or (0.0, 1.0))
    arithmetic = Arithmetic("int16")
    for _ in range(2 * module.LOOK_EVERY):
        linear(torch.randn(3, 4), torch.randn(5, 4), None, arithmetic)
    assert len(looked) == 2
    for left, right in looked:
        assert len(left) <= module.SAMPLE and len(right) <= module.SAMPLE


def test_sampled_error_is_that_of_the_kernel():
    left, right = torch.randn(16, 384), torch.randn(16, 384)
    error, tolerated = sampled_error(left, right)
    assert 1e-6 < error < tolerated / 4 and tolerated < 1e-2


def test_the_users_random_numbers_stay():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    linear(torch.ones(30, 8), torch.ones(20, 8), None, Arithmetic("int16"))
    assert torch.equal(torch.rand(1), expected)


def test_copies_know_and_pickles_forget():
    arithmetic = Arithmetic("int16", 5, "why")
    assert copy.deepcopy(arithmetic) == arithmetic
    assert pickle.loads(pickle.dumps(arithmetic)) is None  # noqa: S301


def test_what_two_operators_keep_is_kept_once():
    call, x = Arithmetic("bf16").begin(), torch.randn(6, 8)
    kept, _ = call.keep(x)
    assert call.keep(x.view(2, 3, 8))[0].data_ptr() == kept.data_ptr()
    x.add_(1)  # a change must not go unnoticed
    other = torch.randn(6, 8)
    for y in (x, x.view(3, 16), other, other.t(), other[:3]):
        assert torch.equal(call.keep(y)[0], y.bfloat16())
        assert torch.equal(kept_as_float(call.keep(y)), y.bfloat16().float())


@pytest.mark.parametrize("with_weight", [True, False])
def test_a_norms_result_is_kept_as_its_backward_keeps_it(isa, threads, with_weight):
    """And read again within what rounding the normalised values costs; products in bf16 get the result itself."""
    for rows, features in ((1, 1), (7, 63), (65, 65), (300, 130)):
        x = torch.randn(rows, features)
        weight, bias = torch.randn(2, features) if with_weight else (None, None)
        out, _, _, normed = layer_norm_forward(x, weight, bias, 1e-5, torch.bfloat16)
        kept = Arithmetic("bf16").begin().keep(out)
        assert kept[0].data_ptr() == normed.data_ptr()
        size = (out if bias is None else out - bias).abs()
        assert ((kept_as_float(kept) - out).abs() <= size / 256 + 1e-6).all()
        (operand,) = Arithmetic("native_bf16").begin().keep(out)
        assert torch.equal(operand, out.bfloat16())
        if weight is not None:  # a copy: the parameter may change or be gone by then
            before = kept_as_float(kept).clone()
            weight.zero_()
            assert torch.equal(kept_as_float(kept), before)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "native_bf16"])
def test_what_is_kept_has_one_form(kind):
    """A checkpoint that runs the forward again finds other neighbours, and must find as many tensors, of one kind."""
    out = layer_norm_forward(torch.randn(6, 8), None, None, 1e-5, Arithmetic(kind).storage)[0]
    after_norm, alone = Arithmetic(kind).begin().keep(out), Arithmetic(kind).begin().keep(out.clone())
    assert [(t.shape, t.dtype) for t in after_norm] == [(t.shape, t.dtype) for t in alone]


def test_keeping_holds_no_graph():
    x = torch.randn(4, 4, requires_grad=True)
    y = (x * 2).contiguous()
    Arithmetic("bf16").begin().keep(y)
    assert module._last.source is not None and module._last.source.grad_fn is None


@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (65, 65), (300, 130), (0, 8), (3, 0)])
def test_rounded_with_its_bias(isa, threads, shape):
    x, bias = torch.randn(shape), torch.randn(shape[1])
    if x.numel() > 10:
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-40])
    for given in (None, bias):
        expected = (x if given is None else x + given).bfloat16()
        torch.testing.assert_close(rounded(x, given), expected, rtol=0, atol=0, equal_nan=True)
