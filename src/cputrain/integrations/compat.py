"""The names of IPEX and of the oneCCL bindings resolve to ours, where the real packages are absent.

Never as installed packages: only after `install()`, that is under `cputrain run` or after `import cputrain.compat`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = {
    "intel_extension_for_pytorch": "cputrain.integrations.ipex",
    "oneccl_bindings_for_pytorch": "cputrain.integrations.oneccl",
    "torch_ccl": "cputrain.integrations.oneccl",
}


def install() -> None:
    """Last among the finders, so that a real package wins."""
    if not any(isinstance(finder, _LastResort) for finder in sys.meta_path):
        sys.meta_path.append(_LastResort())


class _LastResort:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Alias()) if name in _OURS else None  # type: ignore[arg-type]


class _Alias:
    """A module of the name that was asked for, with the public names of ours."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        ours = importlib.import_module(_OURS[module.__name__])
        module.__doc__, module.__file__ = ours.__doc__, ours.__file__
        module.__dict__.update({name: getattr(ours, name) for name in ours.__all__})
