"""What the environment asks of a training, which wins over the script. `cputrain run --dtype …` writes it there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cputrain.log import say_once

if TYPE_CHECKING:
    import torch

DTYPE, DTYPES = "CPUTRAIN_DTYPE", ("auto", "fp32", "bf16", "int16")
PADDING, PADDINGS = "CPUTRAIN_PADDING", ("drop", "keep")
# How gradients travel between ranks, and whether the samples of a global batch are dealt to the ranks by length.
GRADIENTS, COMPRESSIONS = "CPUTRAIN_GRAD_COMPRESSION", ("none", "bf16")
BALANCE, BALANCES = "CPUTRAIN_BALANCE", ("length", "off")
# How many cores of each rank are kept free for communication, and which CPUs these are ("6,7") where ranks are bound.
COMMUNICATION_CORES, COMMUNICATION_CPUS = "CPUTRAIN_CORES_FOR_COMMUNICATION", "CPUTRAIN_COMMUNICATION_CPUS"


def win_over(script_dtype: str | torch.dtype, script_padding: str) -> tuple[str | torch.dtype, str]:
    """dtype and padding of a call of `optimize`, or what the environment says instead."""
    dtype, padding = one_of(DTYPE, DTYPES), one_of(PADDING, PADDINGS)
    for name, asked, given in ((DTYPE, dtype, script_dtype), (PADDING, padding, script_padding)):
        if asked not in (None, given):
            say_once(f"{name}={asked} holds, in place of the script's {given}")
    return dtype or script_dtype, padding or script_padding


def one_of(name: str, known: tuple[str, ...]) -> str | None:
    """A variable's value, None if it has none; a misspelt one is refused."""
    value = os.environ.get(name)
    if value and value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, found {value!r}.")
    return value or None
