"""Which number format the products run in: a decision with its reason."""

from __future__ import annotations

import torch

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int16: "int16"}


def choose(dtype: str | torch.dtype) -> tuple[str, str]:
    """(precision, why) for what the user asked for."""
    name = _NAMES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
    if name == "auto":
        return "fp32", "auto: stock's own precision; dtype='int16' is faster, and more exact than bf16"
    if name == "fp32":
        return "fp32", "asked for"
    if name == "int16":
        return "int16", "asked for: products of block-scaled 16-bit integers, everything else in fp32"
    if name == "bf16":
        raise ValueError(
            "dtype 'bf16' is not in this version of cputrain yet; use 'int16' (more exact), 'fp32' or 'auto'."
        )
    raise ValueError(f"dtype must be 'auto', 'fp32' or 'int16', or torch's name of one of them, found {dtype!r}.")
