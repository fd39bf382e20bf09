"""bf16 on a CPU that multiplies it itself: the products' operands and all that is saved are bf16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cputrain.formats import bf16_saving
from cputrain.formats.base import Call, Format, OutputGrad, Saved, Use, added
from cputrain.formats.weights import Weight


class Bf16(Format):
    name = "bf16"
    saves = torch.bfloat16
    overrules_autocast = True
    wants_autocast = True

    def start(self) -> Call:
        return _Call()


class _Call(Call):
    saves = torch.bfloat16

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None, use: Use) -> tuple[Tensor, Saved]:
        x_in_bf16 = bf16_saving.as_bf16(x, rounded_only=True)[0]
        y = F.linear(x_in_bf16, weight.dense().bfloat16(), None if bias is None else bias.bfloat16())
        y = y if use.as_saved else y.float() if use.out is None else use.out.copy_(y)
        return added(y, use.plus), (x_in_bf16,) if use.save else ()

    def save_input(self, x_TI: Tensor) -> Saved:
        return (x_TI.bfloat16(),)

    def save_output(self, out: Tensor) -> Tensor:
        return bf16_saving.as_bf16(out, rounded_only=True)[0]

    def output_grad(self, dy_TO: Tensor, *, weight: bool, bias: bool = False) -> OutputGrad:
        return _OutputGrad(dy_TO, bias)


class _OutputGrad(OutputGrad):
    def __init__(self, dy_TO: Tensor, bias: bool) -> None:
        self.dy = dy_TO.bfloat16()
        self.bias = dy_TO.sum(0) if bias else None

    def input(self, weight: Weight, *, add_to: Tensor | None = None, scratch: str = "") -> Tensor:
        dx = self.dy.mm(weight.dense().bfloat16())
        return dx.float() if add_to is None else add_to.add_(dx)

    def matrix(self, in_features: int, saved: Saved, *, add_to: Tensor | None = None) -> Tensor:
        dw = self.dy.t().mm(saved[0])
        return dw.float() if add_to is None else add_to.add_(dw)
