"""Modules that have the parts of one that is fused but compute something else are left alone: they are asked."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cputrain

TEMPERATURE = 1.0


def half(x: Tensor) -> Tensor:
    return x / 2


def tempered(x: Tensor) -> Tensor:
    return x * TEMPERATURE


class Block(nn.Module):
    """The parts of a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = nn.Linear(16, 16), nn.Dropout(0.1), nn.LayerNorm(16)


class FeedForward(nn.Module):
    """The parts of a feed-forward, and attributes that change nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.dropout = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1)
        self.temperature, self.rate, self.calls = 1.0, 0.0, 0


class Bare(nn.Module):
    """A feed-forward without a dropout layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.rate = 0.3


class GradientHalved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / 2


def made(base: type, forward: Callable, **parts: object) -> nn.Module:
    """A module of a class of its own with this forward, and with these parts beside those of `base`."""
    module = type(f"{base.__name__}OfATest", (base,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def what_runs(model: nn.Module) -> str:
    """What was put in the place of the module as a whole."""
    rows = cputrain.explain(cputrain.optimize(model)).modules
    return next(how for where, _, how in rows if where == "(the model)" and not how.startswith("left alone"))


def reason(model: nn.Module) -> str:
    """Why the module as a whole was left alone."""
    rows = cputrain.explain(cputrain.optimize(model)).modules
    return next(how for where, _, how in rows if where == "(the model)" and how.startswith("left alone"))


@pytest.mark.parametrize(
    ("forward", "fused"),
    [
        (lambda self, x, r: self.LayerNorm(r + self.dropout(self.dense(x))), True),
        (lambda self, x, r: self.LayerNorm(self.dropout(self.dense(x)) + r), True),
        (lambda self, x, r: self.LayerNorm(r + self.dense(self.dropout(x))), False),
        (lambda self, x, r: self.dropout(self.LayerNorm(r + self.dense(x))), False),
        (lambda self, x, r: self.LayerNorm(self.dropout(r + self.dense(x))), False),
        (lambda self, x, r: self.LayerNorm(r + self.dense(x)), False),
        (lambda self, x, r: r + self.dropout(self.dense(self.LayerNorm(x))), False),
        (lambda self, x, r: self.LayerNorm(2 * r + self.dropout(self.dense(x))), False),
        (lambda self, x, r: self.LayerNorm(x + self.dropout(self.dense(r))), False),
        (lambda self, x, r: self.LayerNorm(r + self.dropout(self.dropout(self.dense(x)))), False),
        (lambda self, x, r: self.LayerNorm(r.detach() + self.dropout(self.dense(x))), False),
        (lambda self, x, r: self.LayerNorm(r.add_(self.dropout(self.dense(x)))), False),
    ],
)
def test_residual_blocks(forward, fused: bool) -> None:
    assert what_runs(made(Block, forward)).startswith("linear + dropout + residual" if fused else "as stock")


@pytest.mark.parametrize(
    ("forward", "fused"),
    [
        (lambda self, x: self.dropout(self.down(self.act(self.up(x)))), True),
        (lambda self, x: self.down(self.dropout(self.act(self.up(x)))), False),
        (lambda self, x: self.down(self.act(self.up(x))), False),
        (lambda self, x: x + self.dropout(self.down(self.act(self.up(x)))), False),
        (lambda self, x: self.dropout(self.down(self.up(x))), False),
    ],
)
def test_feed_forwards(forward, fused: bool) -> None:
    assert what_runs(made(FeedForward, forward)).startswith("linear + activation + linear" if fused else "as stock")


class Calls(Bare):
    """Its forward is spread over methods."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def first(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))

    def second(self, x: Tensor) -> Tensor:
        return self.down(x)


class CallsATemperature(Calls):
    temperature = 1.0

    def second(self, x: Tensor) -> Tensor:
        return self.down(x) * self.temperature


class CallsItsParent(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_forward_may_be_spread_over_methods() -> None:
    assert what_runs(Calls()).startswith("linear + activation + linear")


UNLIKE = {
    "functional dropout in training": lambda self, x: F.dropout(self.down(self.act(self.up(x))), 0.3, self.training),
    "functional dropout of a rate of 0": lambda self, x: F.dropout(self.down(self.act(self.up(x))), 0.0, self.training),
    "functional dropout in evaluation too": lambda self, x: F.dropout(self.down(self.act(self.up(x))), 0.3),
    "dropout of torch's own name": lambda self, x: torch.dropout(self.down(self.act(self.up(x))), 0.3, self.training),
    "noise in training": lambda self, x: (
        self.down(self.act(self.up(x))) + (torch.randn_like(x) if self.training else 0)
    ),
    "noise of numpy": lambda self, x: self.down(self.act(self.up(x))) * (1 + 1e-9 * numpy.random.rand()),
    "noise of Python": lambda self, x: self.down(self.act(self.up(x))) * (1 + 1e-9 * random.random()),
    "twice as much in training": lambda self, x: self.down(self.act(self.up(x))) * (2 if self.training else 1),
    "a detached input": lambda self, x: self.down(self.act(self.up(x.detach()))),
    "a detached middle": lambda self, x: self.down(self.act(self.up(x)).detach()),
    "a detached result beside itself": lambda self, x: (
        self.down(self.act(self.up(x))) * 2 - self.down(self.act(self.up(x))).detach()
    ),
    "a frozen weight": lambda self, x: F.linear(self.act(self.up(x)), self.down.weight.detach(), self.down.bias),
    "a gradient of half the size": lambda self, x: GradientHalved.apply(self.down(self.act(self.up(x)))),
    "a clamp of the middle": lambda self, x: self.down(self.act(self.up(x).clamp(-100, 100))),
    "a clamp of large results": lambda self, x: self.down(self.act(self.up(x))).clamp(-65504, 65504),
    "nothing for small inputs": lambda self, x: self.down(self.act(self.up(x))) * (x.abs().amax() > 0.1),
    "a global": lambda self, x: tempered(self.down(self.act(self.up(x)))),
    "an attribute that is asked for": lambda self, x: (
        self.down(self.act(self.up(x))) * getattr(self, "temperature", 1.0)
    ),
    "another order": lambda self, x: self.up(self.act(self.down(x.repeat(1, 1, 4)))),
    "an input that it changes": lambda self, x: self.down(self.act(self.up(x.mul_(1.0)))),
    "its function of a class": lambda self, x: half(2 * self.down(self.act(self.up(x)))) + 0 * self.rate,
}


@pytest.mark.parametrize("forward", UNLIKE.values(), ids=UNLIKE)
def test_what_differs_only_now_and_then_is_never_fused(forward) -> None:
    assert what_runs(made(Bare, forward)).startswith("as stock")


ATTRIBUTES = {
    "a temperature of 1": lambda self, x: self.dropout(self.down(self.act(self.up(x)))) * self.temperature,
    "a rate of 0": lambda self, x: self.dropout(self.down(self.act(self.up(x)))) * (1 - self.rate),
    "a counter": lambda self, x: (
        self.__setattr__("calls", self.calls + 1),
        self.dropout(self.down(self.act(self.up(x)))),
    )[1],
}


@pytest.mark.parametrize("forward", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_what_differs_only_by_an_attribute_is_never_fused(forward) -> None:
    assert what_runs(made(FeedForward, forward)).startswith("as stock")


@pytest.mark.parametrize("kind", [CallsATemperature, CallsItsParent])
def test_what_its_methods_mention_counts_too(kind: type) -> None:
    assert what_runs(kind()).startswith("as stock")


def test_a_scale_of_ones_is_not_overlooked() -> None:
    scaled = made(Bare, lambda self, x: self.down(self.act(self.up(x))) * self.scale, scale=nn.Parameter(torch.ones(8)))
    assert what_runs(scaled).startswith("as stock")
    assert "scale" in reason(scaled)
    unused = made(Bare, lambda self, x: self.down(self.act(self.up(x))), scale=nn.Parameter(torch.ones(8)))
    assert what_runs(unused).startswith("as stock")


def test_zeros_hide_nothing() -> None:
    module = made(Bare, lambda self, x: self.down(self.act(self.up(x))) * 3)
    nn.init.zeros_(module.down.weight)
    nn.init.zeros_(module.down.bias)
    assert what_runs(module).startswith("as stock")


def test_the_reason_is_told() -> None:
    assert "dropouts" in reason(made(Bare, UNLIKE["functional dropout in training"]))
    assert "random" in reason(made(Bare, UNLIKE["noise in training"]))
    assert "gradient" in reason(made(Bare, UNLIKE["a detached middle"]))
    assert "its code mentions its temperature" in reason(made(FeedForward, ATTRIBUTES["a temperature of 1"]))


def test_probing_leaves_no_trace() -> None:
    module = made(FeedForward, lambda self, x: self.dropout(self.down(self.act(self.up(x)))))
    seen: list[nn.Module] = []
    module.up.register_forward_hook(lambda *call: seen.append(call[0]))
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    cputrain.optimize(module)
    assert not seen
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_what_cannot_be_copied_is_left_alone() -> None:
    class Uncopied(FeedForward):
        def __deepcopy__(self, memo: dict) -> nn.Module:
            raise RuntimeError("no")

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.down(self.act(self.up(x))))

    assert "can't be copied" in reason(Uncopied())


class Gated(nn.Module):
    """A gated feed-forward whose layers' names say nothing."""

    middle = 32

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, self.middle), nn.Linear(self.middle, 8), nn.Linear(8, self.middle)
        self.act = nn.SiLU()
        self.rate, self.scale = 0.0, 1.0


class GatedSquare(Gated):
    """Here sizes say nothing, either."""

    middle = 8


GATED = {
    "gated": (lambda self, x: self.b(self.act(self.a(x)) * self.c(x)), True),
    "the other way round": (lambda self, x: self.b(self.a(x) * self.act(self.c(x))), True),
    "both activated": (lambda self, x: self.b(self.act(self.a(x)) * self.act(self.c(x))), False),
    "added": (lambda self, x: self.b(self.act(self.a(x)) + self.c(x)), False),
    "no activation": (lambda self, x: self.b(self.a(x) * self.c(x)), False),
    "dropout inside": (lambda self, x: self.b(F.dropout(self.act(self.a(x)) * self.c(x), 0.1, self.training)), False),
    "clamped": (lambda self, x: self.b(self.act(self.a(x).clamp(-50, 50)) * self.c(x)), False),
    "gate without gradient": (lambda self, x: self.b(self.act(self.a(x)).detach() * self.c(x)), False),
    "a scale of 1": (lambda self, x: self.b(self.act(self.a(x)) * self.c(x)) * self.scale, False),
    "residual": (lambda self, x: x + self.b(self.act(self.a(x)) * self.c(x)), False),
}


@pytest.mark.parametrize(("forward", "fused"), GATED.values(), ids=GATED)
@pytest.mark.parametrize("base", [Gated, GatedSquare])
def test_gated_feed_forwards(forward, fused: bool, base: type) -> None:
    runs = what_runs(made(base, forward))
    assert runs.startswith("gated feed-forward" if fused else "as stock")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.rate = nn.Parameter(torch.ones(16)), 1e-6, 0.0


RMS = {
    "weight": (lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)), True),
    "1 + weight": (lambda self, x: x * torch.rsqrt((x * x).mean(-1, True) + self.eps) * (1 + self.weight), True),
    "2 + weight": (lambda self, x: x * torch.rsqrt((x * x).mean(-1, True) + self.eps) * (2 + self.weight), False),
    "eps outside": (lambda self, x: self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps), False),
    "another eps": (lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), False),
    "of all tokens": (lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean() + self.eps), False),
    "a sum": (lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps), False),
    "centred": (lambda self, x: F.layer_norm(x, (16,), self.weight, None, self.eps), False),
    "a root without gradient": (
        lambda self, x: self.weight * x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.eps),
        False,
    ),
    "a rate of 0": (
        lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean(-1, True) + self.eps) * (1 - self.rate),
        False,
    ),
}


@pytest.mark.parametrize(("forward", "fused"), RMS.values(), ids=RMS)
def test_rms_norms(forward, fused: bool) -> None:
    assert what_runs(made(Normed, forward)).startswith("RMSNorm" if fused else "as stock")
