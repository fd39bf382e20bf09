"""bf16 on a CPU that doesn't multiply it: products in fp32, what is saved for the backward rounded to bf16.

Half the memory on any CPU, and never the emulation of bf16 products, ten times slower than fp32. Attention's output is
saved as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain.formats import bf16_saving
from cputrain.formats.base import Call, Format, OutputGrad, Saved, Use, added, product_in_fp32, weight_grad_in_fp32
from cputrain.formats.fp32 import Fp32OutputGrad
from cputrain.formats.weights import Weight
from cputrain.native import workspace


class Bf16Saved(Format):
    name = "bf16_saved"
    saves = torch.bfloat16

    def start(self) -> Call:
        return _Call()


class _Call(Call):
    saves = torch.bfloat16

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None, use: Use) -> tuple[Tensor, Saved]:
        out = workspace.floats(use.scratch, x.shape[0], weight.out_features) if use.scratch else use.out
        y = product_in_fp32(x, weight.dense(), None if use.as_saved else bias, out)
        # Rounded before attention reads it: its backward must find the log-sum-exp of what it reads.
        y = added(y, use.plus)
        y = bf16_saving.rounded(y, bias) if use.as_saved else y
        return y, () if not use.save else (x,) if use.held else bf16_saving.as_bf16(x)

    def save_input(self, x_TI: Tensor) -> Saved:
        return (x_TI,)

    def output_grad(self, dy_TO: Tensor, *, weight: bool, bias: bool = False) -> OutputGrad:
        return _OutputGrad(dy_TO, bias)


class _OutputGrad(Fp32OutputGrad):
    def matrix(self, in_features: int, saved: Saved, *, add_to: Tensor | None = None) -> Tensor:
        return weight_grad_in_fp32(self.dy, bf16_saving.as_float(saved), add_to)
