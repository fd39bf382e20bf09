"""When a layer that int16 spoils returns to fp32: between steps, never between a forward and its repetition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cputrain.formats import FORMATS
from cputrain.formats import int16_guard as module
from cputrain.formats.int16_guard import Guard
from cputrain.ops.linear import linear

_KINDS = {True: "int16", False: "fp32"}


def _kind(call):
    return _KINDS[call.watch.is_int16]


class Layer:
    """A linear layer whose input has a huge feature, which its weight ignores if it is `spoiled`."""

    def __init__(self, spoiled="forward product"):
        self.format = FORMATS["int16"]()
        self.kinds = []  # of its forwards, those that a checkpoint repeats included
        self.x, self.w = torch.randn(32, 64), torch.randn(48, 64)
        self.dy = torch.randn(32, 48)
        if spoiled == "forward product":
            self.x[:, 3], self.w[:, 3] = 3e5, 0.0
        elif spoiled == "weight gradient":
            self.dy[3], self.x[3] = 3e5, 0.0
        self.x.requires_grad_(), self.w.requires_grad_()

    def forward(self, reentrant=None):
        if reentrant is None:
            return self._run(self.x, self.w)
        return checkpoint(self._run, self.x, self.w, use_reentrant=reentrant)

    def _run(self, x, w):
        y = linear(x, w, None, self.format)
        grad_fn = y.grad_fn
        self.kinds.append(_kind(grad_fn.call) if grad_fn is not None else _KINDS[not self.format.guard.returned])
        return y

    def step(self, reentrant=None):
        self.forward(reentrant).backward(self.dy)


@pytest.fixture(params=[None, True, False], ids=["no checkpoint", "reentrant", "not reentrant"])
def reentrant(request):
    return request.param


@pytest.mark.parametrize("spoiled", ["forward product", "weight gradient"])
def test_the_step_after_the_one_that_found_it_is_fp32(reentrant, spoiled):
    layer = Layer(spoiled)
    layer.step(reentrant)
    assert spoiled in str(layer.format.guard.trouble) and set(layer.kinds) == {"int16"}
    layer.kinds.clear()
    layer.step(reentrant)
    assert set(layer.kinds) == {"fp32"}


def test_several_forwards_before_one_backward(reentrant):
    layer = Layer()
    sum(layer.forward(reentrant) for _ in range(3)).backward(layer.dy)
    if reentrant is not True:  # there the first forward leaves no graph; its repetition may be in either kind
        assert set(layer.kinds) == {"int16"}
    layer.kinds.clear()
    layer.step(reentrant)
    assert set(layer.kinds) == {"fp32"}


def test_a_checkpoint_that_waits_is_not_forgotten():
    """Backwards in the order of the forwards, and forwards between them, as in pipelines."""
    layer = Layer()
    first, second = (layer.forward(reentrant=False) for _ in range(2))
    first.backward(layer.dy)
    third = layer.forward(reentrant=False)
    second.backward(layer.dy)
    third.backward(layer.dy)
    assert set(layer.kinds) == {"int16"}
    assert _kind(layer.forward().grad_fn.call) == "fp32"


def test_a_graph_that_nobody_uses_holds_nothing_up():
    layer = Layer()
    unused = layer.forward()
    layer.step()
    layer.kinds.clear()
    layer.step()
    assert layer.kinds == ["fp32"] and unused.requires_grad


def test_evaluation_needs_no_backward():
    layer = Layer()
    with torch.no_grad():
        first, second = (layer.forward() for _ in range(2))
    exact = layer.x.detach().double() @ layer.w.detach().double().t()
    assert (first - exact).norm() > 100 * (second - exact).norm()


def test_tensors_that_are_kept_elsewhere():
    """Hooks as torch's save_on_cpu has them."""
    layer = Layer()
    for _ in range(2):
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            y = layer.forward()
        y.backward(layer.dy)
    assert layer.kinds == ["int16", "fp32"]


def test_a_copy_returns_by_itself():
    layer = Layer()
    y = layer.forward(reentrant=False)
    twin = copy.deepcopy(layer.format)
    assert (_kind(twin.begin()), _kind(layer.format.begin())) == ("fp32", "int16")
    y.backward(layer.dy)


def test_repetitions_neither_count_nor_look(reentrant, monkeypatch):
    """A checkpointed training looks as often as another one, at the same three products."""
    looks = []
    judge = Guard.judge
    monkeypatch.setattr(Guard, "judge", lambda self, what, *of: looks.append(what) or judge(self, what, *of))
    monkeypatch.setattr(module, "LOOK_EVERY", 3)
    layer = Layer(spoiled="")
    for _ in range(6):
        layer.step(reentrant)
    assert layer.format.guard.forwards == 6
    assert looks == ["a forward product", "an input gradient", "a weight gradient"] * 2


def test_gradients_are_looked_at_although_an_evaluation_had_the_look(monkeypatch):
    looks = []
    monkeypatch.setattr(Guard, "judge", lambda self, what, *of: looks.append(what))
    layer = Layer(spoiled="")
    with torch.no_grad():
        layer.forward()
    for _ in range(3):
        layer.step()
    assert looks == ["a forward product", "an input gradient", "a weight gradient"]
