"""AdamW and Adam in one pass over parameters, gradients and moments, on the state that stock keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.optimizers.fused_step import FusedStep, Group, options_set, tensors_among
from cputrain.optimizers.tensors import address, is_plain, lies_like, pointers, sizes


class FusedAdam(FusedStep):
    """Serves torch.optim.AdamW and torch.optim.Adam; `decoupled_weight_decay` tells them apart."""

    @staticmethod
    def why_not(group: Group) -> str:
        return options_set(group, ("amsgrad", "maximize", "differentiable", "capturable")) or tensors_among(
            group, ("lr", "betas", "eps", "weight_decay")
        )

    def state_of(self, group: Group, parameter: Tensor) -> tuple[Tensor, ...] | None:
        state = self.optimizer.state[parameter]
        if not state:  # stock makes it, so that it has the keys, shapes and types of this torch
            self._stock({**group, "params": [parameter]}, [], [], [], [], [], [])
        step, average, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
        if not (isinstance(step, Tensor) and is_plain(step) and step.numel() == 1):
            return None
        for moment in (average, square):
            if not (is_plain(moment) and lies_like(moment, parameter)):
                return None
        return average, square, step

    def update(self, group: Group, columns: tuple[tuple[Tensor, ...], ...]) -> None:
        parameters = columns[0]
        rates = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        # A state dict of a stock older than `decoupled_weight_decay` has AdamW's groups without it.
        decoupled = group.get("decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW)
        *moments_and_others, steps = columns
        counts = sizes(parameters)
        arrays = [
            counts,
            *(pointers(column, counts) for column in moments_and_others),
            pointers(steps, [1] * len(steps)),
        ]
        native.kernels().adam(len(parameters), *map(address, arrays), *map(float, rates), decoupled)
