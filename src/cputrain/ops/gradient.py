"""What every operator's backward needs: no second derivative, and no autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def fp32_backward(backward: Callable) -> Callable:
    """For backward methods: under the user's autocast the products between our kernels would be bf16, and the kernels
    read floats."""
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def run(*args: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return once(*args)
        with torch.autocast("cpu", enabled=False):
            return once(*args)

    return run
