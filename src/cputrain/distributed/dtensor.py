"""DTensor moves shards from one dimension to another by all_to_all, which torch believes no CPU group to have.

It gathers everything everywhere instead, which takes as many times the memory and traffic as there are ranks.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from cputrain.distributed.process_group import CclProcessGroup

_MODULE = "torch.distributed.tensor.placement_types"


def use_all_to_all() -> None:
    """Now, or when a script imports DTensor: importing it here would cost every start half a second."""
    if _MODULE in sys.modules:
        _change(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change(placement_types: Any) -> None:
    stock = placement_types.shard_dim_alltoall

    @functools.wraps(stock)
    def shard_dim_alltoall(tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
        group = mesh.get_group(mesh_dim)
        if not isinstance(group, CclProcessGroup):
            return stock(tensor, gather_dim, shard_dim, mesh, mesh_dim)
        return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, group.group_name)

    placement_types.shard_dim_alltoall = shard_dim_alltoall
