"""Goes through a model and takes over what it recognises, from the largest pieces to the smallest."""

from __future__ import annotations

from torch import nn

from cputrain.layers import embeddings, encoder, feed_forward, leaves, probe, residual, self_attention, span_head
from cputrain.layers.patch import Patches, is_ours

# In this order, on each module from the outside in: a piece that is part of a larger one is still taken over, because
# the larger one falls back to it when something inside is touched.
_PIECES = (embeddings, self_attention, feed_forward, residual)


def take_over_pieces(model: nn.Module, patches: Patches) -> None:
    """Fused blocks first, single layers where no block has claimed them."""
    modules = [(name, module) for name, module in model.named_modules() if not is_ours(module.__dict__.get("forward"))]
    with probe.remembering():
        for name, module in modules:
            any(piece.take_over(name, module, patches) for piece in _PIECES)
    for name, module in modules:
        if "forward" not in module.__dict__:
            leaves.take_over(name, module, patches)


def take_over_encoders(model: nn.Module, patches: Patches) -> list[nn.Module]:
    """The outermost encoders whose padding can be dropped; pieces must have been taken over before."""
    taken: list[nn.Module] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or not encoder.looks_like_encoder(module):
            continue
        if encoder.take_over(name, module, patches):
            taken.append(module)
        inside.update(id(part) for part in module.modules())
    return taken


def take_over_span_heads(model: nn.Module, patches: Patches) -> None:
    for name, module in model.named_modules():
        span_head.take_over(name, module, patches)
