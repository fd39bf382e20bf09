"""Goes through a model and takes over what it recognises, from the largest pieces to the smallest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cputrain.blocks import (
    config_view,
    embedding,
    encoder,
    gated_mlp,
    head,
    leaves,
    lora,
    mlp,
    own_attention,
    residual,
    rms_norm,
    self_attention,
    stack,
)
from cputrain.blocks.config_view import is_transformers_model
from cputrain.patching import autocast, half_precision, padded_reads
from cputrain.patching.bind import Patches, is_ours, parameter_names, untouched
from cputrain.patching.probe import remembering

# In this order, on each module from the outside in: a piece that is part of a larger one is still taken over, because
# the larger one falls back to it when something inside is touched.
_PIECES = (embedding, self_attention, own_attention, mlp, gated_mlp, rms_norm, residual)


def take_over_pieces(model: nn.Module, patches: Patches) -> None:
    """Fused blocks first, single layers where no block has claimed them."""
    modules = [(name, module) for name, module in model.named_modules() if untouched(module)]
    with remembering():
        for name, module in modules:
            if untouched(module):  # not yet claimed as a part of its parent
                any(piece.take_over(name, module, patches) for piece in _PIECES)
    for name, module in modules:
        if untouched(module):
            leaves.take_over(name, module, patches)
    for name, module in model.named_modules():
        if not untouched(module) and not is_ours(module.__dict__.get("forward")):
            patches.leave(name, module, _why_touched(module))


def replaces_attention(patches: Patches) -> bool:
    """Whether self-attention outside transformers' registry was taken over."""
    return any(entry.what == own_attention.WHAT for entry in patches.replaced)


def _why_touched(module: nn.Module) -> str:
    compiled = isinstance(module, torch.jit.ScriptModule)
    return "torch.jit has compiled it" if compiled else "its forward was replaced on the instance"


def take_over_model(model: nn.Module, patches: Patches) -> None:
    """Linear layers that are left, then the model as a whole, in whose forward autocast is put right for all parts."""
    if patches.halves:
        leaves.take_over_tables(model, patches)
    head.take_over_vocabularies(model, patches)
    lora.take_over(model, patches)
    leaves.take_over_linears(model, patches)
    _bind_boundaries(model, patches)
    if patches.format.wants_autocast:
        model.__dict__[autocast.RUNS_IN_BF16] = True
    if is_ours(model.__dict__.get("forward")):
        return
    if not untouched(model):
        patches.leave("", model, f"autocast, if on, stays on inside: {_why_touched(model)}")
    else:
        in_bf16 = patches.format.wants_autocast
        patches.bind("", model, "forward", _as_stock, _AUTOCAST[in_bf16], computes=in_bf16)


def _bind_boundaries(model: nn.Module, patches: Patches) -> None:
    """Models inside, which may be called by themselves, take and give the dtype that they were loaded in."""
    for name, part in model.named_modules():
        if half_precision.LOADED in part.__dict__ and part is not model and untouched(part):
            patches.bind(name, part, "forward", _as_stock, "fp32 inside, its own dtype outside", computes=False)


_AUTOCAST = {
    False: "as stock; autocast to bf16 is switched off inside on a CPU that would emulate it",
    True: "under autocast to bf16 (oneDNN) where nothing of ours runs",
}


def _as_stock(self: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    return stock(*args, **kwargs)


def takes_padding(model: nn.Module) -> bool:
    """Whether a mask can be given to it, or to a model inside; parts of transformers' models take theirs from these."""
    models = [part for part in model.modules() if is_transformers_model(part)]
    inside = {id(part) for found in models for part in found.modules()}
    asked = [*models, *(part for part in model.modules() if id(part) not in inside)]
    kinds = {type(part) for part in asked if not isinstance(part, torch.jit.ScriptModule)}
    return any(name.endswith("mask") for kind in kinds for name in parameter_names(kind.forward))


def take_over_encoders(model: nn.Module, patches: Patches) -> bool:
    """The outermost encoders and stacks whose padding can be dropped, and their heads; after the attention."""
    taken: list[nn.Module] = []
    others: list[nn.Module] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or not untouched(module):
            continue
        if not (is_stack := stack.looks_like_stack(module)) and not encoder.looks_like_encoder(module):
            continue
        take_over = stack.take_over if is_stack else encoder.take_over
        (taken if take_over(name, module, patches) else others).append(module)
        inside.update(id(part) for part in module.modules())
    config_view.choose(model, bool(taken))
    head.take_over_spans(model, patches)
    head.take_over_tokens(model, taken, others, patches)
    if taken:
        padded_reads.note_reads(model, [part for part in model.modules() if is_transformers_model(part)], taken)
    return bool(taken)
