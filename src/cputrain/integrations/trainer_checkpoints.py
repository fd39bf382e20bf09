"""Trainer's checkpoints: stock's methods write stock's files into a staging folder; a training resumes to the bit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl

from cputrain import api, blame, settings
from cputrain.checkpoints import manifest, random_state, resume, state
from cputrain.checkpoints.due import Due
from cputrain.checkpoints.lock import Superseded
from cputrain.checkpoints.writing import Output, Writing
from cputrain.formats import choose
from cputrain.integrations.notices import Refused
from cputrain.log import logger, say_once

_STATE = "trainer_state.json"


class CheckpointingTrainer:
    """A part of our Trainer."""

    _session: Session | None = None  # while it trains
    args: Any

    def keeps_checkpoints_whole(self) -> bool:
        """Whether checkpoints are ours to write; not where another engine writes its own."""
        raise NotImplementedError

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trial = args[0] if args else kwargs.get("trial")
        if trial is not None or not self.keeps_checkpoints_whole():
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        self._session = Session(self, resume_from_checkpoint)
        callback = _Callback(self._session)
        self.add_callback(callback)  # type: ignore[attr-defined]
        try:
            answer = super().train(self._session.path, *args, **kwargs)  # type: ignore[misc]
            self._session.wait()
            return answer
        except Superseded as lost:
            raise Refused(str(lost)) from None
        finally:
            self.remove_callback(callback)  # type: ignore[attr-defined]
            self._session = None
            choose.choose_again(None)

    @property
    def checkpoint_to_go_back_to(self) -> str | None:
        """The last one that this training has saved, or began with; to be asked by all ranks."""
        self.wait_for_checkpoint()
        return self._session.last if self._session is not None else None

    def wait_for_checkpoint(self) -> None:
        """Of all ranks: until the one that is on its way to the disk is there."""
        if self._session is not None:
            self._session.wait()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss if self._session is None else self._session.with_earlier_losses(loss)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if self._session is None:
            return super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        with self._session.evaluating(self.model):  # type: ignore[attr-defined]
            return super()._evaluate(*args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.window = tr_loss
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        save = functools.partial(super()._save_checkpoint, *args, **kwargs)  # type: ignore[misc]
        if self._session is None:
            save()
        elif (pushed := self._session.save(save)) is not None:
            super()._push_from_checkpoint(pushed)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if self._session is not None:
            self._session.random_state_loaded()

    def _load_callback_state(self) -> None:
        super()._load_callback_state()  # type: ignore[misc]
        if self._session is not None and not self.args.restore_callback_states_from_checkpoint:
            _restore_callbacks(self)

    def _push_from_checkpoint(self, folder: str) -> None:
        if self._session is None or self._session.writing is None:
            super()._push_from_checkpoint(folder)  # type: ignore[misc]
        else:
            self._session.pushes = True

    # What ranks may wait for each other between: a disk that is full on one must not keep the others waiting.

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._written(functools.partial(super().save_model, *args, **kwargs))  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        self._written(functools.partial(super()._save_optimizer_and_scheduler, *args, **kwargs))  # type: ignore[misc]

    def _save_scaler(self, *args: Any, **kwargs: Any) -> None:
        self._written(functools.partial(super()._save_scaler, *args, **kwargs))  # type: ignore[misc]

    def _save_rng_state(self, *args: Any, **kwargs: Any) -> None:
        self._written(functools.partial(super()._save_rng_state, *args, **kwargs))  # type: ignore[misc]

    def _written(self, save: Callable[[], None]) -> None:
        writing = self._session.writing if self._session is not None else None
        if writing is None:
            save()
        else:
            writing.write(save)


class Session:
    """One call of `train`. `path`: the checkpoint from which it goes on, as stock takes it."""

    def __init__(self, trainer: Any, asked: Any) -> None:
        self.trainer = trainer
        output = Path(trainer.args.output_dir)
        self._run = resume.name_of_run(output)
        self._output = Output.take(output, self._run, trainer.args.save_total_limit, self._best)
        self.path = self._chosen(asked)
        self.last = self.path if isinstance(self.path, str) else None
        self.before = state.read(Path(self.path)) if isinstance(self.path, str) else None
        self.data = _length(trainer.train_dataset)
        state.prepare(self.before)
        if self.path is not None:
            logger.info("the training goes on from %s", self.path)
            state.say_what_differs(self.before, self.data)
        seconds = settings.seconds_between_saves()
        self.due = Due(seconds) if seconds else None
        if (seconds or self._run) and trainer.args.save_only_model:
            say_once("save_only_model: its checkpoints have no optimizer state, and the training can't go on from them")
        self.by_time = self.pushes = False
        self.writing: Writing | None = None
        self._on_its_way: Writing | None = None
        self.window: torch.Tensor | None = None  # losses since they were logged
        self._earlier: float | None = None  # … of them those before the checkpoint
        self._epoch_random: Any = None  # when the epoch began
        self._resumes_within_epoch = self._has_stepped = False
        self._generators: list[torch.Generator] = []

    # --- Resuming -------------------------------------------------------------------------------------------------

    def _chosen(self, asked: Any) -> Any:
        """The script's own choice wins; `True` and `last` are the newest that is whole, which stock doesn't check."""
        output, last = self._output.path, asked == "last" and not os.path.isdir("last")
        try:
            if asked is True or last:
                found = resume.newest(output, None, self._fits)
                return str(found) if found is not None else None if last else True
            if asked:
                return str(resume.verified(Path(asked), self._fits))
            found = resume.chosen(output, self._run, self._fits)
            return None if found is None else str(found)
        except ValueError as error:
            raise Refused(str(error)) from None

    def _fits(self, path: Path) -> str:
        if not (path / _STATE).exists():
            return f"it has no {_STATE}"
        try:
            found = state.read(path)
        except manifest.Bad as error:
            return str(error)
        return state.why_not(found, self.trainer.model)

    def begin(self, model: Any, loader: Any) -> None:
        """Everything is there, and stock has loaded its files."""
        if self._output.leads and self._output.lock is not None:
            self._output.free_after_saying_if_little(_room(self.trainer))
        generator = getattr(loader, "synchronized_generator", None)
        self._generators = [generator] if generator is not None else []
        if self.before is None:
            return
        state.restore(self.before, model)
        trainer, window = self.trainer, self.before["window"]
        self._earlier = window["loss"]
        trainer._globalstep_last_logged = window["since"]
        # Later releases report the mean loss of this call of `train`, earlier ones that of all steps.
        trainer._total_loss_scalar = -window["loss"] if hasattr(trainer, "_initial_global_step") else window["total"]
        within = self.before["epoch"] % 1 != 0
        self._resumes_within_epoch = within and not trainer.args.ignore_data_skip

    def epoch_begins(self) -> None:
        """Within an epoch, samplers draw the numbers that they drew when it began."""
        self._has_stepped = False
        if self._resumes_within_epoch and self.before is not None:
            self._epoch_random = self.before["epoch_random"]
            random_state.restore(self._epoch_random, self._generators)
        else:
            self._epoch_random = random_state.now(self._generators)

    def random_state_loaded(self) -> None:
        """By stock: where an epoch begins with it, that is the state at its start."""
        if not self._resumes_within_epoch and not self._has_stepped:
            self._epoch_random = random_state.now(self._generators)

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[None]:
        """One that is cut off is made anew; one that was, before the epoch goes on."""
        decided = api.decisions(model)
        try:
            yield
        except BaseException:
            if decided:
                api.remember(model, decided)
            raise
        if self._resumes_within_epoch and self._epoch_random is not None:
            random_state.restore(self._epoch_random, self._generators)

    def with_earlier_losses(self, loss: torch.Tensor) -> torch.Tensor:
        """Of the first step: what was summed up before the checkpoint is logged with it."""
        self._has_stepped, self._resumes_within_epoch = True, False
        earlier, self._earlier = self._earlier, None
        return loss if earlier is None else torch.tensor(earlier, dtype=loss.dtype) + loss

    # --- Saving ---------------------------------------------------------------------------------------------------

    def save(self, stock: Callable[[], None]) -> str | None:
        """Returns the folder if stock wanted it pushed to a hub."""
        self.wait()
        trainer, self.pushes = self.trainer, False
        step, before = trainer.state.global_step, trainer.state.best_model_checkpoint
        name, room, later = f"checkpoint-{step}", _room(trainer), _may_take_its_time(trainer)
        with Writing(self._output, name, step, by_time=self.by_time, room=room, later=later) as self.writing:
            with _output_dir(trainer, self.writing.folder.parent):
                self.writing.write(stock)
            self.writing.write(lambda: self._name_best(before, name))
            self.writing.write(lambda: state.write(self.writing.folder, self._now()))  # type: ignore[union-attr]
        self._on_its_way, self.writing, self.by_time = self.writing, None, False
        if self.due is not None:
            self.due.saved()
        if later:
            return None
        written = self.wait()
        if written is None:
            trainer.state.best_model_checkpoint = before
        return written if self.pushes else None

    def wait(self) -> str | None:
        """Until the last one is there: its folder, or None if it couldn't be written."""
        written, self._on_its_way = self._on_its_way, None
        if written is None:
            return None
        written.wait()
        if not written.saved:
            return None
        self.last = str(written.target)
        return self.last

    def _name_best(self, before: str | None, name: str) -> None:
        """Stock names the best checkpoint by the folder that it wrote into."""
        trainer = self.trainer
        assert self.writing is not None
        if trainer.state.best_model_checkpoint == str(self.writing.folder) != before:
            trainer.state.best_model_checkpoint = os.path.join(trainer.args.output_dir, name)
            if trainer.args.should_save:
                trainer.state.save_to_json(str(self.writing.folder / _STATE))

    def _best(self) -> list[Path]:
        best = self.trainer.state.best_model_checkpoint
        return [Path(best)] if best else []

    def _now(self) -> state.State:
        trainer = self.trainer
        window = getattr(trainer, "_tr_loss", self.window)
        loss = window.item() if window is not None else 0.0
        logged = {"since": trainer._globalstep_last_logged, "total": trainer._total_loss_scalar}
        reached = trainer.state.epoch or 0.0
        return {
            **state.now(trainer.model, self.data),
            "step": trainer.state.global_step,
            "epoch": reached,
            "samples of the epoch": None if self.data is None else round(reached % 1 * self.data),
            "epoch_random": self._epoch_random,
            "window": {"loss": loss, **logged},
        }


