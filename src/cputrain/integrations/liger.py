"""Trainer's `use_liger_kernel` on a CPU: Liger's kernels are Triton's; what they are for, cputrain does anyway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers.trainer as stock

from cputrain.integrations.accelerate import Accelerator
from cputrain.log import say_once

_NAME = "apply_liger_kernel"


def _nothing_to_apply(model: Any, kernel_config: Any) -> None:
    say_once("use_liger_kernel: on a CPU cputrain's own loss without logits and fused layers do this")


@contextlib.contextmanager
def accepted(accelerator: Any) -> Iterator[None]:
    """Within, transformers' Trainer applies no Liger kernels to a model that we optimise."""
    before = getattr(stock, _NAME, None)
    if before is None or not isinstance(accelerator, Accelerator) or accelerator._why_stock is not None:
        yield
        return
    setattr(stock, _NAME, _nothing_to_apply)
    try:
        yield
    finally:
        setattr(stock, _NAME, before)
