"""How a fused update takes the place of stock's inside an optimizer's own `step`.

Stock's `step` asks `self._init_group(group, lists…)` to collect a group's parameters, gradients and state, and then
updates what was collected. A `FusedStep` bound to the instance under that name updates what the kernels can serve and
collects only the rest. So it sits beneath everything that wraps `step`: schedulers, hooks, profilers, Accelerate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from cputrain.log import logger
from cputrain.optimizers.tensors import is_plain, lies_like

Group: TypeAlias = "dict[str, Any]"
Row: TypeAlias = "tuple[Tensor, ...]"  # a parameter, its gradient, and the tensors of its state


class FusedStep(ABC):
    """Stands in for `_init_group` of one optimizer; subclasses know one algorithm."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._stock = type(optimizer)._init_group.__get__(optimizer)
        self._logged: set[str] = set()

    def __call__(self, group: Group, *collected: list[Any]) -> bool:
        """Update what the kernels serve and let stock collect the rest; the answer is stock's (complex, sparse)."""
        reason = self.why_not(group) or self._why_not_now()
        if reason:
            return self._leave_to_stock(group, collected, reason)
        rows, rest = self._deal(group)
        if len({row[0].data_ptr() for row in rows}) < len(rows):
            return self._leave_to_stock(group, collected, "two of its parameters share their memory")
        answer = self._stock({**group, "params": rest}, *collected)  # first, because it may refuse the group
        if rows:
            columns = tuple(zip(*rows, strict=True))
            self.update(group, columns)
            # Native writes are invisible to autograd, which must refuse a backward pass through the old values.
            written = (tensor for column in (columns[0], *columns[2:]) for tensor in column)
            torch.autograd.graph.increment_version(written)
        return answer

    @staticmethod
    @abstractmethod
    def why_not(group: Group) -> str:
        """Which option of the group the kernel lacks; empty if none."""

    @abstractmethod
    def state_of(self, group: Group, parameter: Tensor) -> tuple[Tensor, ...] | None:
        """The state that the kernel updates with the parameter, or None if stock must serve it."""

    @abstractmethod
    def update(self, group: Group, columns: tuple[tuple[Tensor, ...], ...]) -> None:
        """One step for all of the parameters, their gradients, and the tensors of `state_of`."""

    def _leave_to_stock(self, group: Group, collected: tuple[list[Any], ...], reason: str) -> bool:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("%s: a parameter group keeps stock's step: %s", type(self.optimizer).__name__, reason)
        return self._stock(group, *collected)

    def _why_not_now(self) -> str:
        """What of the moment, rather than of the group's options, needs stock's step."""
        if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
            return "torch.compile traces it"
        if (
            getattr(self.optimizer, "grad_scale", None) is not None
            or getattr(self.optimizer, "found_inf", None) is not None
        ):
            return "a gradient scaler is in use"
        return ""

    def _deal(self, group: Group) -> tuple[list[Row], list[Tensor]]:
        """The rows that the kernel serves, and the parameters that stock must."""
        rows, rest = [], []
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            served = is_plain(parameter) and is_plain(grad) and lies_like(grad, parameter)
            state = self.state_of(group, parameter) if served else None
            if state is None:
                rest.append(parameter)
            else:
                rows.append((parameter, grad, *state))
        return rows, rest


def options_set(group: Group, names: tuple[str, ...]) -> str:
    """The first of the options that is switched on, as a reason."""
    return next((f"{name}=True" for name in names if group.get(name)), "")


def tensors_among(group: Group, names: tuple[str, ...]) -> str:
    """The first of the rates that is a tensor rather than a number (or holds one), as a reason."""
    for name in names:
        values = group[name] if isinstance(group[name], tuple | list) else (group[name],)
        if any(isinstance(value, Tensor) for value in values):
            return f"{name} is a tensor"
    return ""
