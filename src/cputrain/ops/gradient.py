"""What every operator's backward needs: no second derivative, and no autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def without_autocast(function: Callable) -> Callable:
    """Under the user's autocast the products between our kernels would be bf16, and the kernels read floats."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def fp32_backward(backward: Callable) -> Callable:
    """For backward methods."""
    return without_autocast(once_differentiable(backward))
