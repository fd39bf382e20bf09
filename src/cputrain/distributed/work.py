"""Asynchronous work: threads that run a group's operations in order, and what their callers wait for.

The native calls release the GIL, so a lane computes beside the Python code that queued its work.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork
from torch._C._profiler import _RecordFunctionFast

from cputrain.distributed import failures
from cputrain.distributed.failures import CollectiveError
from cputrain.distributed.transport import Tensors
from cputrain.log import say_once
from cputrain.settings import COMMUNICATION_CPUS, communication_cpus

_spent = [0.0]  # seconds that lanes of this process have run operations


def seconds_spent() -> float:
    """How long operations between ranks have run in this process, waiting for other ranks included."""
    return _spent[0]


class Work(TorchWork):
    """One operation that runs, or ran. torch's trampolines ask for `wait` and `get_future`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._lock = threading.Lock()
        self._finished: threading.Event | None = None
        self._done = False
        self._error: BaseException | None = None
        self._ended: torch.futures.Future | None = None  # completed when the operation has ended, well or not
        self._future: torch.futures.Future | None = None  # what callers get, made of `_ended`
        self._source = -1

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error, self._done = error, True
            ended, finished = self._ended, self._finished
        if finished is not None:
            finished.set()
        if ended is not None:
            ended.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            with self._lock:
                if self._finished is None:
                    self._finished = threading.Event()
                    if self._done:
                        self._finished.set()
            seconds = timeout.total_seconds() if timeout else 0
            if not self._finished.wait(seconds if seconds > 0 else None):
                raise RuntimeError(f"the operation has not ended within the {seconds:g} s that wait() was given.")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future:
        """Fails by a callback that raises: C++ takes what Python's `set_exception` stores for a result.

        DDP's backward would read the exception as tensors, and end by SIGSEGV.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            ended = self._ended = torch.futures.Future()
            future = self._future = ended.then(self._outcome)
            done = self._done
        if done:
            ended.set_result(None)
        return future

    def _outcome(self, _: torch.futures.Future) -> list[Tensor]:
        if self._error is not None:
            raise self._error.with_traceback(None)  # torch quotes it; frames of the lane's thread don't help
        return self._tensors

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


Operation = Callable[[Work], Any]


class SeveralWorks(TorchWork):
    """Coalesced operations: done when all are."""

    def __init__(self, works: list[TorchWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait() if timeout is None else work.wait(timeout) for work in self._works)

    def get_future(self) -> torch.futures.Future:
        def results(done: torch.futures.Future) -> list[Tensor]:
            return [tensor for future in done.wait() for tensor in future.wait()]

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(results)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        self.wait()


class Lane:
    """Runs operations one after another: in the caller's thread if it waits anyway, else in one of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Work, Operation] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # queued or running, changed under the lock
        self._lock = threading.Lock()
        self._free = threading.Lock()  # held while an operation runs
        self._closed = False

    def run(self, operation: Operation, tensors: list[Tensor], asynchronous: bool) -> Work:
        """Starts an operation after all that came before it."""
        work = Work(tensors)
        with self._lock:
            if self._closed:
                raise RuntimeError("this process group has been shut down.")
            inline = not asynchronous and self._waiting == 0
            self._waiting += 1
            if not inline:
                self._start()
                self._queue.put((work, operation))
        if inline:
            self._execute(work, operation)
            work.wait()
        return work

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"cputrain-{self._name}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        move_to_communication_cpus()
        while (item := self._queue.get()) is not None:
            self._execute(*item)
            del item  # the tensors must not live until the next operation comes

    def _execute(self, work: Work, operation: Operation) -> None:
        error: BaseException | None = None
        began = time.perf_counter()
        try:
            with self._free:
                operation(work)
        except BaseException as caught:  # noqa: BLE001 - raised again by wait()
            error = caught
            if isinstance(caught, CollectiveError):
                failures.tell_launch(caught)
        with self._lock:
            self._waiting -= 1
        _spent[0] += time.perf_counter() - began
        work.finish(error)

    def drain(self, seconds: float) -> None:
        """Waits a little for what is queued or running."""
        end = time.monotonic() + seconds
        while self._waiting and time.monotonic() < end:
            time.sleep(0.001)

    def close(self) -> None:
        """Ends the thread after what is queued; the owner has made it end soon."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()


def run_profiled(
    lane: Lane, name: str, operation: Operation, tensors: list[Tensor], inputs: Tensors, asynchronous: bool
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


# --- Which cores these threads use: those that `--cores-for-communication` or CCL_WORKER_COUNT kept free -----------


def move_to_communication_cpus() -> None:
    """This thread, and all that it starts from now on, if cores were kept free for communication."""
    if wanted := communication_cpus():
        try:
            os.sched_setaffinity(0, wanted)
        except OSError as error:
            say_once(f"{COMMUNICATION_CPUS}={','.join(map(str, sorted(wanted)))} has no effect: {error.strerror}")


@contextlib.contextmanager
def on_communication_cpus() -> Iterator[None]:
    """Threads that a library starts within are bound there; the caller's own isn't, afterwards."""
    before = os.sched_getaffinity(0)
    move_to_communication_cpus()
    try:
        yield
    finally:
        if communication_cpus():
            os.sched_setaffinity(0, before)
