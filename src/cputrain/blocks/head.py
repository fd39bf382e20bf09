"""What stands behind an encoder: linear layers that give each token its logits.

They work on the real tokens only, too. Token logits at padded positions are 0. Span logits (`qa_outputs`) there can't
win: stock takes the softmax over padded positions, so that padding leaks into loss and gradients; with a logit of
-10,000, whose exponential is 0, both are those of the sequences alone. (The lowest finite value would overflow where
logits are added up: span scores, label smoothing, distillation.)

The logits of a vocabulary are computed where code looks at them (lazy_logits.py): the loss does without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cputrain import settings
from cputrain.blocks import fused_lm_head, tied_embedding
from cputrain.blocks.config_view import is_transformers_model
from cputrain.blocks.lazy_logits import LazyLogits, Source
from cputrain.blocks.leaves import FEWEST_FEATURES, linear_forward
from cputrain.ops.padded_linear import is_worthwhile, padded_linear
from cputrain.padding import PaddingMask, computed, gather, scatter
from cputrain.patching import padded_reads
from cputrain.patching.bind import (
    Patches,
    format_of,
    has_hook,
    parameter_names,
    untouched,
    why_not_bias_size,
    why_not_tensors,
    why_not_transform,
)
from cputrain.patching.half_precision import is_frozen_half
from cputrain.patching.probe import REFUSALS

# Smaller logits are computed at once: stock's loss takes no longer than asking for ours.
FEWEST_BYTES = 8 << 20

# module.__dict__ key of a token head whose logits are lazy: the output embeddings of a language model.
VOCABULARY = "_cputrain_vocabulary"
SKIP_LOGITS = "skip_logits"


@dataclass
class _Call:
    """One call of a model: the mask that it was given, and the padding that its encoder has dropped."""

    mask: Any
    has_labels: bool = False
    encoded: int = 0
    dropped: PaddingMask | None = None

    def padding(self) -> PaddingMask | None:
        """The padding of this call, dropped or not."""
        if self.dropped is not None or not isinstance(self.mask, Tensor) or self.mask.dim() != 2:
            return self.dropped
        real = self.mask != 0
        batch, length = real.shape
        return None if bool(real.all()) else PaddingMask(batch, length, real, False, lambda: None)


_call: ContextVar[_Call | None] = ContextVar("cputrain_model_call", default=None)
_loss_follows: ContextVar[bool] = ContextVar("cputrain_loss_follows", default=False)


@contextlib.contextmanager
def loss_follows() -> Iterator[None]:
    """Within, models are called for a loss that their caller computes: they get no labels, and still no logits."""
    token = _loss_follows.set(True)
    try:
        yield
    finally:
        _loss_follows.reset(token)


def note_encoded(dropped: PaddingMask | None) -> None:
    """Tells the heads around an encoder what it dropped; after a second batch they can't tell which is whose."""
    call = _call.get()
    if call is not None:
        call.encoded += 1
        call.dropped = dropped if call.encoded == 1 else None


def model_forward(self: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(parameter_names(type(self).forward), args, strict=False)) if args else {}
    mask, labels = (given.get(name, kwargs.get(name)) for name in ("attention_mask", "labels"))
    token = _call.set(_Call(mask, labels is not None))
    if SKIP_LOGITS not in parameter_names(type(self).forward):  # Liger's word, which Trainer uses: lazy logits do it
        kwargs.pop(SKIP_LOGITS, None)
    try:
        return stock(*args, **kwargs)
    finally:
        _call.reset(token)


def token_head_forward(self: nn.Linear, stock: Callable, input: Tensor) -> Tensor:
    call = _call.get()
    padding = None if call is None else call.dropped
    compute = functools.partial(_token_logits, self, stock, input, padding)
    if VOCABULARY not in self.__dict__ or (padding is not None and input.shape[:-1] != (padding.batch, padding.length)):
        return compute()
    return _deferred(self, computed(input), None if padding is None else padding.real, compute)


def _token_logits(head: nn.Linear, stock: Callable, x: Tensor, padding: PaddingMask | None) -> Tensor:
    if padding is None or not _is_vocabulary(head, x, padding):
        return _on_real_tokens(functools.partial(linear_forward, head, stock), x, padding, 0.0)
    rows = gather(x, padding.ragged).squeeze(0)
    place, positions = padding.ragged.place, padding.batch * padding.length
    logits = padded_linear(rows, head.weight, head.bias, place, positions, format_of(head))
    return logits.view(padding.batch, padding.length, -1)


def vocabulary_forward(self: nn.Linear, stock: Callable, input: Tensor) -> Tensor:
    """A vocabulary head that sees the batch as it is."""
    return _deferred(self, computed(input), None, functools.partial(linear_forward, self, stock, input))


def _deferred(head: nn.Linear, x: Tensor, real: Tensor | None, compute: Callable[[], Tensor]) -> Tensor:
    if not _may_wait(head, x):
        return compute()
    return LazyLogits.of(Source(x, head.weight, head.bias, real, format_of(head)), compute)


