"""Checkpoints of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cputrain import api, blame, settings, stop
from cputrain.checkpoints import random_state, resume, skipping, state
from cputrain.checkpoints.due import Due
from cputrain.checkpoints.writing import Output, Writing
from cputrain.formats import choose
from cputrain.log import logger

_WEIGHTS, _OPTIMIZER, _SCHEDULER = "pytorch_model.bin", "optimizer.pt", "scheduler.pt"


class Checkpoints:
    """Saves a loop's state every so often, and goes on from it after a restart.

    >>> checkpoints = cputrain.Checkpoints("out", model=model, optimizer=optimizer, every="10min", keep=3)
    >>> for epoch in checkpoints.epochs(3):
    ...     for batch in checkpoints.batches(loader):
    ...         loss = model(**batch).loss
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         checkpoints.step()

    To be made when model, optimizer and scheduler are there, on all ranks: if there is something to go on from, they
    get it then. `every` is a time ("30s", "10min", "2h") or a number of steps; CPUTRAIN_SAVE_EVERY wins over it. The
    newest `keep` checkpoints stay. CPUTRAIN_RESUME says what is resumed: without it, a restart of the same run only.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        every: str | int = "10min",
        keep: int = 3,
    ) -> None:
        _check(model, keep)
        self._every, self._due = _steps_and_due(every)
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer = optimizer
        self._parts = {_WEIGHTS: self._model, _OPTIMIZER: optimizer, _SCHEDULER: scheduler}
        self.steps = 0  # of the optimizer, so far
        self._pass = self._batch = 0  # over the data; within it
        self._epoch_random: Any = None
        self._generators: list[torch.Generator] = []
        self._before: state.State | None = None
        run = resume.name_of_run(Path(folder))
        self._output = Output.take(folder, run, keep)
        self._on_its_way: Writing | None = None
        self._path = resume.chosen(self._output.path, run, self._fits)
        if self._path is not None:
            self._resume(self._path)

    # --- Resuming -------------------------------------------------------------------------------------------------

    def _fits(self, path: Path) -> str:
        missing = [name for name, part in self._parts.items() if part is not None and not (path / name).exists()]
        if missing:
            return f"it has no {missing[0]}"
        return state.why_not(state.read(path), self._model)

    def _resume(self, path: Path) -> None:
        self._before = found = state.read(path)
        assert found is not None
        logger.info("the training goes on from %s", path)
        state.say_what_differs(found, found["here"]["data"])
        self._choose_again(found)
        self._load()
        self.steps = found["step"]

    def _choose_again(self, found: state.State) -> None:
        """The format, for a model that is optimised later; one that is already, is in the same from now on."""
        state.prepare(found)
        now, decided = api.decisions(self._model), found["decisions"]
        if now and decided and now["choice"][1] != decided["choice"][1]:
            api.optimize(self._model, self._optimizer, dtype=decided["choice"][0], padding=decided["padding"])

    def _load(self) -> None:
        assert self._path is not None
        for name, part in self._parts.items():
            if part is not None:
                part.load_state_dict(torch.load(self._path / name, map_location="cpu", weights_only=True))

    def epochs(self, number: int) -> Iterator[int]:
        """As range(number), from the epoch on in which the training was."""
        first = self._before["pass"] if self._before else 0
        for epoch in range(first, number):
            self._pass = epoch
            yield epoch

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Those of one epoch that the training hasn't seen: none of an epoch before, and the rest of its own."""
        before, number = self._before, self._pass
        self._pass += 1
        if before is not None and number < before["pass"]:
            return
        choose.choose_again(None)
        self._generators = skipping.generators(loader)
        if before is None or number > before["pass"]:
            self._epoch_random, self._batch = random_state.now(self._generators), 0
            yield from self._counted(iter(loader))
        else:
            yield from self._counted(self._rest(loader, before, number))

    def _rest(self, loader: Any, before: state.State, number: int) -> Iterator[Any]:
        """Samplers draw what they drew when the epoch began; all else goes on where it was."""
        if number > 0:  # what the script did after each of the empty epochs
            self._load()
        state.restore(before, self._model)
        if hasattr(loader, "iteration"):  # accelerate's count their epochs
            loader.set_epoch(number)
        self._epoch_random, self._batch = before["epoch_random"], before["batch"]
        random_state.restore(self._epoch_random, self._generators)
        rest = skipping.batches(loader, self._batch)
        first = next(rest, None)
        random_state.restore(before["random"], self._generators)
        self._before = None
        if first is not None:
            yield first
            yield from rest

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        with stop.listening():
            for batch in batches:
                self._batch += 1
                yield batch
        self._wait()  # what follows may look into the folder

    # --- Saving ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """After each step of the optimizer, on all ranks, within `batches`. Ends the process if that was asked for."""
        self.steps += 1
        blame.note_step(self.steps)
        due = self._due() if self._due is not None else self.steps % self._every == 0
        stops = stop.agreed()
        if stops:
            self.save()
            stop.end()
        if due:
            self._write(later=True)

    def save(self) -> bool:
        """Now, on all ranks. False if it couldn't be written: then the training goes on."""
        return self._write(later=False).saved

    def _write(self, *, later: bool) -> Writing:
        """`later`: the disk may take its time; a training that ends meanwhile waits for it."""
        self._wait()
        parts = {name: part for name, part in self._parts.items() if part is not None}
        saved = {name: part.state_dict() for name, part in parts.items()} if self._output.leads else {}
        name = f"checkpoint-{self.steps}"
        room = sum(map(_bytes, saved.values()))
        with Writing(self._output, name, self.steps, room=room, later=later) as writing:
            for file, content in saved.items():
                writing.write(lambda file=file, content=content: torch.save(content, writing.folder / file))  # type: ignore[misc]
            writing.write(lambda: state.write(writing.folder, self._now()))
        if self._due is not None:
            self._due.saved()
        self._on_its_way = writing if later else None
        return writing

    def _wait(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.wait()

    def _now(self) -> state.State:
        return {
            **state.now(self._model, None),
            "step": self.steps,
            "pass": max(self._pass - 1, 0),
            "batch": self._batch,
            "random": random_state.now(self._generators),
            "epoch_random": self._epoch_random or random_state.now(self._generators),
        }


def _check(model: Any, keep: int) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, found {type(model).__name__}.")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be a number of checkpoints, at least 1, found {keep!r}.")


def _steps_and_due(every: str | int) -> tuple[int, Due | None]:
    """A number of steps, or what says when time is up."""
    asked = settings.duration(settings.SAVE_EVERY)
    if asked is not None:
        return 0, Due(asked)
    if isinstance(every, int) and every > 0:
        return every, None
    seconds = settings.seconds_of(every) if isinstance(every, str) else None
    if seconds is None:
        raise ValueError(f"every must be a number of steps, or a time like '30s', '10min' or '2h', found {every!r}.")
    return 0, Due(seconds)


def _bytes(found: Any) -> int:
    """Of the tensors in a state dict."""
    if torch.is_tensor(found):
        return int(found.nbytes)
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else ()
    return sum(map(_bytes, inside))
