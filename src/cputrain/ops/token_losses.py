"""Each token's cross-entropy, and what else its distribution tells, without the logits (cross_entropy.py).

How much each token counts is known only in the backward. But the gradient of a token's hidden states is a row of its
own: with a frozen head the forward computes it for a weight of 1, and the backward scales the rows. A trained head's
gradient is a sum over tokens, which can be scaled only if all count alike. Where a caller expects that, the forward
takes it for granted until it was wrong once for this head. Else, and for gradients of the entropy, the backward
computes the logits again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from cputrain.formats import FP32, Format
from cputrain.ops.cross_entropy import PLAIN, Loss, PerToken, checked, run
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.shared_table import shared_table

# Weights of heads whose tokens were once found to count differently, or their entropies to count at all.
_unequal: WeakIdKeyDictionary = WeakTensorKeyDictionary()


class Tokens(NamedTuple):
    """What a head says of each token. Only losses and entropies have gradients."""

    losses: Tensor
    entropy: Tensor  # of the distribution over the vocabulary
    log_squares: Tensor  # log Σ p²
    mean_logit: Tensor
    is_top: Tensor  # whether the label is the likeliest, the first of several


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TI, w_VI, bias_V, labels_T, loss: Loss, format: Format, described: bool, alike: bool, graph: bool
    ):
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[:3] if graph else (False, False, False)
        guesses = any(wanted) and (alike or not any(wanted[1:])) and w_VI not in _unequal
        count = len(x_TI)
        tokens = PerToken(
            x_TI.new_empty(count),
            x_TI.new_empty(count, 4) if described else None,
            grads=x_TI.new_ones(count) if guesses else None,
        )
        found = run(x_TI, w_VI, bias_V, labels_T, tokens, loss, format.begin(), wanted if guesses else (False,) * 3)
        ctx.guessed, ctx.loss, ctx.format = found if guesses else None, loss, format
        ctx.table = shared_table(w_VI)
        ctx.save_for_backward(x_TI, w_VI, bias_V, labels_T)
        if tokens.about_T4 is None:
            return tokens.losses
        entropy, log_squares, mean_logit, is_top = tokens.about_T4.t().contiguous().unbind()
        ctx.mark_non_differentiable(log_squares, mean_logit, is_top := is_top.bool())
        return tokens.losses, entropy, log_squares, mean_logit, is_top

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_T: Tensor | None, entropy_grad_T: Tensor | None = None, *_):
        x_TI, w_VI, bias_V, labels_T = ctx.saved_tensors
        guessed, ctx.guessed = ctx.guessed, None
        grads = None
        if guessed is not None:  # else the guess was given away by a backward before, or none was made
            grads = _scaled(guessed, grad_T, entropy_grad_T)
            if grads is None:
                _unequal[w_VI] = True
        if grads is None:
            given = [x_TI.new_zeros(len(x_TI)) if g is None else g.contiguous() for g in (grad_T, entropy_grad_T)]
            tokens = PerToken(x_TI.new_empty(len(x_TI)), None, given[0], given[1])
            wanted, call = ctx.needs_input_grad[:3], ctx.format.begin()
            grads = run(x_TI, w_VI, bias_V, labels_T, tokens, ctx.loss, call, wanted)
        if ctx.table is not None and grads[1] is not None:
            ctx.table.offer(grads[1])
        return *grads, None, None, None, None, None, None


def _scaled(
    grads: tuple[Tensor | None, ...], grad_T: Tensor | None, entropy_grad_T: Tensor | None
) -> tuple[Tensor | None, ...] | None:
    """Gradients for tokens of weight 1 become those for their weights; None if that can't be."""
    if grad_T is None or entropy_grad_T is not None:
        return None
    x, *of_head = grads
    is_frozen = all(grad is None for grad in of_head)
    if not is_frozen and len(grad_T) and not bool((grad_T == grad_T[0]).all()):
        return None
    if x is not None:
        x *= grad_T.unsqueeze(1)
    return x, *(grad if grad is None or not len(grad_T) else grad.mul_(grad_T[0]) for grad in of_head)


def token_losses(
    x_TI: Tensor,
    w_VI: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    loss: Loss = PLAIN,
    format: Format = FP32,
    alike: bool = False,
) -> Tensor:
    """Each token's cross-entropy; `alike`: the caller expects that all tokens will count the same."""
    operands = checked(x_TI, w_VI, bias_V, labels_T)
    return _TokenLosses.apply(*operands, loss, format, False, alike, torch.is_grad_enabled())


def described_tokens(
    x_TI: Tensor,
    w_VI: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    loss: Loss = PLAIN,
    format: Format = FP32,
    alike: bool = False,
) -> Tokens:
    """Each token's cross-entropy, and what its distribution is like."""
    operands = checked(x_TI, w_VI, bias_V, labels_T)
    return Tokens(*_TokenLosses.apply(*operands, loss, format, True, alike, torch.is_grad_enabled()))


def plain(x_TI: Tensor, w_VI: Tensor, bias_V: Tensor | None, labels_T: Tensor, loss: Loss = PLAIN) -> Tokens:
    """`described_tokens` in PyTorch, for fp32."""
    z_TV = loss.capping(F.linear(x_TI, w_VI, bias_V))
    losses = F.cross_entropy(z_TV, labels_T, reduction="none", label_smoothing=loss.smoothing)
    log_p = z_TV.log_softmax(-1)
    entropy, log_squares = -(log_p.exp() * log_p).sum(-1), (2 * log_p.detach()).logsumexp(-1)
    return Tokens(losses, entropy, log_squares, z_TV.detach().mean(-1), z_TV.argmax(-1) == labels_T)
