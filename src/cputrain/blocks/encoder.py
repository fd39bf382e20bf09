"""The boundary at which padding is dropped: an encoder works on real tokens only, and gives back stock's shapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.blocks import head
from cputrain.blocks.masks import padding_of
from cputrain.blocks.mlp import activation_kind
from cputrain.formats import probing
from cputrain.padding import PaddingMask, RaggedTokens, gather, scatter
from cputrain.patching import padded_reads
from cputrain.patching.bind import (
    KEEPS_PADDING,
    Patches,
    has_hook,
    outputs_to_record,
    parameter_names,
    probed,
    step_aside,
    why_not_global_hooks,
    why_not_now,
    why_not_tensors,
)
from cputrain.patching.without_padding import REAL, why_padding_is_needed

DROPPED = "padding dropped between embeddings and head"

# Leaves that work on each token alone. (An empty ParameterDict is what LoRA leaves in a layer without embeddings.)
_TOKEN_WISE = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ParameterDict, nn.ModuleDict, nn.ModuleList)

# How forwards begin; the second is DistilBERT's before transformers 5.
_BEGINNINGS = (["hidden_states", "attention_mask"], ["x", "attn_mask"])
_MOST_LAYERS = 1000


class Verdicts:
    """Why modules need their padding: asked when they are taken over, and again when parts have changed."""

    def __init__(self, ask: Callable[[nn.Module], str | None]) -> None:
        self._ask = ask
        # The classes of all parts of a module when it was last asked, and its answer.
        self._known: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[type, ...], str | None]]
        self._known = weakref.WeakKeyDictionary()

    def of(self, module: nn.Module) -> str | None:
        """None if it gives the same without padding."""
        kinds = tuple(map(type, parts_of(module)))
        known = self._known.get(module)
        if known is None or known[0] != kinds:
            known = self._known[module] = (kinds, self._ask(module))
        return known[1]


_verdicts = Verdicts(lambda encoder: _needs_padding(encoder))


def _why_not_hooks(encoder: nn.Module) -> str | None:
    """A hook inside would see ragged shapes."""
    for part in parts_of(encoder):
        if part is not encoder and has_hook(part):
            return f"{type(part).__name__} inside has a hook, which would see tokens without their padding"
    return None


def _why_not_dense(
    encoder: nn.Module, hidden_states: Tensor, padding: PaddingMask, args: tuple, options: dict[str, Any]
) -> str | None:
    """Why this call needs the padded form."""
    recorded = {name for name in ("hidden_states", "attentions") if options.get(f"output_{name}")}
    recorded |= outputs_to_record(encoder)
    if recorded:
        return f"{' and '.join(f'output_{name}' for name in sorted(recorded))} was asked for"
    if args or options.get("encoder_hidden_states") is not None or options.get("past_key_values") is not None:
        return "a cache or cross-attention is in use"
    asked = (getattr(encoder, "config", None), *parts_of(encoder))
    if any(getattr(part, "chunk_size_feed_forward", 0) for part in asked):
        return "the feed-forward works in chunks of the sequence (chunk_size_feed_forward)"
    reason = (
        padded_reads.why_not(encoder, padding)
        or why_not_tensors(hidden_states)
        or why_not_global_hooks()
        or _why_not_hooks(encoder)
    )
    return why_changed(_verdicts, encoder) if reason is None else reason


def why_changed(verdicts: Verdicts, module: nn.Module) -> str | None:
    """Why a module can't do without padding that could when it was taken over; a twin has its module's verdict."""
    verdict = None if probing.get() else verdicts.of(module)
    return None if verdict is None else f"its parts have changed, and {verdict}"


@probed
def ragged_forward(
    self: nn.Module, stock: Callable, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    reason: str | None = None
    padding = attention_mask
    if not isinstance(padding, PaddingMask):
        padding = padding_of(attention_mask, *hidden_states.shape[:2])
    if padding is not None:
        if padding.real is not None:
            reason = _why_not_dense(self, hidden_states, padding, args, kwargs)
            if reason is None:
                ragged = padding.ragged
                out = stock(gather(hidden_states, ragged), ragged, **kwargs)
                head.note_encoded(padding)
                return _with_dense_hidden(out, ragged)
    elif attention_mask is not None:
        reason = why_not_now() or "its mask is not a plain one of (batch, length)"
    if reason is not None:
        step_aside(self, reason, KEEPS_PADDING)
    head.note_encoded(None)
    return stock(hidden_states, attention_mask, *args, **kwargs)


def _with_dense_hidden(out: Any, ragged: RaggedTokens) -> Any:
    if isinstance(out, Tensor):
        return padded_reads.noted(scatter(out, ragged))
    if isinstance(out, tuple):
        return (padded_reads.noted(scatter(out[0], ragged)), *out[1:])
    out["last_hidden_state"] = padded_reads.noted(scatter(out["last_hidden_state"], ragged))
    return out


def parts_of(module: nn.Module) -> list[nn.Module]:
    """All modules inside, itself first; `modules()` builds their names too, which takes longer than a layer."""
    found = [module]
    for part in found:
        found.extend(child for child in part._modules.values() if child is not None)
    return found


def _needs_padding(encoder: nn.Module) -> str | None:
    if not _is_token_wise(encoder):
        return "a part of it may look at more than one token"
    return why_padding_is_needed(encoder, _input_width(encoder), _padded, _without)


def _is_token_wise(encoder: nn.Module) -> bool:
    """Whether every leaf of the encoder works on each token alone (attention itself has no leaf of its own)."""
    leaves = [part for part in encoder.modules() if not list(part.children())]
    return all(type(part) in _TOKEN_WISE or activation_kind(part) is not None for part in leaves)


def _first_tensor(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _mask_of_probe() -> tuple[Tensor, PaddingMask]:
    mask = torch.where(REAL, 0.0, torch.finfo(torch.float32).min)[:, None, None, :].expand(2, 1, 5, 5)
    return mask, PaddingMask(2, 5, REAL, False, lambda: mask)


def _padded(encoder: nn.Module, x: Tensor) -> Tensor:
    return _first_tensor(_stock(encoder, x, _mask_of_probe()[0]))


def _without(encoder: nn.Module, x: Tensor) -> Tensor:
    ragged = _mask_of_probe()[1].ragged
    return scatter(_first_tensor(_stock(encoder, gather(x, ragged), ragged)), ragged)


def _stock(encoder: nn.Module, x: Tensor, mask: object) -> Any:
    # DistilBERT before transformers 5 looks the mask of each layer's heads up in a list.
    options = {"head_mask": [None] * _MOST_LAYERS} if parameter_names(type(encoder).forward)[0] == "x" else {}
    return type(encoder).forward(encoder, x, mask, **options)  # type: ignore[operator]


def _input_width(encoder: nn.Module) -> int:
    """A projection before the layers (ALBERT) comes first among the linear layers."""
    return next(part.in_features for part in encoder.modules() if isinstance(part, nn.Linear))


def looks_like_encoder(module: nn.Module) -> bool:
    """Takes hidden states and a mask, holds the layers in a list; `take_over` asks whether it may go ragged."""
    if not any(isinstance(child, nn.ModuleList) for child in module.children()):
        return False
    return parameter_names(type(module).forward)[:2] in _BEGINNINGS


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    """To be called when attention goes through our function."""
    reason = _verdicts.of(module)
    if reason is not None:
        patches.leave(name, module, f"padding stays: {reason}")
        return False
    patches.bind(name, module, "forward", ragged_forward, DROPPED)
    return True