def _may_wait(head: nn.Linear, x: Tensor) -> bool:
    """Whether a loss may follow, and the logits are so large that it should do without them."""
    tensors = [tensor for tensor in (x, head.weight, head.bias) if tensor is not None]
    call = _call.get()
    is_for_loss = _loss_follows.get() or (call is not None and call.has_labels)
    if not is_for_loss and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return False
    if x.shape[-1:] != (head.in_features,) or 4 * x.shape[:-1].numel() * head.out_features < FEWEST_BYTES:
        return False
    return (
        settings.one_of(settings.LOGITS) != "computed"
        and not torch.is_inference_mode_enabled()
        and not has_hook(head)
        and why_not_bias_size(head.bias, head.out_features) is None
        and why_not_tensors(x, head.bias, *(() if is_frozen_half(head.weight) else (head.weight,))) is None
    )


def _is_vocabulary(head: nn.Linear, x: Tensor, padding: PaddingMask) -> bool:
    """So large that its logits shouldn't exist twice, not even for a moment."""
    if x.shape != (padding.batch, padding.length, head.in_features):
        return False
    tokens = len(padding.ragged.place)
    return is_worthwhile(tokens, head.out_features) and why_not_tensors(x, head.weight, head.bias) is None


def span_head_forward(self: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Tensor:
    call = _call.get()
    if len(args) != 1 or kwargs or call is None or why_not_transform() is not None:
        return stock(*args, **kwargs)
    return _on_real_tokens(stock, args[0], call.padding(), _PADDED_SPAN)


def _on_real_tokens(stock: Callable, x: Tensor, padding: PaddingMask | None, fill: float) -> Tensor:
    if padding is None or x.dim() != 3 or x.shape[:2] != (padding.batch, padding.length):
        return stock(x)
    rows = stock(gather(x, padding.ragged))
    return scatter(rows, padding.ragged, fill)


def take_over_spans(model: nn.Module, patches: Patches) -> None:
    for name, module in model.named_modules():
        head = dict(module.named_children()).get("qa_outputs")
        if head is None or not _takes_mask(module):
            continue
        if not (untouched(module) and untouched(head)):
            patches.leave(name, module, "span logits of padded positions stay: a forward was replaced on the instance")
            continue
        patches.bind(name, module, "forward", model_forward, "hands its mask to the span head")
        patches.bind(_join(name, "qa_outputs"), head, "forward", span_head_forward, SPAN)


def _takes_mask(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule) and "attention_mask" in parameter_names(type(module).forward)


SPAN = "real tokens only; padded positions get a span logit of -10,000"
_PADDED_SPAN = -1e4
_TOKEN = "real tokens only, where it gets a row for each; 0 at padded positions"


def take_over_tokens(model: nn.Module, encoders: list[nn.Module], others: list[nn.Module], patches: Patches) -> None:
    """The linear layers around the encoder, in each model with just one (`others` couldn't drop their padding)."""
    done: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in done or not is_transformers_model(module):
            continue
        parts = set(module.modules())
        if not untouched(module):  # a model with a span head, or one whose forward was replaced
            done |= parts
            continue
        inside = parts.intersection(encoders)
        if len(inside) != 1 or parts.intersection(others) or "attention_mask" not in parameter_names(module.forward):
            continue
        done |= parts
        encoder = inside.pop()
        encoded = set(encoder.modules())
        heads = [(n, p) for n, p in module.named_modules() if type(p) is nn.Linear and p not in encoded]
        heads = [(n, p) for n, p in heads if untouched(p)]
        known = padded_reads.token_wise(module, encoder, [p for _, p in heads]) if heads else []
        heads = [(n, p) for n, p in heads if p in known]
        if heads:
            patches.bind(name, module, "forward", model_forward, "hands the dropped padding to its heads")
        vocabulary = _output_embeddings(module)
        for part_name, part in heads:
            what = f"{_TOKEN}; {LAZY}" if part is vocabulary else _TOKEN
            patches.bind(_join(name, part_name), part, "forward", token_head_forward, what)
            if part is vocabulary:
                part.__dict__[VOCABULARY] = True
                fused_lm_head.note(part)


LAZY = "its logits are computed only where code reads them; cross-entropy takes none"


def take_over_vocabularies(model: nn.Module, patches: Patches) -> None:
    """The output embeddings of every transformers model, but for those that drop padding already."""
    settings.one_of(settings.LOGITS)  # a wrong value is reported now
    for name, module in model.named_modules():
        head = _output_embeddings(module) if is_transformers_model(module) else None
        if head is None:
            continue
        tied_embedding.take_over(model, head, patches)
        if not untouched(head) or head.out_features < FEWEST_FEATURES:
            continue
        what = LAZY if patches.format.is_stock else f"its product in {patches.format.name}; {LAZY}"
        inside = next(part_name for part_name, part in module.named_modules() if part is head)
        patches.bind(_join(name, inside), head, "forward", vocabulary_forward, what)
        fused_lm_head.note(head)
        if untouched(module):
            patches.bind(name, module, "forward", model_forward, "tells its head of labels", computes=False)


def _output_embeddings(module: Any) -> nn.Linear | None:
    try:
        head = module.get_output_embeddings()
    except REFUSALS:
        return None
    return head if type(head) is nn.Linear and any(part is head for part in module.modules()) else None


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
