"""Whether a training fits into its cgroup: what weights, gradients and moments take is known before it begins."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from cputrain import hardware, settings
from cputrain.integrations.notices import Refused
from cputrain.log import say_once

# Activations need more: beyond this share of the limit little is left for them.
_TIGHT = 0.8


def check(model: nn.Module, optimizer: Optimizer) -> None:
    """Refused if that alone is more than the limit; a warning if it is nearly so much."""
    limit = hardware.this_machine().memory_limit
    if limit.value is None:
        return
    here = settings.number(settings.LOCAL_WORLD_SIZE, 1) or 1
    need = here * needed(model, optimizer)
    if need <= _TIGHT * limit.value:
        return
    of_ranks = f" of {here} ranks" if here > 1 else ""
    said = (
        f"weights, gradients and optimizer state{of_ranks} take {need / 2**30:.1f} GiB, and {limit.source} allows "
        f"{limit.value / 2**30:.1f} GiB"
    )
    if need > limit.value:
        raise Refused(f"the training can't fit into memory: {said}. Raise the limit, or train adapters (LoRA).")
    say_once(f"memory is tight: {said}; activations come on top")


def needed(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of one rank, at least."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = 2 if isinstance(optimizer, (Adam, AdamW)) else 0
    if isinstance(optimizer, SGD):
        moments = int(any(group["momentum"] for group in optimizer.param_groups))
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return weights + (1 + moments) * sum(parameter.nbytes for parameter in trained)
