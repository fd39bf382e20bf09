"""Buffers that an operator fills and reads within one call, kept for the next.

Where activations are kept as bf16, the floats that they were made from are needed no longer than that. Allocated anew,
they would leave holes between what is kept, and the process would grow as if they were kept too.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_buffers = threading.local()


def clear() -> None:
    """Gives this thread's buffers up."""
    _buffers.__dict__.clear()


def floats(name: str, *shape: int) -> Tensor:
    """A float tensor with anything in it; the same memory at the next call of this thread for this name."""
    count = math.prod(shape)
    buffer: Tensor | None = getattr(_buffers, name, None)
    if buffer is None or buffer.numel() < count:
        buffer = torch.empty(count, dtype=torch.float32)
        setattr(_buffers, name, buffer)
    return buffer[:count].view(shape)
