"""Which elements a model chose: experts, queries, blocks.

Two scores that are nearly equal change places for the least error, and all that follows is another computation. So a
result that differs is computed again with stock's choices in the place of ours: an error beside the choice remains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CHOOSES = {torch.topk, Tensor.topk}


class Record(TorchFunctionMode):
    """Keeps the indices of every top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _CHOOSES:
            self.made.append(out[1].detach().clone())
        return out


class Replay(TorchFunctionMode):
    """Gives indices that were recorded, in their order, as long as they are of the same shape."""

    def __init__(self, made: list[Tensor]) -> None:
        super().__init__()
        self.made = list(made)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in _CHOOSES or not self.made or self.made[0].shape != out[1].shape:
            return out
        chosen = self.made.pop(0)
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        return type(out)((scores.gather(dim, chosen), chosen))
