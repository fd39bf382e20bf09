"""Puts our classes in stock's place at the moment when a script imports the module that has them.

Nothing is imported that the script doesn't ask for. Each module of ours ends with `take_place`, which does nothing
unless `activate` was called: a plain `from cputrain import Trainer` leaves transformers as it is.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from cputrain.integrations import compat

if TYPE_CHECKING:  # importlib.abc would cost more than all the rest of `cputrain run`
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

# The module that has stock's class → the module of ours whose class takes its place, or changes it.
_OURS = {
    "torch.distributed.distributed_c10d": "cputrain.integrations.process_groups",
    "torch.nn.parallel.distributed": "cputrain.integrations.data_parallel",
    "torch.optim.optimizer": "cputrain.integrations.own_loops",
    "accelerate.accelerator": "cputrain.integrations.accelerate",
    "transformers.training_args": "cputrain.integrations.training_arguments",
    "transformers.trainer": "cputrain.integrations.trainer",
}


def activate() -> None:
    """From now on the libraries come with our classes, and IPEX's names resolve to ours where IPEX is absent."""
    if is_active():
        return
    late = [name for name in _OURS if name in sys.modules]
    sys.meta_path.insert(0, _Watcher())
    compat.install()
    for name in late:
        importlib.import_module(_OURS[name])


def is_active() -> bool:
    return any(isinstance(finder, _Watcher) for finder in sys.meta_path)


def take_place(stock: ModuleType, ours: type) -> None:
    """Makes `ours` the class that everybody gets from the stock module by its name, if that was asked for."""
    if is_active():
        ours.__module__ = stock.__name__  # what is pickled must load where cputrain isn't installed
        setattr(stock, ours.__name__, ours)


class _Watcher:
    """Finds the modules that concern us as everybody else would, and has ours imported right after them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _OURS:
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(name, path, target)
            if found is not None and found.loader is not None:
                found.loader = _ThenOurs(found.loader)  # type: ignore[assignment]
                return found
        return None


class _ThenOurs:
    """The real loader, followed by the import of our module. It steps out of the way as soon as it is used."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.real
        self.real.exec_module(module)
        importlib.import_module(_OURS[module.__name__])
