"""Which classes transformers has for each model type: base model and heads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name


def _mappings() -> Iterator[dict[str, str | tuple[str, ...]]]:
    """Base models first; then the heads, by the mapping's name."""
    names = [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES")]
    for name in sorted(names, key=lambda name: (name != "MODEL_MAPPING_NAMES", name)):
        yield getattr(modeling_auto, name)


def model_types() -> list[str]:
    return sorted(CONFIG_MAPPING_NAMES)


def classes_of(model_type: str) -> list[str]:
    found: dict[str, None] = {}
    for mapping in _mappings():
        names = mapping.get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found[name] = None
    return list(found)


def load(model_type: str, name: str) -> type[nn.Module]:
    if hasattr(transformers, name):
        return getattr(transformers, name)
    module = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
    return getattr(module, name)
