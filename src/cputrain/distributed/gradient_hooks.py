"""Hooks of DistributedDataParallel: how gradients travel between the ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cputrain.log import logger
from cputrain.settings import COMPRESSIONS


def register(model: DistributedDataParallel, compression: str) -> None:
    """`grad_compression` of a configuration: "bf16" halves what travels, "none" leaves gradients as they are."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"grad_compression is one of {', '.join(COMPRESSIONS)}, found {compression!r}.")
    if compression == "bf16":
        model.register_comm_hook(model.process_group, bf16)
        if model.process_group.rank() == 0:
            logger.info("gradients travel as bf16 between %d ranks", model.process_group.size())


def register_later(model: DistributedDataParallel, compression: str) -> None:
    """The same at the model's first forward, unless the script has registered a hook of its own by then.

    torch takes one hook only, so that ours must not be there first.
    """
    if compression != "none" and model.process_group.size() > 1:
        model.register_forward_pre_hook(functools.partial(_register_if_there_is_none, compression))


def _register_if_there_is_none(compression: str, model: DistributedDataParallel, _: Any) -> None:
    if not model._comm_hooks:
        register(model, compression)


def bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """The ranks' mean: each rounds its gradients to bf16, sums are fp32 and rounded once, the mean is fp32.

    Dividing after the sum, not before: bf16 has no small numbers to lose, but every rounding counts.
    """
    gradients = bucket.buffer()
    rounded = gradients.to(torch.bfloat16)
    options = dist.AllreduceOptions()
    work = group.allreduce([rounded], options)

    def widened(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.wait()
        return gradients.copy_(rounded).div_(group.size())

    return work.get_future().then(widened)


# torch compares a hook's annotations with its types, and would find strings.
bf16.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
