"""RMSNorm modules, whatever their class is called: x / √(mean of x² + eps), times weight or 1 + weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cputrain.blocks import leaves
from cputrain.ops.rms_norm import plain, rms_norm
from cputrain.padding import computed
from cputrain.patching.bind import Patches, format_of, parameter_names, step_aside, why_not_tensors
from cputrain.patching.probe import Formula, difference

# module.__dict__ key: what is added to the weight.
OFFSET = "_cputrain_rms_offset"
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def rms_norm_forward(self: nn.Module, stock: Callable, x: Tensor) -> Tensor:
    x = computed(x)
    weight, eps = _weight(self), _eps(self)
    if x.numel() < leaves.WORTHWHILE:
        return stock(x)
    reason = "its eps has changed its type" if eps is None else why_not_tensors(x, weight)
    if reason is None and (weight is None or weight.shape != x.shape[-1:]):
        reason = "it has lost its weight" if weight is None else f"a weight of shape {tuple(weight.shape)}"
    if reason is not None:
        step_aside(self, reason)
        return stock(x)
    assert eps is not None and weight is not None
    return rms_norm(x, weight, eps, self.__dict__[OFFSET], format_of(self))


def _weight(module: nn.Module) -> nn.Parameter | None:
    return next(iter(module._parameters.values()), None)


def _eps(module: nn.Module) -> float | None:
    found = [value for name in _EPSILONS if isinstance(value := module.__dict__.get(name), float)]
    return found[0] if len(found) == 1 else None


def _builder(offset: float) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    return lambda module: lambda x: plain(x, _weight(module), _eps(module) or 0.0, offset)


# What is added to the weight, and the formula that has it.
_FORMULAS = {offset: _builder(offset) for offset in (0.0, 1.0)}


def _vary(module: nn.Module) -> None:
    for name in _EPSILONS:
        if name in module.__dict__:
            module.__dict__[name] = 0.25  # large enough to be seen


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    weight = _weight(module)
    if module._modules or module._buffers or len(module._parameters) != 1 or weight is None or weight.dim() != 1:
        return False
    if _eps(module) is None or len(parameter_names(type(module).forward)) != 1:
        return False
    if patches.format.saves is not torch.float32:
        patches.leave(name, module, f"what is saved of it would be fp32, and the model keeps {patches.format.name}")
        return False
    reads = frozenset({*module._parameters, *_EPSILONS, "normalized_shape"})
    for offset, build in _FORMULAS.items():
        formula = Formula("forward", build, (len(weight),), reads, any_size=True, vary=_vary)
        if (reason := difference(module, formula)) is None:
            patches.bind(name, module, "forward", rms_norm_forward, "RMSNorm")
            module.__dict__[OFFSET] = offset
            return True
    patches.leave(name, module, str(reason))
    return False
