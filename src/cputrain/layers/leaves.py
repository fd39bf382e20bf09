"""Single modules with a faster twin: Dropout, LayerNorm, activations, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cputrain.layers.activations import activation_kind, known_kind
from cputrain.layers.patch import Patches, step_aside, tensor_obstacle
from cputrain.ops.activation import bias_activation
from cputrain.ops.dropout import dropout
from cputrain.ops.layer_norm import layer_norm

# Below this many elements a stock call is over before ours has checked its arguments.
WORTHWHILE = 16384


def dropout_forward(self: nn.Dropout, stock: Callable, input: Tensor) -> Tensor:
    if not self.training or self.p == 0 or self.inplace or input.numel() < WORTHWHILE or input.dim() == 0:
        return stock(input)
    reason = tensor_obstacle(input)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return dropout(input, self.p)


def layer_norm_forward(self: nn.LayerNorm, stock: Callable, input: Tensor) -> Tensor:
    if input.numel() < WORTHWHILE or input.shape[-1:] != self.normalized_shape:
        return stock(input)
    reason = tensor_obstacle(input, self.weight, self.bias)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return layer_norm(input, self.weight, self.bias, self.eps)


def activation_forward(self: nn.Module, stock: Callable, input: Tensor) -> Tensor:
    if input.numel() < WORTHWHILE or getattr(self, "inplace", False):
        return stock(input)
    reason = tensor_obstacle(input)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return bias_activation(input, None, known_kind(self))


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    if type(module) is nn.Dropout:
        patches.bind(name, module, "forward", dropout_forward, "dropout drawn in parallel")
    elif type(module) is nn.LayerNorm:
        patches.bind(name, module, "forward", layer_norm_forward, "LayerNorm")
    elif activation_kind(module) in ("gelu", "gelu_tanh", "silu"):  # ReLU alone is already as fast as memory
        patches.bind(name, module, "forward", activation_forward, "activation")
    else:
        return False
    return True
