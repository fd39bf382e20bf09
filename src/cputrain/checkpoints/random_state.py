"""The random state of a process as plain values: Python's, numpy's, torch's, and that of a script's generators."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch


def now(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": _of_numpy(),
        "torch": [_text(torch.random.get_rng_state()), *(_text(one.get_state()) for one in generators)],
    }


def restore(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Generators that were not there when it was taken keep their state."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if state["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), *rest))
    torch.random.set_rng_state(_tensor(state["torch"][0]))
    for generator, text in zip(generators, state["torch"][1:], strict=False):
        generator.set_state(_tensor(text))


def _of_numpy() -> list[Any] | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return [str(name), keys.tolist(), *rest]


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
