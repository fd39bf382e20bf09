"""Gives Accelerate, and Trainer through it, the backend `ccl` where several ranks train on CPUs.

Accelerate asks `PartialState._prepare_backend`, which knows mpi and gloo for CPUs and turns everything else into gloo.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from cputrain.integrations import hook, settings

_stock_choice = PartialState._prepare_backend


def _choice(self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
    """Ours where it was asked for, and where no backend was asked for."""
    with _no_bindings_sought():
        found, kind = _stock_choice(self, cpu, sagemaker_dp, None if backend == "ccl" else backend)
    wanted = backend == "ccl" or (backend is None and not settings.is_off())
    if kind is not DistributedType.MULTI_CPU or not wanted:
        return found, kind
    import cputrain.distributed  # noqa: F401 - registers the backend

    return "ccl", kind


@contextlib.contextmanager
def _no_bindings_sought() -> Iterator[None]:
    """The guides set CCL_WORKER_COUNT: accelerate before 1.13 then wants to know the version of the real package."""
    workers = os.environ.pop("CCL_WORKER_COUNT", None)
    try:
        yield
    finally:
        if workers is not None:
            os.environ["CCL_WORKER_COUNT"] = workers


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """Accelerate's state gets our backend if it is made within; outside, stock's is untouched."""
    before = PartialState._prepare_backend
    PartialState._prepare_backend = _choice
    try:
        yield
    finally:
        PartialState._prepare_backend = before


def set_timeout(timeout: timedelta) -> None:
    """Trainer's `ddp_timeout`, which it forgets on CPUs."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "ccl":
        dist.group.WORLD.set_timeout(timeout)


if hook.is_active():  # scripts may make a PartialState themselves
    PartialState._prepare_backend = _choice