class _Callback(TrainerCallback):
    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.begin(kwargs["model"], kwargs.get("train_dataloader"))
        # A training that had ended: stock would take a step more in an epoch that isn't over.
        if self._session.before is not None and 0 < state.max_steps <= state.global_step:
            control.should_training_stop = True

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._session.epoch_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        blame.note_step(state.global_step)
        due = self._session.due
        if due is not None and due() and not control.should_save:
            control.should_save = self._session.by_time = True


def _is_overridden(trainer: Any, method: str) -> bool:
    owner = next(kind for kind in type(trainer).__mro__ if method in vars(kind))
    return method in vars(trainer) or not owner.__module__.startswith("cputrain.")


@contextmanager
def _output_dir(trainer: Any, folder: Path) -> Iterator[None]:
    """While it lasts, that is where stock saves, and where it looks for older checkpoints to remove."""
    trainer.__dict__["_get_output_dir"] = lambda *_, **__: str(folder)
    try:
        yield
    finally:
        del trainer.__dict__["_get_output_dir"]


def _may_take_its_time(trainer: Any) -> bool:
    """Whether nothing asks for a checkpoint's folder as soon as it was saved."""
    arguments = trainer.args
    overridden = any(_is_overridden(trainer, method) for method in ("_save_checkpoint", "save_model"))
    best = arguments.load_best_model_at_end or arguments.metric_for_best_model is not None
    listened_to = any(
        type(callback).on_save is not TrainerCallback.on_save and not type(callback).__module__.startswith("cputrain.")
        for callback in trainer.callback_handler.callbacks
    )
    return not (overridden or best or arguments.push_to_hub or listened_to)


