"""A format that no operator has heard of, as a newcomer would add it: products in float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import cputrain
from cputrain.blocks import recognise
from cputrain.formats import FORMATS, Call, Format, OutputGrad, Saved, Use, Weight
from cputrain.ops.attention import Sequences
from cputrain.ops.feed_forward import feed_forward, feed_forward_norm
from cputrain.ops.feed_forward import plain as feed_forward_plain
from cputrain.ops.linear import linear
from cputrain.ops.residual_block import plain as residual_block_plain
from cputrain.ops.residual_block import residual_block
from cputrain.ops.self_attention import plain as self_attention_plain
from cputrain.ops.self_attention import self_attention
from cputrain.patching import bind
from tests.unit.ops.blocks import assert_equals_twin


class _Fp64Call(Call):
    def product(self, x: Tensor, weight: Weight, bias: Tensor | None, use: Use) -> tuple[Tensor, Saved]:
        y = x.double() @ weight.dense().double().t()
        calls.append("forward")
        return (y if bias is None else y + bias).float(), (x,) if use.save else ()

    def save_input(self, x_TI: Tensor) -> Saved:
        return (x_TI,)

    def output_grad(self, dy_TO: Tensor, *, weight: bool, bias: bool = False) -> OutputGrad:
        return _Fp64OutputGrad(dy_TO, bias)


class _Fp64OutputGrad(OutputGrad):
    def __init__(self, dy_TO: Tensor, bias: bool) -> None:
        self.dy = dy_TO.double()
        self.bias = self.dy.sum(0).float() if bias else None

    def input(self, weight: Weight, *, add_to=None, scratch="") -> Tensor:
        calls.append("input")
        dx = (self.dy @ weight.dense().double()).float()
        return dx if add_to is None else add_to.add_(dx)

    def matrix(self, in_features: int, saved: Saved, *, add_to=None) -> Tensor:
        calls.append("weight")
        dw = (self.dy.t() @ saved[0].double()).float()
        return dw if add_to is None else add_to.add_(dw)


calls: list[str] = []


@pytest.fixture(autouse=True)
def fp64():
    class Fp64(Format):
        name = "fp64"

        def start(self) -> Call:
            return _Fp64Call()

    calls.clear()
    yield Fp64
    del FORMATS["fp64"]


T, H, M = 7, 8, 24
OPERATORS = {
    "linear": (linear, torch.nn.functional.linear, [(T, H), (M, H), (M,)], 1),
    "feed-forward": (
        lambda *x: feed_forward(*x[:5], "gelu", 0.0, x[5]),
        lambda *x: feed_forward_plain(*x, "gelu"),
        [(T, H), (M, H), (M,), (H, M), (H,)],
        2,
    ),
    "feed-forward and norm": (
        lambda *x: feed_forward_norm(*x[:7], "silu", 1e-5, 0.0, x[7]),
        lambda *x: feed_forward_plain(*x[:5], "silu", norm=(*x[5:], 1e-5)),
        [(T, H), (M, H), (M,), (H, M), (H,), (H,), (H,)],
        2,
    ),
    "residual block": (
        lambda *x: residual_block(*x[:6], 1e-5, 0.0, x[6]),
        lambda *x: residual_block_plain(*x, 1e-5),
        [(T, M), (T, H), (H, M), (H,), (H,), (H,)],
        1,
    ),
    "self-attention": (
        lambda *x: self_attention(x[0], x[1:4], x[4:7], Sequences.from_lengths([T]), heads=2, scale=0.5, format=x[7]),
        lambda *x: self_attention_plain(x[0], x[1:4], x[4:], Sequences.from_lengths([T]), heads=2, scale=0.5),
        [(T, H), (H, H), (H, H), (H, H), (H,), (H,), (H,)],
        1,
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_serves_it(name, fp64):
    fused, plain, shapes, products = OPERATORS[name]
    assert_equals_twin(lambda *x: fused(*x, fp64()), plain, [torch.randn(shape) for shape in shapes])
    assert {kind: calls.count(kind) for kind in calls} == dict.fromkeys(("forward", "input", "weight"), products)


def test_a_model_trains_in_it(fp64):
    """Copied with its modules, forgotten by a pickle."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    record = bind.Patches(fp64)
    recognise.take_over_pieces(model, record)
    recognise.take_over_model(model, record)
    model(torch.randn(256, 256)).sum().backward()
    assert "forward" in calls
    held = [module.__dict__[bind.FORMAT] for module in model.modules() if bind.FORMAT in module.__dict__]
    assert held and all(type(copy.deepcopy(format)) is fp64 for format in held)
    assert pickle.loads(pickle.dumps(held[0])) is None  # noqa: S301
    cputrain.restore(model)
