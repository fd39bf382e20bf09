"""What autocast to bf16 means inside an optimised model.

Trainer, Accelerate and users put it around the whole forward. On a CPU without bf16 it would emulate every product, ten
times slower than fp32: there, and where bf16 is slower than fp32, it is switched off inside the model, and what the
user gets instead is the model's own precision. On a CPU that is fast at bf16 it stays on for what isn't ours, and is
switched on there in a model that is to use bf16; our own parts compute in int16, or convert what they multiply. Single
layers among code that isn't ours run as stock then: that code may count on results in bf16, as DeBERTa's mask does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cputrain import hardware
from cputrain.formats import Format, speed
from cputrain.log import say_once

# module.__dict__ key of a model whose parts run under autocast, because the CPU is fast at it.
RUNS_IN_BF16 = "_cputrain_runs_in_bf16"


def wanted(module: nn.Module, format: Format) -> bool | None:
    """Whether autocast to bf16 should be on while `module` runs; None: as it is."""
    if RUNS_IN_BF16 in module.__dict__:
        return None if torch.is_autocast_enabled("cpu") else True
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is not torch.bfloat16:
        return None
    single = not module._modules
    if format.overrules_autocast and not single:
        return False
    if speed.bf16_pays():
        return None
    why = "is slower at it than at fp32" if hardware.has_bf16() else "has no bf16, and would emulate it"
    say_once(f"autocast to bf16 is switched off inside the model: this CPU {why}")
    return False


def as_floats(values: Iterable[Any]) -> list[Any]:
    """What came from a part that ran under autocast, as the fp32 that the parameters are in."""
    return [x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x for x in values]
