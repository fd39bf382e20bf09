"""The look at a sample of int16 products, which stays quiet on ordinary numbers and finds a layer that int16 spoils."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from cputrain.formats import FORMATS, Int16, int16_guard, int16_sample
from cputrain.formats.int16_guard import Guard
from cputrain.formats.int16_sample import sampled_error
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
    format = FORMATS["int16"]()
    x, w = make(96, 300).requires_grad_(), make(64, 300).requires_grad_()
    linear(x, w, None, format).backward(torch.randn(96, 64))
    assert format.guard.trouble is None


def test_a_spoiled_forward_returns_to_fp32(caplog):
    format = FORMATS["int16"]()
    x, w = _spoiled()
    exact = (x.double() @ w.double().t()).float()
    first, second = (linear(x, w, None, format) for _ in range(2))
    assert "forward product" in str(format.guard.trouble) and "return to fp32" in caplog.text
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
    format = FORMATS["int16"]()
    linear(x, w, None, format).backward(dy)
    assert what in str(format.guard.trouble)


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
    format = FORMATS["int16"]()
    y = linear(x, w, None, format)
    if y.requires_grad:
        y.backward(dy)
    assert product in str(format.guard.trouble)


def _hidden_among_outliers(place):
    """Every row has a huge value; the weights ignore that of one row, which is not the largest."""
    x, w = torch.randn(WIDE, 64), torch.randn(WIDE, 64)
    x[:, 3], w[:, 4] = 6e5, 0.0
    x[place, 3], x[place, 4] = 0.0, 3e5
    return x, w


@pytest.mark.parametrize("place", [0, 1, 500, WIDE - 1])
def test_a_spoiled_vector_that_does_not_stand_out_is_found_in_time(place):
    x, w = _hidden_among_outliers(place)
    format = FORMATS["int16"]()
    for look in range(3 * WIDE // int16_sample.SPREAD):
        format.guard.forwards = look * int16_guard.LOOK_EVERY
        linear(x, w, None, format)
        if format.guard.trouble:
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
    monkeypatch.setattr(int16_guard, "sampled_error", lambda *a: looked.append(a) or (0.0, 1.0))
    format = FORMATS["int16"]()
    for _ in range(2 * int16_guard.LOOK_EVERY):
        linear(torch.randn(3, 4), torch.randn(5, 4), None, format)
    assert len(looked) == 2
    for left, right in looked:
        assert len(left) <= int16_sample.SAMPLE and len(right) <= int16_sample.SAMPLE


def test_sampled_error_is_that_of_the_kernel():
    left, right = torch.randn(16, 384), torch.randn(16, 384)
    error, tolerated = sampled_error(left, right)
    assert 1e-6 < error < tolerated / 4 and tolerated < 1e-2


def test_the_users_random_numbers_stay():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    linear(torch.ones(30, 8), torch.ones(20, 8), None, FORMATS["int16"]())
    assert torch.equal(torch.rand(1), expected)


def test_copies_know_and_pickles_forget():
    format = Int16(Guard(5, "why"))
    assert copy.deepcopy(format).guard == format.guard and copy.deepcopy(format).guard is not format.guard
    assert pickle.loads(pickle.dumps(format)) is None  # noqa: S301


def test_a_product_of_two_numbers_may_be_as_far_off_as_bf16s():
    """A gradient that one token alone has, of a token whose hidden states are small: bf16 rounds both factors."""
    left, right = torch.zeros(1, 512), torch.randn(24, 512)
    between = 1 + 2.0**-8 * 0.99  # nearly as far from bf16's numbers as can be
    left[0, 7], right[:, 7] = 2.0**-10 * between, 2.0**-3 * between
    error, limit = sampled_error(left, right)
    assert error < limit and limit > 3 * int16_sample.TOLERATED
    left[0, 8:], right[:, 7] = 1e-9, 0.0
    error, limit = sampled_error(left, right)
    assert error > limit
