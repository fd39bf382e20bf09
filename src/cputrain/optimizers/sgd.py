"""SGD with momentum, dampening, weight decay and Nesterov's variant, in one pass, on the state that stock keeps."""

from __future__ import annotations

from torch import Tensor

from cputrain import native
from cputrain.optimizers.fused_step import FusedStep, Group, options_set, tensors_among
from cputrain.optimizers.tensors import address, is_plain, lies_like, pointers, sizes


class FusedSGD(FusedStep):
    """Serves torch.optim.SGD."""

    @staticmethod
    def why_not(group: Group) -> str:
        return options_set(group, ("maximize", "differentiable")) or tensors_among(
            group, ("lr", "momentum", "dampening", "weight_decay")
        )

    def state_of(self, group: Group, parameter: Tensor) -> tuple[Tensor, ...] | None:
        if group["momentum"] == 0:
            return ()
        # A parameter's first step is stock's, which makes the buffer from the gradient.
        buffer = self.optimizer.state[parameter].get("momentum_buffer")
        if buffer is None or not (is_plain(buffer) and lies_like(buffer, parameter)):
            return None
        return (buffer,)

    def update(self, group: Group, columns: tuple[tuple[Tensor, ...], ...]) -> None:
        parameters, gradients, *buffers = columns
        rates = (group["lr"], group["momentum"], group["dampening"], group["weight_decay"])
        counts = sizes(parameters)
        arrays = [counts, *(pointers(column, counts) for column in (parameters, gradients, *buffers))]
        addresses = [*map(address, arrays), *([] if buffers else [None])]
        native.kernels().sgd(len(parameters), *addresses, *map(float, rates), group["nesterov"])
