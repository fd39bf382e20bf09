"""Single modules with a faster twin, wherever they stand: Dropout, LayerNorm, activations; in low precision Linear.

Linear layers and embeddings whose frozen weights are bf16 or fp16 are always ours: activations are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cputrain.blocks.mlp import activation_kind, known_kind
from cputrain.ops.activation import bias_activation
from cputrain.ops.dropout import dropout
from cputrain.ops.linear import flat, linear
from cputrain.ops.norm import layer_norm
from cputrain.padding import computed
from cputrain.patching.bind import Patches, format_of, step_aside, untouched, why_not_bias_size, why_not_tensors
from cputrain.patching.half_precision import HALF, is_frozen_half, is_half

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
    reason = why_not_tensors(input)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return dropout(input, self.p)


def layer_norm_forward(self: nn.LayerNorm, stock: Callable, input: Tensor) -> Tensor:
    input = computed(input)
    if input.numel() < WORTHWHILE or input.shape[-1:] != self.normalized_shape:
        return stock(input)
    reason = why_not_tensors(input, self.weight, self.bias)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return layer_norm(input, self.weight, self.bias, self.eps, format_of(self).saves)


def activation_forward(self: nn.Module, stock: Callable, input: Tensor) -> Tensor:
    if input.numel() < WORTHWHILE or getattr(self, "inplace", False):
        return stock(input)
    reason = why_not_tensors(input)
    if reason is not None:
        step_aside(self, reason)
        return stock(input)
    return bias_activation(input, None, known_kind(self), format_of(self).saves)


def linear_forward(self: nn.Linear, stock: Callable, input: Tensor) -> Tensor:
    """The product in the module's own precision, where that isn't fp32 and the product is large."""
    return _product(self, stock, input, self.weight)


def conv1d_forward(self: nn.Module, stock: Callable, x: Tensor) -> Tensor:
    """The same for transformers' Conv1D (GPT-2), a linear layer whose weight lies the other way round."""
    return _product(self, stock, x, self.weight.t())


def _product(module: nn.Module, stock: Callable, input: Tensor, w_OI: Tensor) -> Tensor:
    input = computed(input)
    if w_OI.dtype in HALF and input.dtype is torch.float32:
        return _product_of_halves(module, input, w_OI)
    format = format_of(module)
    out_features, in_features = w_OI.shape
    small = out_features < FEWEST_FEATURES or input.numel() * out_features < WORTHWHILE_PRODUCT
    if format.is_stock or small or input.shape[-1] != in_features:
        return stock(input)
    reason = why_not_tensors(input, module.weight, module.bias) or why_not_bias_size(module.bias, out_features)
    if reason is not None:
        step_aside(module, reason)
        return stock(input)
    y = linear(flat(input).contiguous(), w_OI, module.bias, format)
    return y.view(*input.shape[:-1], out_features)


def _product_of_halves(module: nn.Module, input: Tensor, w_OI: Tensor) -> Tensor:
    """Of a frozen weight in its two bytes; what is small, odd or not frozen any more, is unpacked."""
    if torch.is_autocast_enabled("cpu"):
        return F.linear(input, w_OI, module.bias)
    bias = module.bias
    reason = why_not_tensors(input, bias) or why_not_bias_size(bias, len(w_OI)) or _why_not_halves(w_OI, input)
    if reason is None and input.numel() * len(w_OI) >= WORTHWHILE_PRODUCT:
        return linear(flat(input).contiguous(), w_OI, bias, format_of(module)).view(*input.shape[:-1], len(w_OI))
    if reason is not None:
        step_aside(module, reason, "unpacks its weight")
    return F.linear(input, w_OI.float(), None if bias is None else bias.float())


def _why_not_halves(w_OI: Tensor, input: Tensor) -> str | None:
    if not is_frozen_half(w_OI):
        return f"its {w_OI.dtype} weight is trained since: call cputrain.optimize again"
    if type(w_OI) not in (Tensor, nn.Parameter) or not w_OI.is_cpu or w_OI.layout is not torch.strided:
        return f"a weight is a {type(w_OI).__name__} on {w_OI.device}"
    return None if input.dim() and input.shape[-1] == w_OI.shape[1] else f"an input of shape {tuple(input.shape)}"


def table_forward(self: nn.Embedding, stock: Callable, *args: Any, **kwargs: Any) -> Tensor:
    rows = stock(*args, **kwargs)
    return rows.float() if rows.dtype in HALF else rows


def take_over_tables(model: nn.Module, patches: Patches) -> None:
    """Frozen ones, in a model whose activations are fp32."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and untouched(module) and _is_served_half(module):
            patches.bind(name, module, "forward", table_forward, "rows as fp32")


def _is_served_half(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and is_half(weight) and not weight.requires_grad


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
    for name, module in model.named_modules():
        forward, width = _linear_kind(module)
        if forward is None or not untouched(module):
            continue
        if patches.halves and _is_served_half(module):
            what = f"its product in {patches.format.name}, of a frozen {module.weight.dtype} weight"
            patches.bind(name, module, "forward", forward, what.replace("torch.", ""))
        elif width >= FEWEST_FEATURES and not patches.format.is_stock:
            patches.bind(name, module, "forward", forward, f"its product in {patches.format.name}")


def _linear_kind(module: nn.Module) -> tuple[Callable | None, int]:
    """Which forward of ours serves it, and its out-features; transformers need not be imported to know its Conv1D."""
    if type(module) is nn.Linear:
        return linear_forward, module.out_features
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    return (conv1d_forward, module.weight.shape[1]) if is_conv1d else (None, 0)
