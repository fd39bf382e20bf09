"""The profiler's events of a group's operations: `ccl:all_reduce` and the like, with the shapes of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from cputrain.distributed.work import Lane, Work


def is_on() -> bool:
    return profiler._is_profiler_enabled


def run(
    lane: Lane,
    name: str,
    operation: Callable[[Work], None],
    tensors: list[Tensor],
    inputs: Sequence[Tensor],
    asynchronous: bool,
) -> Work:
    """Through the lane's thread, also if the caller waits.

    An event that begins in one thread and ends in another is asynchronous to the profiler, as those of gloo are: it
    isn't taken for the parent of what the caller's thread does meanwhile. It ends before the caller goes on.
    """
    events = [_RecordFunctionFast(f"ccl:{name}", list(inputs))]
    events[0].__enter__()

    def recorded(work: Work) -> None:
        try:
            operation(work)
        finally:
            events.clear()  # ends it: `__exit__` does nothing in a thread in which the profiler wasn't started

    work = lane.run(recorded, tensors, asynchronous=True)
    if not asynchronous:
        work.wait()
    return work
