"""Embeddings whose table is the weight of a vocabulary head: one gradient for both (ops/shared_table.py).

Stock's forward runs, whatever the class makes of the rows (Gemma scales them); only the look-up in the table is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cputrain.ops.shared_table import CAN_COUNT
from cputrain.ops.tied_embedding import tied_embedding
from cputrain.patching.bind import Patches, untouched, why_not_tensors

WHAT = "its gradient is added into the vocabulary head's"


class _Lookup(TorchFunctionMode):
    """Looks rows of one table up in our way, if nothing but a padding id is asked for."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, function: Callable, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is F.embedding:
            given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | (kwargs or {})
            ids, table, padding_id = given.pop("input"), given.pop("weight"), given.pop("padding_idx", None)
            special = len(args) > 3 or any(given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
            if table is self.table and not special and type(ids) is Tensor and ids.dtype == torch.int64 and ids.is_cpu:
                return tied_embedding(table, ids, padding_id)
        return function(*args, **(kwargs or {}))


def embedding_forward(self: nn.Embedding, stock: Callable, *args: Any, **kwargs: Any) -> Tensor:
    if not torch.is_grad_enabled() or not self.weight.requires_grad or why_not_tensors(self.weight) is not None:
        return stock(*args, **kwargs)
    with _Lookup(self.weight):
        return stock(*args, **kwargs)


def take_over(model: nn.Module, head: nn.Linear, patches: Patches) -> None:
    if not CAN_COUNT:
        return
    bypassed = {part for entry in patches.replaced for part in entry.bypassed}
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and part.weight is head.weight and part not in bypassed and untouched(part):
            patches.bind(name, part, "forward", embedding_forward, WHAT)
