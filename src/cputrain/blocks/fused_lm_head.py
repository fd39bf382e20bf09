"""TRL's own loss without logits (`add_fused_lm_head`: SFT, DPO, KTO, GRPO, RLOO), computed by our operator.

TRL puts a forward of its own on the model, which hands hidden states and the head's weight to an autograd function. On
a CPU that one scores every position and computes the logits again in the backward. While a model is optimised, ours
stands in its place for heads of optimised models, and gets the positions that have a label.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.formats.weights import HALF
from cputrain.log import mention_once
from cputrain.ops.cross_entropy import Capping, Loss
from cputrain.ops.token_losses import described_tokens, token_losses
from cputrain.patching.bind import format_of, is_ours, why_not_bias_size, why_not_tensors
from cputrain.patching.half_precision import is_frozen_half

_HOME = "trl.trainer.utils"
_FUNCTION, _CHOICE = "_ChunkedLogProbFunction", "_use_triton"
_FIELDS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_INPUTS = ["hidden", "weight", "bias", "targets", "temperature", "chunk_size"]
_INPUTS += ["final_logit_softcapping", "logit_scale", "outputs"]

_heads: weakref.WeakSet[nn.Linear] = weakref.WeakSet()
_stock: dict[str, Any] = {}  # what stood in TRL's module
_installed = 0


class LogProbs:
    """Log-probabilities of the targets, and what else TRL asks for, as TRL's function gives them."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _FIELDS,
    ) -> tuple[Tensor | None, ...]:
        head, targets = _head_of(weight), targets.clamp(min=0)
        x = hidden.float() if hidden.dtype in HALF else hidden  # what a model in half precision hands on
        operands = x, weight, bias, targets
        in_floats = (x, bias) if is_frozen_half(weight) else (x, weight, bias)
        why = "its head isn't optimised" if head is None else why_not_tensors(*in_floats)
        why = why or why_not_bias_size(bias, len(weight))
        why = why or ("a temperature or a cap of 0" if 0 in (temperature, final_logit_softcapping) else None)
        if head is None or why is not None:
            mention_once(f"TRL computes its log-probabilities itself: {why}")
            options = temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            return _stock[_FUNCTION].apply(hidden, *operands[1:], *options)
        loss = Loss(_capping(temperature, final_logit_softcapping, logit_scale))
        wanted = [name in outputs for name in _FIELDS]
        if not any(wanted):
            return -token_losses(*operands, loss, format_of(head)), None, None, None, None
        is_sft = "is_top1" in outputs and "mean_logits" not in outputs  # its loss is a mean over tokens
        losses, *about = described_tokens(*operands, loss, format_of(head), alike=is_sft)
        return -losses, *(found if wants else None for found, wants in zip(about, wanted, strict=True))


def _capping(temperature: float, cap: float | None, scale: float) -> Capping:
    if cap is None:
        return Capping(scale / temperature)
    return Capping(scale / cap, cap / temperature, True)


def _head_of(weight: Tensor) -> nn.Linear | None:
    return next((head for head in _heads if head.weight is weight and is_ours(head.__dict__.get("forward"))), None)


def note(head: nn.Linear) -> None:
    """Of a model that is being optimised."""
    _heads.add(head)


def install() -> None:
    """Put ours in the place of TRL's, if TRL was imported. Each call needs one `uninstall`."""
    global _installed
    _installed += 1
    home = sys.modules.get(_HOME)
    if home is None or _FUNCTION in _stock or not _is_known(home):
        return
    _stock.update({name: getattr(home, name) for name in (_FUNCTION, _CHOICE)})
    home.__dict__.update({_FUNCTION: LogProbs, _CHOICE: _scores_labels_only})


def uninstall() -> None:
    """Undo one `install`; the last puts TRL's back, unless other code has put yet another there."""
    global _installed
    _installed = max(_installed - 1, 0)
    home = sys.modules.get(_HOME)
    if _installed or not _stock or home is None:
        return
    for name, ours in ((_FUNCTION, LogProbs), (_CHOICE, _scores_labels_only)):
        if getattr(home, name) is ours:
            setattr(home, name, _stock[name])
    _stock.clear()


def _scores_labels_only(device: torch.device) -> bool:
    """In the place of TRL's `_use_triton`, by which its forward decides whether to score positions without a label."""
    return device.type == "cpu" or _stock[_CHOICE](device)


def _is_known(home: ModuleType) -> bool:
    """Whether this is the function of TRL 1.16; in another release it may be called otherwise."""
    forward = getattr(getattr(home, _FUNCTION, None), "forward", None)
    if forward is None or not hasattr(home, _CHOICE):
        return False
    return list(inspect.signature(forward).parameters)[1:] == _INPUTS
