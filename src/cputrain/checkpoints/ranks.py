"""What ranks tell each other about their checkpoints. All of them have to call these, in the same order."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

T = TypeVar("T")


def number() -> int:
    return _group().get_rank() if size() > 1 else 0


def size() -> int:
    group = _group()
    return group.get_world_size() if group is not None else 1


def of_all(value: T) -> list[T]:
    """Every rank's value, by rank. Fails if a rank is gone: then none goes on."""
    if size() == 1:
        return [value]
    found: list[Any] = [None] * size()
    _group().all_gather_object(found, value)
    return found


def of_first(value: T) -> T:
    """Rank 0's."""
    if size() == 1:
        return value
    found = [value]
    _group().broadcast_object_list(found, src=0)
    return found[0]


def _group() -> Any:
    """torch.distributed, if this process has a group."""
    found: Any = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None
