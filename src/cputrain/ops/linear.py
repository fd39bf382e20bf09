"""The three matrix products of a linear layer, in the precision asked for, with as few passes around them as possible.

In fp32 and bf16 the products are torch's (MKL, oneDNN); in int16 they are ours (ops/matmul.py). What either saves: the
bias rides along, gradients of frozen parameters are not computed, and in int16 the input is kept as it was packed for
the weight's gradient, at half its size.

Shapes: x_TI tokens × in-features, w_OI out × in, y_TO.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cputrain.ops import matmul, workspace
from cputrain.ops.activation import activation_forward
from cputrain.ops.arithmetic import FP32, Arithmetic, Call, Kept, kept_as_float
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.operands import require_linear


def flat(x: Tensor) -> Tensor:
    """All leading dimensions as one: tokens × features."""
    return x.reshape(-1, x.shape[-1])


# A vocabulary's weight is packed and multiplied in parts: packed at once, it would take half its size once more, and
# so would the gradient of its logits. On an AMD Zen 4, parts of 8,192 also save 5 – 12% of the whole's CPU time.
_PART, _FEWEST = 8192, 16384


def _parts(out_features: int) -> list[slice]:
    width = out_features if out_features < _FEWEST else _PART
    return [slice(begin, min(begin + width, out_features)) for begin in range(0, out_features, max(width, 1))]


def forward_product(
    x_TI: Tensor,
    w_OI: Tensor,
    bias_O: Tensor | None,
    call: Call,
    keep: bool = True,
    held: bool = False,
    passing: str = "",
    narrow: bool = False,
) -> tuple[Tensor, Kept]:
    """y_TO = x wᵀ + bias, and what the weight's gradient will need of x (nothing unless `keep`).

    In bf16, an x that is `held` by somebody as it is needs no copy, and a result that is `passing` lies in the
    workspace of that name: it won't be kept as it is. `narrow`: a result that the CPU rounds to bf16 may stay so.
    """
    if call.kind == "int16":
        rows, columns = matmul.pack(x_TI, rows="left", columns="right" if keep else None)
        assert rows is not None
        y = x_TI.new_empty(x_TI.shape[0], w_OI.shape[0])
        for part in _parts(w_OI.shape[0]):
            bias = None if bias_O is None else bias_O[part]
            matmul.product(rows, matmul.by_rows(w_OI[part], "right"), out=y[:, part], bias=bias)
        call.look_at_rows("a forward product", x_TI, w_OI)
        if columns is None:
            return y, ()
        call.note_columns(x_TI)
        return y, (columns.memory,)
    if call.kind == "native_bf16":
        (x_in_bf16,) = call.keep(x_TI)
        y = F.linear(x_in_bf16, w_OI.bfloat16(), None if bias_O is None else bias_O.bfloat16())
        return y if narrow else y.float(), (x_in_bf16,) if keep else ()
    out = workspace.floats(passing, x_TI.shape[0], w_OI.shape[0]) if passing and call.kind == "bf16" else None
    y = torch.mm(x_TI, w_OI.t(), out=out) if bias_O is None else torch.addmm(bias_O, x_TI, w_OI.t(), out=out)
    return y, () if not keep else (x_TI,) if held else call.keep(x_TI)


def activated_product(
    h_TM: Tensor, bias_M: Tensor | None, kind: str, w_OM: Tensor, bias_O: Tensor | None, call: Call, passing: str = ""
) -> tuple[Tensor, Tensor]:
    """y_TO = activation(h + bias_M) wᵀ + bias_O, and h as it is kept. In int16 the activation is never written."""
    if call.kind != "int16":
        a_TM, kept_h = activation_forward(h_TM, bias_M, kind, call.storage, inplace=True)
        return forward_product(a_TM, w_OM, bias_O, call, keep=False, passing=passing)[0], kept_h
    y = matmul.product(matmul.pack_activated(h_TM, bias_M, kind), matmul.by_rows(w_OM, "right"), bias=bias_O)
    if call.looks:
        call.look_at_rows("a forward product", activation_forward(h_TM, bias_M, kind)[0], w_OM)
    return y, h_TM


def kept_input(x_TI: Tensor, call: Call) -> Kept:
    """What `of_weight` needs of x, for an input that is computed again in the backward."""
    if call.kind == "int16":
        _, columns = matmul.pack(x_TI, columns="right")
        assert columns is not None
        call.note_columns(x_TI)
        return (columns.memory,)
    return (x_TI.bfloat16() if call.kind == "native_bf16" else x_TI,)


class OutputGradient:
    """The gradient of a linear layer's output: those of its input, weight and bias follow from it.

    In int16 each product packs it on its way, and the bias' gradient is there once the weight's was asked for.
    """

    def __init__(self, dy_TO: Tensor, call: Call, need_w: bool, need_bias: bool = False) -> None:
        self.call = call
        call.begin_backward()
        self.dy = dy_TO.bfloat16() if call.kind == "native_bf16" else dy_TO
        summed_on_the_way = call.kind == "int16" and need_w
        self.bias = None if not need_bias else dy_TO.new_empty(dy_TO.shape[1]) if summed_on_the_way else dy_TO.sum(0)

    def of_input(self, w_OI: Tensor, add_to: Tensor | None = None, passing: str = "") -> Tensor:
        """dx_TI = dy w, added to `add_to` in place if given; what is `passing` lies in the workspace of that name."""
        out = workspace.floats(passing, self.dy.shape[0], w_OI.shape[1]) if passing else add_to
        if self.call.kind == "int16":
            self.call.look_at_rows("an input gradient", self.dy, w_OI, transposed=True)
            out = self.dy.new_empty(self.dy.shape[0], w_OI.shape[1]) if out is None else out
            for part in _parts(w_OI.shape[0]):
                left, right = matmul.by_rows(self.dy[:, part], "left"), matmul.by_columns(w_OI[part], "right")
                matmul.product(left, right, out=out, accumulate=add_to is not None or part.start > 0)
            return out
        if self.call.kind == "native_bf16":
            dx = self.dy.mm(w_OI.bfloat16())
            return dx.float() if add_to is None else add_to.add_(dx)
        return torch.mm(self.dy, w_OI, out=out) if add_to is None else add_to.addmm_(self.dy, w_OI)

    def of_weight(self, kept: Kept, in_features: int) -> Tensor:
        """dw_OI = dyᵀ x, from what `forward_product` or `kept_input` kept of x."""
        if self.call.kind == "int16":
            self.call.look_at_columns("a weight gradient", self.dy)
            right = matmul.Operand(kept[0], in_features, self.dy.shape[0], "right")
            dw = self.dy.new_empty(self.dy.shape[1], in_features)
            for part in _parts(dw.shape[0]):
                sums = None if self.bias is None else self.bias[part]
                matmul.product(matmul.by_columns(self.dy[:, part], "left", sums=sums), right, out=dw[part])
            return dw
        if self.call.kind == "native_bf16":
            return self.dy.t().mm(kept[0]).float()
        return self.dy.t().mm(kept_as_float(kept))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None, arithmetic: Arithmetic) -> Tensor:
        ctx.call = arithmetic.begin()
        y, kept = forward_product(x_TI, w_OI, bias_O, ctx.call, keep=ctx.needs_input_grad[1])
        ctx.save_for_backward(w_OI, *kept)
        return y

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_TO: Tensor):
        w_OI, *kept = ctx.saved_tensors
        need_x, need_w, need_bias, _ = ctx.needs_input_grad
        grad = OutputGradient(grad_TO.contiguous(), ctx.call, need_w, need_bias)
        grad_x = grad.of_input(w_OI) if need_x else None
        return grad_x, grad.of_weight(kept, w_OI.shape[1]) if need_w else None, grad.bias, None


def linear(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None, arithmetic: Arithmetic = FP32) -> Tensor:
    require_linear("linear", x_TI, w_OI, bias_O)
    return _Linear.apply(x_TI, w_OI, bias_O, arithmetic)
