"""Single modules with a faster twin, wherever they stand: Dropout, LayerNorm, activations; in low precision Linear."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cputrain.layers.activations import activation_kind, known_kind
from cputrain.layers.patch import Patches, arithmetic_of, step_aside, tensor_obstacle, untouched
from cputrain.layers.stand_in import computed
from cputrain.ops.activation import bias_activation
from cputrain.ops.dropout import dropout
from cputrain.ops.layer_norm import layer_norm
from cputrain.ops.linear import flat, linear

# Below this many elements a stock call is over before ours has checked its arguments.
WORTHWHILE = 16384
# … and a product of fewer multiplications than 256 × 128 × 128 before ours has packed its operands.
WORTHWHILE_PRODUCT = 1 << 22

# A head of a few labels: its logits stay in fp32.
FEWEST_FEATURES = 32


def dropout_forward(self: nn.Dropout, stock: Callable, input: Tensor) -> Tensor:
    input = computed(input)
    if not self.training or self.p == 0 or self.inplace or input.numel() < WORTHWHILE or input.dim() == 0:
        return stock(input)
    reason = tensor_obstacle(input)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return dropout(input, self.p)


def layer_norm_forward(self: nn.LayerNorm, stock: Callable, input: Tensor) -> Tensor:
    input = computed(input)
    if input.numel() < WORTHWHILE or input.shape[-1:] != self.normalized_shape:
        return stock(input)
    reason = tensor_obstacle(input, self.weight, self.bias)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return layer_norm(input, self.weight, self.bias, self.eps, arithmetic_of(self).storage)


def activation_forward(self: nn.Module, stock: Callable, input: Tensor) -> Tensor:
    if input.numel() < WORTHWHILE or getattr(self, "inplace", False):
        return stock(input)
    reason = tensor_obstacle(input)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return bias_activation(input, None, known_kind(self), arithmetic_of(self).storage)


def linear_forward(self: nn.Linear, stock: Callable, input: Tensor) -> Tensor:
    """The product in the module's own precision, where that isn't fp32 and the product is large."""
    input = computed(input)
    arithmetic = arithmetic_of(self)
    small = self.out_features < FEWEST_FEATURES or input.numel() * self.out_features < WORTHWHILE_PRODUCT
    if arithmetic.kind == "fp32" or small or input.shape[-1] != self.in_features:
        return stock(input)
    reason = tensor_obstacle(input, self.weight, self.bias)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    y = linear(flat(input).contiguous(), self.weight, self.bias, arithmetic)
    return y.view(*input.shape[:-1], self.out_features)


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


def take_over_linears(model: nn.Module, patches: Patches) -> None:
    """Those that nothing else has claimed; in fp32 stock's product is as fast as any."""
    if patches.kind == "fp32":
        return
    for name, module in model.named_modules():
        if type(module) is nn.Linear and untouched(module) and module.out_features >= FEWEST_FEATURES:
            patches.bind(name, module, "forward", linear_forward, f"its product in {patches.kind}")
