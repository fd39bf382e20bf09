"""Hooks of DistributedDataParallel: how gradients travel between the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

COMPRESSIONS = ("none", "bf16")


def register(model: DistributedDataParallel, compression: str) -> None:
    """`grad_compression` of a configuration: "bf16" halves what travels, "none" leaves gradients as they are."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"grad_compression is one of {', '.join(COMPRESSIONS)}, found {compression!r}.")
    if compression == "bf16":
        model.register_comm_hook(model.process_group, bf16)


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
