"""A Trainer that is asked to stop saves once, at the end of a step, and nothing of the script runs after `train`."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import torch
from transformers import TrainerCallback

from cputrain import blame, settings, stop
from cputrain.log import logger


class CutOff(BaseException):
    """Leaves an evaluation, or an unfinished step, for the save in `train`; `except Exception` doesn't see it."""


class StoppingTrainer:
    """A part of our Trainer."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if not _can_save(self):
            return super().train(*args, **kwargs)  # type: ignore[misc]
        callback = _Stop(self)
        self.add_callback(callback)  # type: ignore[attr-defined]
        try:
            with stop.listening():
                return super().train(*args, **kwargs)  # type: ignore[misc]
        except CutOff:
            callback.save()
            raise SystemExit(blame.STOPPED) from None
        finally:
            self.remove_callback(callback)  # type: ignore[attr-defined]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """An evaluation that was made up for may have ended the training before its next step."""
        samples, number = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        ended = self.control.should_training_stop  # type: ignore[attr-defined]
        return ([], number) if ended else (samples, number)


def _can_save(trainer: Any) -> bool:
    """Whether a stop may write a checkpoint: the script saves, or the user asked for resumption, and ours does it."""
    arguments = trainer.args
    wants = str(getattr(arguments.save_strategy, "value", arguments.save_strategy)) != "no"
    asked = settings.value_of(settings.RESUME) not in ("", "never") or settings.seconds_between_saves()
    jit = getattr(arguments, "enable_jit_checkpoint", False)
    return trainer.keeps_checkpoints_whole() and bool(wants or asked or jit)


class _Stop(TrainerCallback):
    """Last of all callbacks, so that the others have had their say of the step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stops = self._trains = False
        self._before: _Position | None = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint keeps the control, and with it an evaluation that was cut off."""
        kept = (state.stateful_callbacks or {}).get("TrainerControl") or {}
        if not self._trains and state.global_step and kept.get("args", {}).get("should_evaluate"):
            self._evaluate()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trains:
            self._trains = True
            if stop.agreed():
                stop.end()
        if args.gradient_accumulation_steps > 1:
            self._before = _Position(self._trainer)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Several ranks agree at the end of steps only: a collective more here would make them wait."""
        if args.world_size == 1 and stop.agreed():
            assert self._before is not None
            self._before.restore(self._trainer)
            raise CutOff

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if stop.agreed():
            self._stops = control.should_save = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trains and stop.agreed():
            raise CutOff

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stops:
            self._say()
            stop.end()

    def save(self) -> None:
        """After a cut: the control still says that there is to be an evaluation."""
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model_wrapped, None)
        self._stops = False
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        self._say()

    def _evaluate(self) -> None:
        """As at the step that was saved: its random state is read again before the first step."""
        trainer = self._trainer
        if trainer._determine_best_metric(metrics=trainer._evaluate(None, None), trial=None):
            saved = f"{trainer.args.output_dir}/checkpoint-{trainer.state.global_step}"
            trainer.state.best_model_checkpoint = saved if os.path.isdir(saved) else None

    def _say(self) -> None:
        self._trainer.wait_for_checkpoint()
        if settings.is_first_rank():
            logger.warning(f"stopped, and saved, after step {self._trainer.state.global_step:,}")


class _Position:
    """What the micro-batches of a step move before its end."""

    def __init__(self, trainer: Any) -> None:
        self._random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self._sum = _logged(trainer)
        self._loss = None if self._sum is None else self._sum.clone()
        self._flos, self._tokens = trainer.current_flos, trainer.state.num_input_tokens_seen

    def restore(self, trainer: Any) -> None:
        random.setstate(self._random[0])
        numpy.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        if self._sum is not None and self._loss is not None:
            self._sum.copy_(self._loss)  # in place: the checkpoint's part holds it, too
        trainer.current_flos, trainer.state.num_input_tokens_seen = self._flos, self._tokens


def _logged(trainer: Any) -> torch.Tensor | None:
    """The losses since they were logged; of transformers before 5 known after the first step."""
    loss = getattr(trainer, "_tr_loss", None)
    return trainer._session.window if loss is None and trainer._session is not None else loss


def _replace_stocks_own() -> None:
    """`enable_jit_checkpoint` means ours: stock's can save in the middle of a step, and lets the script go on."""
    try:
        from transformers.trainer_jit_checkpoint import CheckpointManager
    except ImportError:  # transformers before 4.57
        return
    stock = CheckpointManager.setup_signal_handler

    def set_up(self: Any) -> None:
        if not isinstance(self.trainer, StoppingTrainer):
            stock(self)

    CheckpointManager.setup_signal_handler = set_up


_replace_stocks_own()
