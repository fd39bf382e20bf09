"""A loss that isn't a number: named with its step and samples, and what CPUTRAIN_ON_NAN says is done about it.

stock: nothing. stop: the training ends. skip: the optimizer leaves this step out. back: the training goes back to its
last checkpoint, and leaves the step out when it comes there again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from cputrain import settings
from cputrain.checkpoints import ranks
from cputrain.integrations.notices import Refused
from cputrain.log import logger

_NAMED = 3  # a training whose weights are bad has no other losses any more
_TIMES_BACK = 3  # without a checkpoint in between


class _Back(BaseException):
    """Leaves the training loop."""


class GuardingTrainer:
    """A part of our Trainer, around the one that keeps checkpoints."""

    _guard: _Guard | None = None
    checkpoint_to_go_back_to: str | None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            self._guard = _Guard(self, settings.one_of(settings.ON_NAN) or "stock")
        except ValueError as error:
            raise Refused(str(error)) from None
        self.add_callback(self._guard)  # type: ignore[attr-defined]
        try:
            while True:
                try:
                    return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
                except _Back:
                    resume_from_checkpoint = self._guard.checkpoint
        finally:
            self.remove_callback(self._guard)  # type: ignore[attr-defined]
            self._guard = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._guard is not None and not torch.isfinite(loss).all():
            self._guard.is_bad = True
        return loss


class _Guard(TrainerCallback):
    def __init__(self, trainer: Any, what: str) -> None:
        self._trainer, self._what = trainer, what
        self.is_bad = False  # a loss of the step that runs
        self._named = 0
        self._left_out: set[int] = set()
        self.checkpoint: str | None = None  # the one that it went back to
        self._times_back = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, own = state.global_step + 1, self.is_bad
        self.is_bad = False
        bad = own if self._what == "stock" else _on_any_rank(own)
        if not bad and step not in self._left_out:
            return
        if own and self._named < _NAMED:
            self._named += 1
            more = "; later ones aren't named" if self._named == _NAMED else ""
            logger.warning("%s%s", self._sentence(state), more)
        if self._what == "stop":
            raise Refused(f"{self._sentence(state)}: the training ends, as --on-nan stop says.")
        if self._what == "back" and step not in self._left_out:
            self._go_back(step)
        if self._what != "stock":
            for parameter in kwargs["model"].parameters():
                parameter.grad = None  # which optimizers leave alone

    def _go_back(self, step: int) -> None:
        self._left_out.add(step)
        checkpoint = self._trainer.checkpoint_to_go_back_to
        self._times_back = self._times_back + 1 if checkpoint == self.checkpoint else 1
        if checkpoint is None:
            raise Refused(f"the loss of step {step:,} isn't a number, and there is no checkpoint yet to go back to.")
        if self._times_back > _TIMES_BACK:
            raise Refused(f"the loss isn't a number, {_TIMES_BACK} times since {checkpoint}: the training ends.")
        self.checkpoint = checkpoint
        if ranks.number() == 0:
            logger.warning("the training goes back to %s, and leaves step %s out", checkpoint, f"{step:,}")
        raise _Back

    def _sentence(self, state: Any) -> str:
        where = f"the loss of step {state.global_step + 1:,} isn't a number"
        try:
            samples = len(self._trainer.train_dataset)
        except (TypeError, AttributeError, NotImplementedError):
            return where
        arguments, reached = self._trainer.args, state.epoch or 0.0
        number = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        first = round(reached % 1 * samples) + 1
        last = min(first + number - 1, samples)
        return f"{where} (samples {first:,} to {last:,} of epoch {int(reached) + 1}, in the order they are drawn)"


def _on_any_rank(bad: bool) -> bool:
    if ranks.size() == 1:
        return bad
    flag = torch.tensor([float(bad)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
