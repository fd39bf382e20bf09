"""Linear layers with adapters, of peft's LoRA: the base product and the low-rank path as one operator.

Quantised layers are always ours, with an adapter or without: bitsandbytes' own evaluation would spoil them.

Whatever peft does to a layer (another adapter, none, merged weights) is read at each call. What isn't plain LoRA runs
peft's own code, whose base layer still multiplies in the layer's format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from cputrain.blocks import projection, quantised
from cputrain.blocks.leaves import WORTHWHILE_PRODUCT
from cputrain.ops.adapted_linear import Adapted, adapted_linear
from cputrain.ops.linear import flat
from cputrain.padding import computed
from cputrain.patching.bind import Patches, format_of, step_aside, untouched, why_not_tensors

LORA = "product and adapter in one operator; its dropout's mask is recomputed"


def lora_forward(self: nn.Module, stock: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    x = computed(x)
    out_features, in_features = projection.features(self)
    if _is_small(self, x, out_features):
        return stock(x, *args, **kwargs)
    layer = why_not(self, x, in_features, bool(args or kwargs)) or projection.read(self)
    if isinstance(layer, str):
        step_aside(self, layer)
        return stock(x, *args, **kwargs)
    return compute(x, layer, format_of(self))


def quantised_forward(self: nn.Module, stock: Callable, x: Tensor) -> Tensor:
    x = computed(x)
    layer = why_not(self, x, self.in_features, False) or projection.without_adapter(self)  # type: ignore[arg-type]
    if not isinstance(layer, str):
        return compute(x, layer, format_of(self))
    step_aside(self, layer)
    return _without_repacking(self, stock, x)


def _without_repacking(module: nn.Module, stock: Callable, x: Tensor) -> Tensor:
    """Where our operator can't run: what bitsandbytes does in training; in evaluation it would change the weight."""
    if module.training or x.requires_grad or not quantised.is_four_bits(module):
        return stock(x)
    weight = quantised.weight_of(module)
    if isinstance(weight, str):  # one that was repacked already
        return stock(x)
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return F.linear(x, weight.dense().to(x.dtype), None if bias is None else bias.to(x.dtype))


def compute(x: Tensor, layer: Adapted, format: Any) -> Tensor:
    """x of any shape."""
    y = adapted_linear(flat(x).contiguous(), layer, format)
    return y.view(*x.shape[:-1], y.shape[-1])


def _is_small(module: nn.Module, x: Tensor, out_features: int) -> bool:
    """Stock is over before ours has checked its arguments; a quantised layer is always ours."""
    return x.numel() * out_features < WORTHWHILE_PRODUCT and not quantised.is_quantised(projection.base_of(module))


def why_not(module: nn.Module, x: Tensor, in_features: int, more: bool) -> str | None:
    if more:
        return "it was called with more than an input"
    if x.dim() == 0 or x.shape[-1] != in_features:
        return f"an input of shape {tuple(x.shape)}"
    return why_not_tensors(x)


def take_over(model: nn.Module, patches: Patches) -> None:
    """Those of peft's LoRA layers whose base is linear, and quantised layers."""
    for name, module in model.named_modules():
        if projection.is_lora(module) and untouched(module) and _has_linear_base(module):
            patches.bind(name, module, "forward", lora_forward, LORA, list(module.children()))
        elif quantised.is_quantised(module) and untouched(module):
            bits = 4 if quantised.is_four_bits(module) else 8
            patches.bind(
                name, module, "forward", quantised_forward, f"product of its {bits}-bit weight as it is stored"
            )


def _has_linear_base(module: nn.Module) -> bool:
    return projection.is_linear(module) or projection.is_conv1d(projection.base_of(module))


def described(model: nn.Module) -> tuple[str, str, str] | None:
    """One row about all adapters, or None."""
    layers: list[Any] = [module for module in model.modules() if projection.is_lora(module)]
    if not layers:
        return None
    active: Counter[str] = Counter()
    for layer in layers:
        state = "disabled" if layer.disable_adapters else "merged" if layer.merged else _active(layer)
        active[state] += 1
    loaded = sorted({name for layer in layers for name in layer.lora_A})
    states = "; ".join(f"{state} on {count} layers" for state, count in active.items())
    return ("adapters", "LoRA", f"{', '.join(loaded)} loaded; {states}")


def _active(layer: Any) -> str:
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    return (
        ", ".join(f"{name} (rank {layer.r[name]}, scaling {layer.scaling[name]:g})" for name in names) or "none active"
    )
