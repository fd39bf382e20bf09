"""What transformers' mask functions say, read from their parts instead of asked for every pair of tokens.

A mask function is put together by transformers (`and_masks`, `sliding_window_overlay` …): each part is a function made
by another, and is recognised by its code; what it was made with is in its closure. So a packed batch or a window never
becomes a matrix of tokens × tokens, and a function that has an unknown part is left to stock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from cputrain.ops.attention import Sequences


@dataclass
class Sight:
    """What a token sees: tokens before it as far away as `before` (None: all), and behind it; packed sequences."""

    before: int | None = None
    behind: int | None = None
    numbers: list[Tensor] = field(default_factory=list)  # (batch, length): tokens of different numbers are apart
    positions: list[Tensor] = field(default_factory=list)  # in place of their places in the row

    def narrowed(self, before: int | None = None, behind: int | None = None) -> bool:
        self.before, self.behind = _least(self.before, before), _least(self.behind, behind)
        return True


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def read(function: Callable) -> Sight | None:
    """None if part of the function is unknown."""
    sight = Sight()
    return sight if _reads(function, sight) else None


def _reads(function: Any, sight: Sight) -> bool:
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return sight.narrowed(behind=0)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):  # transformers 5 has it
        return True
    name, made_with = _origin(function)
    if name == "and_masks":
        return all(_reads(part, sight) for part in made_with["mask_functions"])
    if name == "sliding_window_overlay":
        return _is_window(made_with) and sight.narrowed(before=made_with["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return _is_window(made_with) and sight.narrowed(made_with["sliding_window"], made_with["sliding_window"])
    if name == "packed_sequence_mask_function":
        sight.numbers.append(made_with["packed_sequence_mask"])
        return True
    if name == "remap_positions_for_packed_sequence":
        sight.positions.append(made_with["position_ids"])
        return _reads(made_with["mask_function"], sight)
    return False


def _is_window(made_with: dict[str, Any]) -> bool:
    return type(made_with["sliding_window"]) is int and made_with["sliding_window"] > 0


_MAKERS = (
    "and_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)


@cache
def _makers() -> dict[CodeType, str]:
    """By the code of what it returns, each function of transformers that makes mask functions."""
    from transformers import masking_utils

    makers = [(name, getattr(masking_utils, name, None)) for name in _MAKERS]
    inside = ((name, constant) for name, maker in makers if maker for constant in maker.__code__.co_consts)
    return {code: name for name, code in inside if isinstance(code, CodeType) and code.co_name != "<genexpr>"}


def _origin(function: Any) -> tuple[str | None, dict[str, Any]]:
    """The name of the function that made it, and what that was given."""
    code = getattr(function, "__code__", None)
    name = _makers().get(code) if isinstance(code, CodeType) else None
    if name is None or not isinstance(code, CodeType):
        return None, {}
    return name, {free: cell.cell_contents for free, cell in zip(code.co_freevars, function.__closure__, strict=True)}


def packed(sight: Sight, batch: int, length: int) -> Sequences | None:
    """The sequences that stand behind one another in the rows of a batch; None if they don't."""
    if not all(_of_batch(x, batch, length) for x in (*sight.numbers, *sight.positions)):
        return None
    first = torch.zeros(batch, length, dtype=torch.bool)
    first[:, :1] = True
    for numbers in sight.numbers:
        steps = numbers.diff(dim=1)
        if bool((steps < 0).any()):
            return None  # a number might come again
        first[:, 1:] |= steps != 0
    # Causality and windows are of the positions: within a sequence these must count on.
    for positions in sight.positions:
        if bool(((positions.diff(dim=1) != 1) & ~first[:, 1:]).any()):
            return None
    starts = first.flatten().nonzero().squeeze(1)
    ends = torch.cat((starts[1:], torch.tensor([batch * length])))
    return Sequences(starts, ends - starts, batch * length)


def _of_batch(x: Any, batch: int, length: int) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.is_cpu and x.shape == (batch, length)
