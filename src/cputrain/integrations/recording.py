"""Records the run of this process: Trainer's, Accelerate's, or that of a script's own loop.

What a step consists of is measured where it happens: batches where a data loader hands them out, the backward in
`Tensor.backward`, steps by the optimizer's own hooks. No module gets a hook. All of it is put in place when a record
begins, and costs some ten microseconds a step.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cputrain import settings
from cputrain.integrations import peak, progress, trial
from cputrain.log import say_once
from cputrain.record import head, recorder, work
from cputrain.record.lines import Lines
from cputrain.record.recorder import Recorder

if TYPE_CHECKING:
    from torch import nn

_now: Run | None = None  # one at a time
_is_watching = False


class Run:
    """A training that is being recorded; `counts_steps`: each step of its first optimizer is one of the training."""

    def __init__(self, record: Recorder, model: nn.Module | None, counts_steps: bool) -> None:
        self.record, self.counts_steps = record, counts_steps
        self._work = work.of_model(model) if model is not None else work.Work(0.0, 0.0, 0.0)
        self._thread = threading.get_ident()
        self._batch: Mapping[str, Any] | None = None
        self._forward_began: float | None = None
        self._optimizer_began = 0.0
        self._optimizer: int | None = None
        self._inside = False

    def is_mine(self) -> bool:
        """The training's own thread, and not within a call that is measured already."""
        return not self._inside and threading.get_ident() == self._thread

    def batch(self, batch: Any) -> None:
        """The batch that comes next; one that no backward follows, as in an evaluation, isn't counted."""
        self._batch = batch if isinstance(batch, Mapping) else None
        self._forward_began = time.perf_counter()

    def backward_begins(self, loss: torch.Tensor) -> float:
        began = time.perf_counter()
        if self._forward_began is not None:
            self.record.spent("forward", began - self._forward_began)
        self._count_tokens()
        if loss.numel() == 1:
            self.record.loss(loss.detach().item())
        self._forward_began = None
        self._inside = True
        return time.perf_counter()

    def backward_ended(self, began: float) -> None:
        self._inside = False
        ended = time.perf_counter()
        self.record.spent("backward", ended - began)
        self._forward_began = ended  # of a loop whose next batch isn't seen

    def _count_tokens(self) -> None:
        batch, self._batch = self._batch, None
        tokens = work.of_batch(batch) if batch is not None else None
        if tokens is not None:
            self.record.tokens(tokens.real, tokens.padded, work.gflop(self._work, tokens))

    def optimizer_begins(self) -> None:
        self._optimizer_began = time.perf_counter()

    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self.record.spent("optimizer", time.perf_counter() - self._optimizer_began)
        self._forward_began = None
        self._optimizer = self._optimizer or id(optimizer)
        if self.counts_steps and id(optimizer) == self._optimizer:
            self.record.step(optimizer.param_groups[0].get("lr"))


def current() -> Run | None:
    return _now


def is_wanted() -> bool:
    return settings.value_of(settings.RECORD) != "off"


def begin(
    output: str | None,
    model: nn.Module | None,
    arguments: Mapping[str, Any],
    *,
    total: int | None = None,
    done: int = 0,
    counts_steps: bool = False,
) -> Run | None:
    """`output`: the training's output folder. `done`: steps of the checkpoint from which it goes on."""
    global _now
    if _now is not None:
        end()
    asked = settings.value_of(settings.RECORD)
    folder = None if asked == "off" else asked or output
    shows = progress.wanted()
    if folder is None and shows is None:
        return None
    facts = _facts(model) | {"total": total, "done": done}
    lines = None
    if folder is not None:
        goes_on = done > 0 or settings.attempt().rpartition("/")[2] != "0"
        lines = Lines(recorder.path_of(folder, settings.number(settings.RANK)), goes_on)
    often = {"least": 0.0} if trial.steps() else {}  # then each step is a line
    record = Recorder(lines, head.head(arguments, facts), total, done, **often)
    record.communicated = _communicated
    if shows is not None:
        record.listeners.append(progress.Progress(shows))
    if trial.steps():
        record.listeners.append(trial.end_after_the_last)
    _watch()
    _now = Run(record, model, counts_steps)
    return _now


def end(how: str = "ended") -> None:
    global _now
    run, _now = _now, None
    if run is not None:
        run.record.close(how)
        for listener in run.record.listeners:
            getattr(listener, "close", lambda: None)()


def begin_own(model: nn.Module | None, folder: str | None) -> None:
    """A script with a loop of its own: what isn't given by a Trainer is counted by the optimizer's steps."""
    if _now is None:
        trial.check_own_loop()
        begin(folder, model, {}, counts_steps=True)


def _facts(model: nn.Module | None) -> dict[str, Any]:
    from cputrain import api

    facts: dict[str, Any] = {"threads": torch.get_num_threads()}
    if model is None:
        return facts
    parameters = list(model.parameters())
    facts["model"] = {
        "class": type(model).__name__,
        "name": str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")[:500],
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }
    explained = api.explain(model)
    facts["explain"] = {"facts": explained.facts[:20], "modules": explained.modules[:200]}
    precision = next((value for what, value, _ in explained.facts if what == "precision"), "fp32")
    facts["dtype"] = precision if api.is_optimized(model) else "stock"
    if trial.steps():  # which has no time for a measurement
        return facts
    try:
        facts["peak_gflops"] = peak.gflops("int16" if precision == "int16" else "fp32")
    except (RuntimeError, KeyError) as error:  # without it there is no share of the peak
        say_once(f"the CPU's peak was not measured: {error}")
    return facts


def _communicated() -> float:
    work_of_groups = sys.modules.get("cputrain.distributed.work")
    return work_of_groups.seconds_spent() if work_of_groups is not None else 0.0


# --- What is watched -----------------------------------------------------------------------------------------------


def _watch() -> None:
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    torch.Tensor.backward = _timed_backward(torch.Tensor.backward)  # type: ignore[method-assign]
    optimizer.register_optimizer_step_pre_hook(lambda *_: _now.optimizer_begins() if _now else None)
    optimizer.register_optimizer_step_post_hook(lambda used, *_: _now.optimizer_ended(used) if _now else None)
    batches: Any = dataloader._BaseDataLoaderIter
    batches.__next__ = _timed_next(batches.__next__)
    accelerates = sys.modules.get("accelerate.data_loader")
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        kind = getattr(accelerates, name, None)
        if kind is not None:
            kind.__iter__ = _seen(kind.__iter__)
    atexit.register(end)


def _timed_backward(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        run = _now
        if run is None or not run.is_mine():
            return stock(self, *args, **kwargs)
        began = run.backward_begins(self)
        try:
            return stock(self, *args, **kwargs)
        finally:
            run.backward_ended(began)

    return backward


def _timed_next(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def following(self: Any) -> Any:
        run = _now
        if run is None or not run.is_mine():
            return stock(self)
        began = time.perf_counter()
        batch = stock(self)
        run.record.spent("data", time.perf_counter() - began)
        run.batch(batch)
        return batch

    return following


def _seen(stock: Callable) -> Callable:
    """Accelerate's loaders read one batch ahead: the one that the script gets counts."""

    @functools.wraps(stock)
    def batches(self: Any) -> Iterator[Any]:
        for batch in stock(self):
            if _now is not None:
                _now.batch(batch)
            yield batch

    return batches
