"""Blocks that end in LayerNorm(residual + dropout(dense(x))): `forward(hidden_states, input_tensor)`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cputrain.layers.patch import Patches, first, global_hook_obstacle, module_obstacle, step_aside, tensor_obstacle
from cputrain.layers.probe import agrees, pattern
from cputrain.ops.linear import flat
from cputrain.ops.residual_block import residual_block


def obstacle(block: nn.Module, x: Tensor, residual: Tensor) -> str | None:
    """Why the fused block can't stand in for this one now."""
    return first(
        module_obstacle(block.dense, nn.Linear),
        module_obstacle(block.dropout, nn.Dropout),
        module_obstacle(block.LayerNorm, nn.LayerNorm),
        global_hook_obstacle(),
        tensor_obstacle(x, residual, block.dense.weight, block.LayerNorm.weight),
        norm_obstacle(block.dense, block.LayerNorm),
        None if x.shape[:-1] == residual.shape[:-1] else "input and residual differ in shape",
        None if residual.shape[-1:] == block.LayerNorm.normalized_shape else "the residual has another width",
    )


def norm_obstacle(dense: nn.Linear, norm: nn.LayerNorm) -> str | None:
    """The kernels check no sizes: what doesn't fit is stock's to complain about."""
    sizes = [dense.weight.shape[:1], norm.normalized_shape]
    sizes += [p.shape for p in (dense.bias, norm.weight, norm.bias) if p is not None]
    if norm.weight is None or norm.bias is None:
        return "its LayerNorm has no weight or bias"
    return None if all(size == sizes[0] for size in sizes) else "its linear layer and LayerNorm differ in size"


def dropout_rate(dropout: nn.Module) -> float:
    return dropout.p if dropout.training else 0.0


def fused_forward(self: nn.Module, stock: Callable, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    reason = obstacle(self, hidden_states, input_tensor)
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
    )
    return out.view(input_tensor.shape)


def _formula(block: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, residual: block.LayerNorm(residual + pattern(block.dense(x)))


def is_residual_block(module: nn.Module) -> bool:
    parts = {name: type(part) for name, part in module.named_children()}
    if parts != {"dense": nn.Linear, "dropout": nn.Dropout, "LayerNorm": nn.LayerNorm}:
        return False
    if module.LayerNorm.weight is None or module.LayerNorm.bias is None or len(module.LayerNorm.normalized_shape) != 1:
        return False
    dense = module.dense
    return agrees(module, type(module).forward.__get__(module), _formula(module), dense.in_features, dense.out_features)


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    if not is_residual_block(module):
        return False
    patches.bind(
        name, module, "forward", fused_forward, "linear + dropout + residual + LayerNorm in one pass", block=True
    )
    return True
