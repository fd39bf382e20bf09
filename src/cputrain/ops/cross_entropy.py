"""The cross-entropy loss of a vocabulary head, without the logits: hidden states, weight and labels in, loss out.

The logits of all tokens would be the largest tensor of a language model, and stock keeps several of that size. Here a
few hundred tokens at a time are multiplied, become a loss and, in the same memory, the gradient of their logits, which
is multiplied with weight and hidden states at once. So a loss and its gradients take the same three products as with
stock, and the backward has only to scale what the forward found. That needs every token's share in the loss to be known
in the forward, as in a mean or a sum; token_losses.py is for losses where it isn't.

Shapes: x_TI tokens × in-features, w_VI vocabulary × in, z_CV logits of a chunk of tokens, labels_T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats import FP32, Call, Dense, Format, Saved
from cputrain.native.operands import address, require_linear, rows_of
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.shared_table import shared_table

# The logits that exist at once. With fewer tokens the weight is packed more often: a chunk of 256 tokens spends a
# fifth of its time on that. 128 MB are 221 tokens of the largest vocabularies (152,000), and 683 of 49,152.
CHUNK_BYTES = 128 << 20


class Capping(NamedTuple):
    """What a model makes of its logits before the loss: after · tanh(before · z), or before · z."""

    before: float = 1.0
    after: float = 1.0
    tanh: bool = False

    def __call__(self, z: Tensor) -> Tensor:
        z = z if self.before == 1.0 else z * self.before
        return z.tanh() * self.after if self.tanh else z


AS_THEY_ARE = Capping()


class Loss(NamedTuple):
    """How logits become a loss."""

    capping: Capping = AS_THEY_ARE
    smoothing: float = 0.0


PLAIN = Loss()


def _chunks(tokens: int, vocabulary: int, call: Call) -> Iterator[tuple[slice, Call]]:
    """Tokens, in parts of one size; one part's products belong to `call`, which may look at a sample of them."""
    if not tokens:
        return
    most = max(CHUNK_BYTES // (4 * vocabulary), 64)
    size = -(-tokens // -(-tokens // most))
    begins = range(0, tokens, size)
    looked_at = begins[tokens % len(begins)]
    for begin in begins:
        yield slice(begin, min(begin + size, tokens)), call if begin == looked_at else call.beside()


class PerToken(NamedTuple):
    """What is known or wanted of each token; `about_T4` is its entropy, log Σ p², mean logit, and 1 for a top label."""

    losses: Tensor
    about_T4: Tensor | None = None
    grads: Tensor | None = None  # of the losses
    entropy_grads: Tensor | None = None

    def of(self, part: slice) -> PerToken:
        return PerToken(*(None if tensor is None else tensor[part] for tensor in self))  # type: ignore[arg-type]


def _losses_of_logits(z_CV: Tensor, labels: Tensor, loss: Loss, tokens: PerToken) -> None:
    """Fills in losses and `about_T4`; z becomes the gradient, if `tokens` has gradients."""
    rows, cols = z_CV.shape
    place, stride = rows_of("cross_entropy: logits", z_CV, (rows, cols))
    native.kernels().cross_entropy(
        *(place, stride, address("cross_entropy: labels", labels, rows, torch.int64)),
        address("cross_entropy: gradients of losses", tokens.grads, rows),
        address("cross_entropy: gradients of entropies", tokens.entropy_grads, rows),
        address("cross_entropy: losses", tokens.losses, rows),
        address("cross_entropy: about", tokens.about_T4, 4 * rows),
        *(rows, cols, loss.capping.before, loss.capping.after, int(loss.capping.tanh), loss.smoothing),
    )


class _Gradients:
    """Of hidden states, weight and bias, as far as they are wanted; filled in chunk by chunk."""

    def __init__(self, x_TI: Tensor, w_VI: Tensor, wanted: tuple[bool, ...]) -> None:
        self.want_x, self.want_w, self.want_bias = wanted
        self.x = torch.empty_like(x_TI) if self.want_x else None
        self.w = torch.zeros_like(w_VI) if self.want_w and not len(x_TI) else None
        self.bias = x_TI.new_zeros(w_VI.shape[0]) if self.want_bias else None

    def add(self, call: Call, part: slice, dz_CV: Tensor, w_VI: Tensor, saved: Saved) -> None:
        weight = Dense(w_VI)
        grad = call.output_grad(dz_CV, weight=self.want_w, bias=self.want_bias)
        if self.x is not None:
            self.x[part] = grad.input(weight)
        if self.want_w:
            self.w = grad.matrix(w_VI.shape[1], saved, add_to=self.w)
        if self.bias is not None:
            self.bias += grad.bias

    def all(self) -> tuple[Tensor | None, ...]:
        return self.x, self.w, self.bias


def run(
    x_TI: Tensor,
    w_VI: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    tokens: PerToken,
    loss: Loss,
    call: Call,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Fills in what `tokens` wants; returns the gradients of Σ grads · losses + Σ entropy_grads · entropies."""
    vocabulary, grads = w_VI.shape[0], _Gradients(x_TI, w_VI, wanted)
    logits = None
    for part, its_call in _chunks(len(x_TI), vocabulary, call):
        rows = part.stop - part.start
        logits = x_TI.new_empty(rows, vocabulary) if logits is None else logits
        z_CV, saved = its_call.forward(x_TI[part], Dense(w_VI), bias_V, save=wanted[1], out=logits[:rows])
        _losses_of_logits(z_CV, labels_T[part], loss, tokens.of(part))
        if any(wanted):
            grads.add(its_call, part, z_CV, w_VI, saved)
    return grads.all()


def _with_equal_shares(tokens: int, share: float, has_grads: bool) -> PerToken:
    grads = torch.full((tokens,), share, dtype=torch.float32) if has_grads else None
    return PerToken(torch.empty(tokens, dtype=torch.float32), grads=grads)


class _SummedLoss(torch.autograd.Function):
    """Σ losses / divisor; its gradients are computed in the forward."""

    @staticmethod
    def forward(ctx, x_TI, w_VI, bias_V, labels_T, divisor: float, loss: Loss, format: Format, graph: bool) -> Tensor:
        # Without a graph (evaluation) there will be no backward, but needs_input_grad doesn't know that.
        wanted = ctx.needs_input_grad[:3] if graph else (False, False, False)
        tokens = _with_equal_shares(len(x_TI), 1.0 / divisor, any(wanted))
        ctx.grads = run(x_TI, w_VI, bias_V, labels_T, tokens, loss, format.begin(), wanted)
        ctx.run_again = (divisor, loss, format, wanted)
        ctx.table = shared_table(w_VI)
        ctx.save_for_backward(x_TI, w_VI, bias_V, labels_T)
        return tokens.losses.double().sum().div_(divisor).float()

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor):
        x_TI, w_VI, bias_V, labels_T = ctx.saved_tensors
        grads, ctx.grads = ctx.grads, None
        if grads is None:  # with retain_graph: the first backward gave away what the forward had computed
            divisor, loss, format, wanted = ctx.run_again
            tokens = _with_equal_shares(len(x_TI), 1.0 / divisor, any(wanted))
            grads = run(x_TI, w_VI, bias_V, labels_T, tokens, loss, format.begin(), wanted)
        factor = grad.item()
        grads = grads if factor == 1.0 else [None if g is None else g.mul_(factor) for g in grads]
        if ctx.table is not None and grads[1] is not None:
            ctx.table.offer(grads[1])
        return *grads, None, None, None, None, None


def checked(x_TI: Tensor, w_VI: Tensor, bias_V: Tensor | None, labels_T: Tensor) -> tuple[Any, ...]:
    require_linear("cross_entropy", x_TI, w_VI, bias_V)
    if labels_T.dtype != torch.int64 or labels_T.shape != x_TI.shape[:1]:
        raise ValueError(
            f"cross_entropy: labels must be {len(x_TI)} of int64, found {tuple(labels_T.shape)} of {labels_T.dtype}."
        )
    if labels_T.numel():
        least, most = labels_T.aminmax()
        if least < 0 or most >= w_VI.shape[0]:
            raise IndexError(f"Target {int(least if least < 0 else most)} is out of bounds.")  # stock's own words
    return x_TI.contiguous(), w_VI, bias_V, labels_T.contiguous()


def summed_loss(
    x_TI: Tensor,
    w_VI: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    divisor: float = 1.0,
    loss: Loss = PLAIN,
    format: Format = FP32,
) -> Tensor:
    """Σ cross-entropy of the tokens' logits, divided by `divisor`."""
    return _SummedLoss.apply(*checked(x_TI, w_VI, bias_V, labels_T), divisor, loss, format, torch.is_grad_enabled())


def plain(x_TI: Tensor, w_VI: Tensor, bias_V: Tensor | None, labels_T: Tensor, loss: Loss = PLAIN) -> Tensor:
    """Each token's cross-entropy in PyTorch, for fp32."""
    z_TV = loss.capping(torch.nn.functional.linear(x_TI, w_VI, bias_V))
    return torch.nn.functional.cross_entropy(z_TV, labels_T, reduction="none", label_smoothing=loss.smoothing)
