"""Commands that take a dataclass: its fields are options on the command line, and several commands can share them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """The parameter that is a dataclass becomes one option for each of its fields, at the same place."""
    signature = inspect.signature(command, eval_str=True)
    [group] = [one for one in signature.parameters.values() if is_dataclass(one.annotation)]
    options = _parameters(group.annotation)
    listed: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        listed += options if one is group else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        chosen = group.annotation(**{option.name: given.pop(option.name) for option in options})
        command(**given, **{group.name: chosen})

    called.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return called


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(one.name, kind, default=one.default, annotation=hints[one.name]) for one in fields(group)]
