"""Whether `optimize` and `restore` leave a model, and the random generators, as they were."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import cputrain

if TYPE_CHECKING:
    from tests.sweep.cases import Case, Pristine, Verdict

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that is on the modules, by `module.attribute`."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name}|class"] = type(module)
        for key, value in vars(module).items():
            _describe(f"{name}|{key}", value, found, depth=0)
    return found


def _describe(path: str, value: Any, found: dict[str, Any], depth: int) -> None:
    if isinstance(value, Tensor):
        found[path] = (id(value), value.dtype, value.requires_grad, value.detach().clone())
    elif isinstance(value, _PLAIN):
        found[path] = value
    elif isinstance(value, nn.Module):
        found[path] = id(value)
    elif isinstance(value, dict) and depth < 6:
        found[path] = (type(value), list(map(str, value)))
        for key, part in value.items():
            _describe(f"{path}[{key}]", part, found, depth + 1)
    elif isinstance(value, (list, tuple, set)) and depth < 6:
        found[path] = (type(value), len(value))
        for number, part in enumerate(value if not isinstance(value, set) else sorted(value, key=str)):
            _describe(f"{path}[{number}]", part, found, depth + 1)
    elif hasattr(value, "to_dict") and hasattr(value, "__dict__") and depth < 6:
        found[path] = (id(value), type(value))
        for key, part in vars(value).items():
            _describe(f"{path}.{key}", part, found, depth + 1)
    else:
        found[path] = (id(value), type(value)) if not hasattr(value, "__func__") else (id(value.__func__), "method")


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = [f"{path} is gone" for path in before.keys() - after.keys()]
    found += [f"{path} is new" for path in after.keys() - before.keys()]
    found += [f"{path} has changed" for path in before.keys() & after.keys() if not _same(before[path], after[path])]
    return sorted(found)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and a == b


def _bits(x: Tensor) -> Tensor:
    return torch.nan_to_num(x) if x.is_floating_point() and x.layout is torch.strided else x


def generators() -> tuple[bytes, Any, Any]:
    numpy_state = np.random.get_state()  # transformers draw from it
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (numpy_state[1].tobytes(), *numpy_state[2:])


def check(case: Case, given: Pristine) -> Verdict:
    from tests.sweep.cases import Verdict, _told_last

    model = copy.deepcopy(given.model)
    for number, module in enumerate(model.modules()):  # modes as a user may have left them
        module.training = number % 3 != 0
    before, random_before = state_of(model), generators()
    try:
        cputrain.optimize(model, dtype=case.dtype, padding=case.padding)
        random_after = generators()
        cputrain.restore(model)
    except Exception:  # noqa: BLE001
        return Verdict("crash", f"in optimize or restore: {_told_last()}")
    found = changes(before, state_of(model))
    found += ["random generators have moved"] if random_before != random_after else []
    if found:
        return Verdict("wrong", f"after restore {len(found)} attributes: {'; '.join(found[:3])}")
    return Verdict("same")
