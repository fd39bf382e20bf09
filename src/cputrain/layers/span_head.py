"""Question-answering heads: span logits at padded positions can't win.

Stock takes the softmax over padded positions too, so that padding leaks into loss and gradients. With padding dropped
they get the lowest finite value, and both are those of the sequences alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.layers.patch import Patches, parameter_names

# The attention mask that the model around the head was called with.
_mask: ContextVar[Tensor | None] = ContextVar("cputrain_span_head_mask", default=None)


def model_forward(self: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(parameter_names(type(self).forward), args, strict=False)) if args else {}
    token = _mask.set(given.get("attention_mask", kwargs.get("attention_mask")))
    try:
        return stock(*args, **kwargs)
    finally:
        _mask.reset(token)


def head_forward(self: nn.Linear, stock: Callable, input: Tensor) -> Tensor:
    logits = stock(input)
    mask = _mask.get()
    if not isinstance(mask, Tensor) or mask.shape != logits.shape[:-1]:
        return logits
    return logits.masked_fill(mask[..., None] == 0, torch.finfo(logits.dtype).min)


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    head = module._modules.get("qa_outputs")
    if type(head) is not nn.Linear or "attention_mask" not in parameter_names(type(module).forward):
        return False
    patches.bind(name, module, "forward", model_forward, "hands its mask to the span head")
    patches.bind(
        f"{name}.qa_outputs".lstrip("."), head, "forward", head_forward, "padded positions get the lowest span logit"
    )
    return True
