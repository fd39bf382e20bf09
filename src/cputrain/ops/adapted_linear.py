"""A frozen linear layer with an adapter: the product and the low-rank path as one operator.

y = x wᵀ + bias + scaling · dropout(x) Aᵀ Bᵀ. The weight is of any kind (half-precision floats, 4 bits …) and gets no
gradient; x is saved for A's, unless there is no adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cputrain.formats import FP32, Call, Format, OutputGrad, Weight
from cputrain.native.operands import require
from cputrain.ops import low_rank
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.low_rank import Adapter, require_adapter


class Adapted(NamedTuple):
    """A layer: its frozen weight, its bias and its adapter, if it has them."""

    weight: Weight
    bias_O: Tensor | None = None
    adapter: Adapter | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd is to see."""
        a, b = (None, None) if self.adapter is None else self.adapter[:2]
        return self.bias_O, a, b

    def with_tensors(self, bias_O: Tensor | None, a: Tensor | None, b: Tensor | None) -> Adapted:
        """The same on what autograd handed on, in floats."""
        bias = None if bias_O is None else bias_O.float()
        if self.adapter is None or a is None or b is None:
            return Adapted(self.weight, bias)
        parts = a.float().contiguous(), b.float().contiguous()
        return Adapted(self.weight, bias, self.adapter._replace(a_RI=parts[0], b_OR=parts[1]))

    def forward(self, call: Call, x_TI: Tensor, **use: Any) -> tuple[Tensor, Tensor | None]:
        """y, and t of the low-rank path; the options are `Use`'s."""
        if self.adapter is None:
            return call.forward(x_TI, self.weight, self.bias_O, save=False, **use)[0], None
        t_TR = low_rank.down(x_TI, self.adapter)
        plus = (t_TR, self.adapter.b_OR)
        return call.forward(x_TI, self.weight, self.bias_O, save=False, plus=plus, **use)[0], t_TR

    def backward(
        self,
        gradient: OutputGrad,
        dy_TO: Tensor,
        x_TI: Tensor | None,
        t_TR: Tensor | None,
        wanted: tuple[bool, ...],
        dx_TI: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of `tensors`; what comes through the low-rank path is added to `dx` (or None)."""
        if self.adapter is None or x_TI is None or t_TR is None:
            return gradient.bias, None, None
        return gradient.bias, *low_rank.backward(dy_TO, x_TI, t_TR, self.adapter, dx_TI, (wanted[1], wanted[2]))

    def require(self, operator: str) -> None:
        weight = self.weight
        require(operator, (weight.out_features,), bias=None if self.bias_O is None else self.bias_O.float())
        require_adapter(operator, self.adapter, weight.in_features, weight.out_features)


def as_given(grads: tuple[Tensor | None, ...], tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients in the dtypes of what they belong to: adapters may be bf16."""
    pairs = zip(grads, tensors, strict=True)
    return tuple(None if grad is None or of is None else grad.to(of.dtype) for grad, of in pairs)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, layer: Adapted, format: Format, *tensors: Tensor | None) -> Tensor:
        ctx.call, ctx.layer = format.begin(), layer
        y_TO, t_TR = layer.with_tensors(*tensors).forward(ctx.call, x_TI)
        ctx.save_for_backward(None if t_TR is None else x_TI, t_TR, *tensors)
        return y_TO

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_TO: Tensor):
        x_TI, t_TR, *tensors = ctx.saved_tensors
        need_x, _, _, *wanted = ctx.needs_input_grad
        layer, dy_TO = ctx.layer.with_tensors(*tensors), grad_TO.contiguous()
        gradient = ctx.call.output_grad(dy_TO, weight=False, bias=wanted[0])
        grad_x = gradient.input(layer.weight) if need_x else None
        grads = layer.backward(gradient, dy_TO, x_TI, t_TR, tuple(wanted), grad_x)
        return grad_x, None, None, *as_given(grads, tuple(tensors))


def adapted_linear(x_TI: Tensor, layer: Adapted, format: Format = FP32) -> Tensor:
    """x_TI and the result are fp32."""
    require("adapted_linear", (x_TI.shape[0], layer.weight.in_features), x=x_TI)
    layer.require("adapted_linear")
    return _AdaptedLinear.apply(x_TI, layer, format, *layer.tensors())


def plain(x_TI: Tensor, layer: Adapted) -> Tensor:
    """The same in PyTorch."""
    bias = None if layer.bias_O is None else layer.bias_O.to(x_TI.dtype)
    y_TO = torch.nn.functional.linear(x_TI, layer.weight.dense().to(x_TI.dtype), bias)
    return y_TO if layer.adapter is None else y_TO + low_rank.plain(x_TI, layer.adapter)