def _restore_callbacks(trainer: Any) -> None:
    """In place. Stock does it only if it is asked to, and then also restores a wish to stop."""
    stored = {name: list(data) if isinstance(data, list) else [data] for name, data in _stored(trainer).items()}
    for callback in trainer.callback_handler.callbacks:
        found = stored.get(type(callback).__name__)
        if isinstance(callback, ExportableState) and not isinstance(callback, TrainerControl) and found:
            for name, value in found.pop(0).get("attributes", {}).items():
                setattr(callback, name, value)


def _stored(trainer: Any) -> dict[str, Any]:
    return trainer.state.stateful_callbacks or {}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _room(trainer: Any) -> int:
    """Bytes that weights and the optimizer's state take; of a model with adapters only what is trained is saved."""
    if not trainer.args.should_save:
        return 0
    adapters = hasattr(trainer.model, "peft_config")
    tensors = [p for p in trainer.model.parameters() if p.requires_grad or not adapters]
    if trainer.optimizer is None or trainer.args.save_only_model:
        return sum(tensor.nbytes for tensor in tensors)
    moments = [t for found in trainer.optimizer.state.values() for t in found.values() if torch.is_tensor(t)]
    if not moments:  # before the first step: AdamW's
        moments = 2 * [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return sum(tensor.nbytes for tensor in [*tensors, *moments])
