"""fp32: products are torch's, and what is saved is stock's."""

from __future__ import annotations

from torch import Tensor

from cputrain.formats.base import (
    Call,
    Format,
    OutputGrad,
    Saved,
    Use,
    added,
    input_grad_in_fp32,
    product_in_fp32,
    weight_grad_in_fp32,
)
from cputrain.formats.weights import Weight
from cputrain.native import workspace


class Fp32(Format):
    name = "fp32"
    is_stock = True

    def start(self) -> Call:
        return Fp32Call()


class Fp32Call(Call):
    def product(self, x: Tensor, weight: Weight, bias: Tensor | None, use: Use) -> tuple[Tensor, Saved]:
        return added(product_in_fp32(x, weight.dense(), bias, use.out), use.plus), (x,) if use.save else ()

    def save_input(self, x_TI: Tensor) -> Saved:
        return (x_TI,)

    def output_grad(self, dy_TO: Tensor, *, weight: bool, bias: bool = False) -> OutputGrad:
        return Fp32OutputGrad(dy_TO, bias)


class Fp32OutputGrad(OutputGrad):
    def __init__(self, dy_TO: Tensor, bias: bool) -> None:
        self.dy = dy_TO
        self.bias = dy_TO.sum(0) if bias else None

    def input(self, weight: Weight, *, add_to: Tensor | None = None, scratch: str = "") -> Tensor:
        out = workspace.floats(scratch, self.dy.shape[0], weight.in_features) if scratch else None
        return input_grad_in_fp32(self.dy, weight.dense(), add_to, out)

    def matrix(self, in_features: int, saved: Saved, *, add_to: Tensor | None = None) -> Tensor:
        return weight_grad_in_fp32(self.dy, saved[0], add_to)


FP32 = Fp32()
