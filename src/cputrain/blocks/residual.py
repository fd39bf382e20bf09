"""Blocks that end in LayerNorm(residual + dropout(dense(x))): `forward(hidden_states, input_tensor)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cputrain.ops.linear import flat
from cputrain.ops.residual_block import residual_block
from cputrain.patching.bind import (
    Patches,
    format_of,
    step_aside,
    why_not_global_hooks,
    why_not_module,
    why_not_tensors,
)
from cputrain.patching.probe import Formula, difference, dropped


def why_not(block: nn.Module, x: Tensor, residual: Tensor) -> str | None:
    """Why the fused block can't stand in for this one now."""
    reason = why_not_ending(block.dense, block.dropout, block.LayerNorm) or why_not_tensors(x, residual)
    if reason is None and residual.shape != (*x.shape[:-1], block.dense.weight.shape[0]):
        return "input and residual differ in shape"
    return reason


def why_not_ending(dense: nn.Module, dropout: nn.Module, norm: nn.Module) -> str | None:
    """Why linear, dropout, residual and LayerNorm can't run as one; sizes that don't fit are stock's to complain of."""
    reason = (
        why_not_module(dense, nn.Linear)
        or why_not_module(dropout, nn.Dropout)
        or why_not_module(norm, nn.LayerNorm)
        or why_not_global_hooks()
        or why_not_tensors(dense.weight, dense.bias, norm.weight, norm.bias)
    )
    if reason is not None:
        return reason
    if norm.weight is None or norm.bias is None:
        return "its LayerNorm has no weight or bias"
    sizes = {dense.weight.shape[:1], *(p.shape for p in (dense.bias, norm.weight, norm.bias) if p is not None)}
    return None if sizes == {torch.Size(norm.normalized_shape)} else "its linear layer and LayerNorm differ in size"


def dropout_rate(dropout: nn.Module) -> float:
    return dropout.p if dropout.training else 0.0


def fused_forward(self: nn.Module, stock: Callable, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    reason = why_not(self, hidden_states, input_tensor)
    if reason is not None:
        step_aside(self, reason)
        return stock(hidden_states, input_tensor)
    norm = self.LayerNorm
    out = residual_block(
        flat(hidden_states),
        flat(input_tensor).contiguous(),
        self.dense.weight,
        self.dense.bias,
        norm.weight,
        norm.bias,
        norm.eps,
        dropout_rate(self.dropout),
        format_of(self),
    )
    return out.view(input_tensor.shape)


_PARTS = {"dense": nn.Linear, "dropout": nn.Dropout, "LayerNorm": nn.LayerNorm}


def _build(block: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    dropout = block.dropout
    return lambda x, residual: block.LayerNorm(residual + dropped(block.dense(x), dropout.p, dropout.training))


def formula(module: nn.Module) -> Formula | None:
    """What a module with these parts is taken for; None if it has others."""
    if {name: type(part) for name, part in module.named_children()} != _PARTS:
        return None
    norm, dense = module.LayerNorm, module.dense
    if norm.weight is None or norm.bias is None or len(norm.normalized_shape) != 1:
        return None
    return Formula("forward", _build, (dense.in_features, dense.out_features), frozenset(_PARTS), any_size=True)


def is_residual_block(module: nn.Module) -> bool:
    found = formula(module)
    return found is not None and difference(module, found) is None


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    what = "linear + dropout + residual + LayerNorm in one pass"
    return patches.bind_if_same(name, module, formula(module), fused_forward, what, module.children())
