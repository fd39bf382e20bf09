"""The first line of a record: command, settings, versions and machine, without secrets."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from cputrain import __version__, hardware, settings
from cputrain.secrets_in_clear import is_secret_name, shown_value, shown_words

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl")
_LONGEST = 2000
_HIDDEN = "***"


def head(arguments: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`: of the training, such as TrainingArguments'. `facts`: what the caller knows of model and run."""
    environ = {name: settings.value_of(name) for name in (*settings.OF_THE_USER, settings.THREADS, settings.PRELOAD)}
    return {
        "rank": settings.number(settings.RANK),
        "size": settings.number(settings.WORLD_SIZE, 1),
        "attempt": settings.attempt(),
        "command": command(),
        "folder": os.getcwd(),
        "arguments": redacted(arguments),
        "environment": redacted({name: value for name, value in environ.items() if value}),
        "versions": versions(),
        "machine": machine(),
        **facts,
    }


def command() -> list[str]:
    """How to run it again: the command line as the user typed it, or as a launcher handed it on."""
    words = sys.orig_argv[1:] if hasattr(sys, "orig_argv") else sys.argv
    inner = next((i for i, word in enumerate(words) if word.endswith(("cputrain/__main__.py", "/cputrain"))), None)
    if inner is not None:
        return ["cputrain", *shown_words(words[inner + 1 :])]
    if words[:2] == ["-m", "cputrain"]:
        return ["cputrain", *shown_words(words[2:])]
    return ["python", *shown_words(words)]


def versions() -> dict[str, str]:
    """Of packages that are loaded already: to look others up would cost more than it tells."""
    found = {"cputrain": __version__, "python": platform.python_version()}
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    return found | {name: str(version) for name, version in loaded.items() if version}


def machine() -> dict[str, Any]:
    found = hardware.this_machine()
    return {
        "name": platform.node(),
        "cpu": found.model.value,
        "instructions": list(found.instruction_sets.value),
        "cores": found.usable_cores.value,
        "memory": found.usable_memory.value,
    }


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names that speak of secrets, and values that look like one, are hidden, however deep they stand."""
    return {
        str(name): _HIDDEN if is_secret_name(str(name)) and value else _plain(value) for name, value in values.items()
    }


def _plain(value: Any, depth: int = 4) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if depth and isinstance(value, Mapping):
        return {str(k): _HIDDEN if is_secret_name(str(k)) and v else _plain(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, (list, tuple, set)):
        return [_plain(one, depth - 1) for one in list(value)[:100]]
    return shown_value(str(value))[:_LONGEST]
