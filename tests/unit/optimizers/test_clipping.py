"""clip_grad_norm_: stock's result and gradients, and stock itself where the kernels don't serve."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cputrain.optimizers import clipping
from cputrain.optimizers.clipping import clip_grad_norm_
from tests.unit.optimizers.runs import give_gradients, parameters

stock = clipping._stock


@pytest.fixture
def no_stock(monkeypatch):
    """Fails the test if stock's function is asked."""
    monkeypatch.setattr(clipping, "_stock", lambda *args: pytest.fail("stock's clip_grad_norm_ was called"))


def grads_of(group):
    return [parameter.grad.clone() for parameter in group if parameter.grad is not None]


@pytest.mark.parametrize("max_norm", [1.0, 0.01, 1e9, 0.0])
def test_equals_stock(isa, threads, max_norm, no_stock):
    ours, theirs = parameters(), parameters()
    give_gradients(0, ours)
    give_gradients(0, theirs)
    ours[2].grad = theirs[2].grad = None
    exact = math.sqrt(sum(grad.double().square().sum().item() for grad in grads_of(ours)))
    norm, stock_norm = clip_grad_norm_(ours, max_norm), stock(theirs, max_norm)
    assert (norm.dtype, norm.shape, norm.device) == (stock_norm.dtype, stock_norm.shape, stock_norm.device)
    assert abs(norm.item() - exact) <= max(2 * abs(stock_norm.item() - exact), 6e-8 * exact)
    for our, their in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=0)


def test_same_for_every_number_of_threads(isa):
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        group = parameters()
        give_gradients(0, group)
        found.append((clip_grad_norm_(group, 0.5), grads_of(group)))
    torch.set_num_threads(before)
    for norm, grads in found[1:]:
        assert torch.equal(norm, found[0][0])
        assert all(map(torch.equal, grads, found[0][1]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 37, 40])
def test_not_finite(isa, value, place):
    groups = [[nn.Parameter(torch.zeros(41))] for _ in range(2)]
    for group in groups:
        group[0].grad = torch.ones(41)
        group[0].grad[place] = value
    norm, stock_norm = clip_grad_norm_(groups[0], 1.0), stock(groups[1], 1.0)
    torch.testing.assert_close(norm, stock_norm, equal_nan=True)
    torch.testing.assert_close(groups[0][0].grad, groups[1][0].grad, equal_nan=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(groups[0], 1.0, error_if_nonfinite=True)


def test_huge_and_tiny_gradients_keep_their_norm(isa):
    """Their squares don't fit a float32; they do fit the double that is summed."""
    for value in (1e30, 1e-30):
        parameter = nn.Parameter(torch.zeros(100))
        parameter.grad = torch.full((100,), value)
        torch.testing.assert_close(clip_grad_norm_(parameter, 1.0).item(), 10 * value, rtol=1e-6, atol=0)


def test_arguments_as_stock(no_stock):
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    norm = clip_grad_norm_(layer.parameters(), 100.0, foreach=True)  # a generator
    assert norm == clip_grad_norm_(tuple(layer.parameters()), max_norm=torch.tensor(100), norm_type=2, foreach=False)
    assert clip_grad_norm_(layer.bias, 5).item() == pytest.approx(math.sqrt(2))  # one tensor


@pytest.mark.parametrize("norm_type", [1.0, math.inf, "inf", 3])
def test_other_norms_are_stocks(norm_type):
    groups = [parameters(), parameters()]
    for group in groups:
        give_gradients(0, group)
    groups = [[p for p in group if p.numel()] for group in groups]
    assert torch.equal(clip_grad_norm_(groups[0], 0.3, norm_type), stock(groups[1], 0.3, norm_type))
    assert all(map(torch.equal, grads_of(groups[0]), grads_of(groups[1])))


def test_gradients_that_the_kernels_dont_serve():
    def make():
        generator = torch.Generator().manual_seed(0)
        half = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        half.grad = torch.randn(5, generator=generator).bfloat16()
        plain = nn.Parameter(torch.zeros(6))
        plain.grad = torch.randn(6, generator=generator)
        return [half, plain]

    ours, theirs = make(), make()
    assert torch.equal(clip_grad_norm_(ours, 0.1), stock(theirs, 0.1))
    assert all(map(torch.equal, grads_of(ours), grads_of(theirs)))


def test_the_same_parameter_twice_is_counted_as_stock_does():
    groups = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for parameter in groups:
        parameter.grad = torch.ones(3)
    assert torch.equal(clip_grad_norm_([groups[0]] * 2, 1.0), stock([groups[1]] * 2, 1.0))
    assert torch.equal(groups[0].grad, groups[1].grad)


def test_channels_last_gradients(isa, no_stock):
    convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    convolution(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    assert not convolution.weight.grad.is_contiguous()
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in convolution.parameters()))
    assert clip_grad_norm_(convolution.parameters(), 1e9).item() == pytest.approx(exact, rel=1e-6)


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0).item() == 0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)


def test_autograd_sees_the_scaling():
    parameter = nn.Parameter(torch.ones(3))
    (parameter**2).sum().backward(create_graph=True)
    doubled = parameter.grad.square().sum()
    clip_grad_norm_(parameter, 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doubled.backward()


@pytest.fixture
def nothing_installed(monkeypatch):
    """Models of other tests may still be alive, and hold ours in its place."""
    monkeypatch.setattr(clipping, "_installed", 0)
    for home in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(home, "clip_grad_norm_", stock)


def test_installing_is_counted(nothing_installed):
    homes = [torch.nn.utils, torch.nn.utils.clip_grad]
    clipping.install()
    clipping.install()
    clipping.uninstall()
    assert all(home.clip_grad_norm_ is clip_grad_norm_ for home in homes)
    clipping.uninstall()
    assert all(home.clip_grad_norm_ is stock for home in homes)
    clipping.uninstall()  # once too often
    clipping.install()
    assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
    clipping.uninstall()
    assert torch.nn.utils.clip_grad_norm_ is stock


def test_another_replacement_is_left_in_place(monkeypatch, nothing_installed):
    clipping.install()
    other = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", other)
    clipping.uninstall()
    assert torch.nn.utils.clip_grad_norm_ is other
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", stock)


def test_accelerate_clips_through_it(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    seen = []
    monkeypatch.setattr(clipping, "_norm", lambda grads: seen.append(len(grads)) or 1.0)
    clipping.install()
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    accelerate.Accelerator(cpu=True).clip_grad_norm_(layer.parameters(), 1.0)
    clipping.uninstall()
    assert seen == [2]
