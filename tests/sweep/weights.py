"""Weights under which no part of a model can hide: no zero biases, no LayerScale of ones, no zero-initialised layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(_random_like(parameter, generator))


def _random_like(old: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors keep their values and get noise (norms, decay rates); matrices keep the scale of what goes through."""
    noise = torch.randn(old.shape, generator=generator, dtype=torch.float32).to(old.dtype)
    structured = old.dim() < 2 or old.numel() == 0 or float(old.mean().abs()) > 0.1
    if structured:
        return old + 0.1 * noise
    fan_in = old[0].numel()
    return noise * fan_in**-0.5


def switch_dropout_off(model: nn.Module, *, layers_only: bool) -> None:
    """Rates that modules have of their own. Whole layers are never dropped: stock and ours would drop other ones."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
            if is_rate and type(value) is float and ("layerdrop" in name or not layers_only):
                setattr(module, name, 0.0)
