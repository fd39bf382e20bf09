"""The boundary at which padding is dropped: an encoder works on real tokens only, and gives back stock's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.layers import self_attention
from cputrain.layers.activations import activation_kind
from cputrain.layers.patch import Patches, first, is_ours, parameter_names, step_aside, tensor_obstacle
from cputrain.padding import PaddingMask, RaggedTokens, gather, scatter

_TOKEN_WISE = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity)


def _hook_obstacle(encoder: nn.Module) -> str | None:
    """A user's hook inside would see ragged shapes. (The recorders that transformers itself installs are idle here.)"""
    for part in encoder.modules():
        if part is encoder:
            continue
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            if any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values()):
                return f"{type(part).__name__} inside has a hook, which would see tokens without their padding"
    return None


def _dense_obstacle(encoder: nn.Module, hidden_states: Tensor, args: tuple, options: dict[str, Any]) -> str | None:
    """Why this call needs the padded form."""
    config = getattr(encoder, "config", None)
    for name in ("output_hidden_states", "output_attentions"):
        if options.get(name) or getattr(config, name, False):
            return f"{name} was asked for"
    if args or options.get("encoder_hidden_states") is not None or options.get("past_key_values") is not None:
        return "a cache or cross-attention is in use"
    return first(tensor_obstacle(hidden_states), _hook_obstacle(encoder))


def ragged_forward(
    self: nn.Module, stock: Callable, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    padding = attention_mask if isinstance(attention_mask, PaddingMask) else None
    if padding is None or padding.real is None:
        return stock(hidden_states, attention_mask, *args, **kwargs)
    reason = _dense_obstacle(self, hidden_states, args, kwargs)
    if reason is not None:
        step_aside(self, reason)
        return stock(hidden_states, attention_mask, *args, **kwargs)
    ragged = padding.ragged
    out = stock(gather(hidden_states, ragged), ragged, **kwargs)
    return _with_dense_hidden(out, ragged, padding)


def _with_dense_hidden(out: Any, ragged: RaggedTokens, padding: PaddingMask) -> Any:
    if isinstance(out, Tensor):
        return scatter(out, ragged, padding.batch, padding.length)
    if isinstance(out, tuple):
        return (scatter(out[0], ragged, padding.batch, padding.length), *out[1:])
    out["last_hidden_state"] = scatter(out["last_hidden_state"], ragged, padding.batch, padding.length)
    return out


def _is_token_wise(encoder: nn.Module) -> bool:
    """Whether every leaf of the encoder works on each token alone (attention itself has no leaf of its own)."""
    leaves = [part for part in encoder.modules() if not list(part.children()) and list(part.parameters(recurse=False))]
    others = [part for part in encoder.modules() if not list(part.children()) and part not in leaves]
    fine = all(type(part) in _TOKEN_WISE for part in leaves)
    return fine and all(type(part) in _TOKEN_WISE or activation_kind(part) is not None for part in others)


def _first_tensor(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _probe(encoder: nn.Module, width: int) -> bool:
    """Whether two sequences in one ragged row give what each gives alone."""
    modes = [(part, part.training) for part in encoder.modules()]
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(20240301)
            x = torch.randn(2, 5, width)
            real = torch.arange(5) < torch.tensor([[5], [3]])
            padding = PaddingMask(2, 5, real, False, lambda: None)
            stock = type(encoder).forward.__get__(encoder)
            rows = _first_tensor(stock(gather(x, padding.ragged), padding.ragged))
            alone = [_first_tensor(stock(x[i : i + 1, :n], None)) for i, n in enumerate((5, 3))]
            expected = torch.cat(alone, dim=1)
            return rows.shape == expected.shape and torch.allclose(rows, expected, rtol=1e-3, atol=1e-4)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False
    finally:
        for part, mode in modes:
            part.training = mode


def _attentions(encoder: nn.Module) -> list[nn.Module]:
    return [
        p for p in encoder.modules() if is_ours(p.__dict__.get("forward")) and self_attention._triple(p) is not None
    ]


def looks_like_encoder(module: nn.Module) -> bool:
    """Takes hidden states and a mask, holds the layers in a list; whether it may go ragged is `take_over`'s question."""
    if not any(isinstance(child, nn.ModuleList) for child in module.children()):
        return False
    return parameter_names(type(module).forward)[:2] == ["hidden_states", "attention_mask"]


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    """To be called when the self-attentions inside have been taken over."""
    attentions = _attentions(module)
    if not attentions:
        patches.leave(name, module, "padding stays: its attention was not recognised")
        return False
    if not _is_token_wise(module):
        patches.leave(name, module, "padding stays: a part of it may look at more than one token")
        return False
    width = _input_width(module, attentions[0])
    if not _probe(module, width):
        patches.leave(name, module, "padding stays: it gave another result without padding")
        return False
    patches.bind(name, module, "forward", ragged_forward, "padding dropped between embeddings and head")
    return True


def _input_width(encoder: nn.Module, attention: nn.Module) -> int:
    for part in encoder.modules():  # a projection before the layers (ALBERT) comes first
        if type(part) is nn.Linear:
            return part.in_features
    raise AssertionError("an encoder with attention has linear layers")
