"""Which number format the products run in: a decision with its reason."""

from __future__ import annotations

import torch

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int16: "int16"}
_KNOWN = ("auto", "fp32")
_ANNOUNCED = ("bf16", "int16")


def choose(dtype: str | torch.dtype) -> tuple[str, str]:
    """(precision, why) for what the user asked for."""
    name = _NAMES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
    if name in _ANNOUNCED:
        raise ValueError(f"dtype {name!r} is not in this version of cputrain yet; use 'fp32' or 'auto'.")
    if name not in _KNOWN:
        raise ValueError(f"dtype must be one of 'auto', 'fp32' or torch.float32, found {dtype!r}.")
    if name == "auto":
        return "fp32", "auto: fp32 is the one precision that this version has"
    return "fp32", "asked for"
