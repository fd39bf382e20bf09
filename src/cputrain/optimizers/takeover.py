"""Taking an optimizer over in place, and giving it back: same object, class, groups, state and wrappers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from cputrain.optimizers.adam import FusedAdam
from cputrain.optimizers.fused_step import FusedStep
from cputrain.optimizers.sgd import FusedSGD
from cputrain.optimizers.tensors import is_dense, is_plain

# Exactly these classes: a subclass may mean something else by its step.
_FUSED: dict[type[Optimizer], type[FusedStep]] = {AdamW: FusedAdam, Adam: FusedAdam, SGD: FusedSGD}
_ENTRY = "_init_group"


@dataclass(frozen=True)
class Takeover:
    """Whether an optimizer's step is ours, and why or why not."""

    taken: bool
    reason: str


def take_over(optimizer: Optimizer) -> Takeover:
    """Make the optimizer's `step` run the fused kernels, in place; harmless when repeated."""
    inner = unwrapped(optimizer)
    record = _examined(inner)
    if record.taken and _ENTRY not in inner.__dict__:
        setattr(inner, _ENTRY, _FUSED[type(inner)](inner))
    return record


def described(optimizer: Optimizer) -> str:
    """What its `step` runs now, and why; nothing is changed."""
    inner = unwrapped(optimizer)
    record = _examined(inner)
    if record.taken and _ENTRY not in inner.__dict__:
        return f"{_name(inner)} keeps stock's step: it has changed since; call cputrain.optimize again"
    return record.reason


def _examined(inner: Optimizer) -> Takeover:
    if type(inner) not in _FUSED:
        names = ", ".join(sorted(kind.__name__ for kind in _FUSED))
        return Takeover(False, f"{_name(inner)} keeps its own step: only torch.optim's {names} have a fused one")
    bound = inner.__dict__.get(_ENTRY)
    if (bound is not None and not isinstance(bound, FusedStep)) or not hasattr(inner, _ENTRY):
        return Takeover(False, f"{_name(inner)} doesn't collect its groups as torch.optim's own does")
    return _judge(inner)


def give_back(optimizer: Optimizer) -> None:
    """Undo `take_over`; nothing happens to an optimizer that isn't ours."""
    inner = unwrapped(optimizer)
    if isinstance(inner.__dict__.get(_ENTRY), FusedStep):
        delattr(inner, _ENTRY)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a wrapper such as Accelerate's, which keeps it as `optimizer`."""
    while type(optimizer) not in _FUSED and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _judge(optimizer: Optimizer) -> Takeover:
    """What the kernels will serve as things are; each step looks again, because groups and gradients change."""
    served, kept = 0, Counter[str]()
    for group in optimizer.param_groups:
        option = _FUSED[type(optimizer)].why_not(group)
        for parameter in group["params"]:
            if option:
                kept[option] += 1
            elif not (is_plain(parameter) and is_dense(parameter)):
                kept[_kind_of(parameter)] += 1
            else:
                served += 1
    reasons = "; ".join(f"{count} parameters keep stock's ({reason})" for reason, count in kept.items())
    if not served:
        return Takeover(False, f"{_name(optimizer)} keeps stock's step: {reasons}")
    fused = f"{_name(optimizer)}: {served} parameters are updated in one pass"
    return Takeover(True, f"{fused}; {reasons}" if reasons else fused)


def _kind_of(parameter: Tensor) -> str:
    if type(parameter) not in (Tensor, Parameter):
        return type(parameter).__name__
    if parameter.dtype is torch.float32 and parameter.is_cpu:
        return "empty, or with gaps in memory"
    return f"{parameter.dtype} on {parameter.device.type}"


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
