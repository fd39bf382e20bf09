"""What Trainer tells of its run: begin and end, steps, metrics, checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from cputrain.integrations import recording, trial
from cputrain.integrations.slow_ranks import SlowRanks


class RecordingTrainer:
    """A part of our Trainer: measures the methods of stock's that have no callback of their own."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        run = recording.current()
        if run is not None:
            run.batch(inputs)
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        finally:
            run = recording.current()
            if run is not None:
                run.record.spent("checkpoint", time.perf_counter() - began)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if trial.steps():
            trial.share_batch(self)
            args, kwargs = (), {}  # from the start, not from a checkpoint
        with _recorded(self):
            return super().train(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def _recorded(trainer: Any) -> Iterator[None]:
    callbacks = [_Callback(), SlowRanks()]
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        yield
    finally:
        error = sys.exc_info()[0]
        recording.end("ended" if error is None else f"ended by {error.__name__}")
        for callback in callbacks:
            trainer.remove_callback(callback)


class _Callback(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs.get("model")
        known = args.to_dict()
        run = recording.begin(args.output_dir, model, known, total=state.max_steps, done=state.global_step)
        if run is not None:
            run.record.head["epochs"] = state.num_train_epochs

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = recording.current()
        if run is not None:
            schedule = kwargs.get("lr_scheduler")
            rate = schedule.get_last_lr()[0] if schedule is not None and hasattr(schedule, "get_last_lr") else None
            run.record.step(float(rate) if rate is not None else None)
        _only_steps_in_a_trial(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _only_steps_in_a_trial(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        run = recording.current()
        if run is not None and metrics:
            run.record.metrics(metrics)


def _only_steps_in_a_trial(control: Any) -> None:
    if trial.steps():
        control.should_save = control.should_evaluate = False
