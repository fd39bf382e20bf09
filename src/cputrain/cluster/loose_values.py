"""Reads what may be of any type: a manifest's part as a mapping or a list, and an empty one where it is neither."""

from __future__ import annotations

from typing import Any


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def within(value: Any, *keys: str) -> Any:
    """The part at a path of keys, or None."""
    for key in keys:
        value = mapping(value).get(key)
    return value
