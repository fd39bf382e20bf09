"""Collects what happens in a run: sums of the steps of at least a second become one line, events their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cputrain import output_folder, process_memory
from cputrain.log import logger
from cputrain.record.lines import Lines
from cputrain.secrets_in_clear import shown_value

FORMAT = 1
PHASES = ("data", "forward", "backward", "communication", "optimizer", "checkpoint")
# Communication runs beside the backward, in threads of its own: it is no part of the step's time.
BESIDE = "communication"
_LEAST_SECONDS = 1.0
_MOST_EVENTS = 1000


def path_of(output: str | Path, rank: int) -> Path:
    return output_folder.path(output) / f"run-{rank}.jsonl"


class Steps:
    """The sum of some steps."""

    def __init__(self) -> None:
        self.number = 0
        self.seconds = self.loss = self.gflop = 0.0
        self.losses = self.real = self.padded = 0
        self.phases = dict.fromkeys(PHASES, 0.0)

    def measured(self) -> float:
        """Seconds in phases that are parts of a step."""
        return sum(seconds for name, seconds in self.phases.items() if name != BESIDE)

    def entry(self, step: int, moment: float, rate: float | None) -> dict[str, Any]:
        phases = {name: round(seconds, 5) for name, seconds in self.phases.items() if seconds}
        found = {"kind": "steps", "t": round(moment, 3), "step": step, "n": self.number, "s": round(self.seconds, 5)}
        found |= {"loss": float(f"{self.loss / self.losses:.7g}")} if self.losses else {}
        found |= {"lr": rate} if rate is not None else {}
        found |= {"real": self.real, "padded": self.padded} if self.padded else {}
        found |= {"gflop": round(self.gflop, 3)} if self.gflop else {}
        return {**found, "rss": process_memory.resident(), "phases": phases}


class Recorder:
    """One rank's run. `lines` is None where only the progress is wanted."""

    def __init__(
        self,
        lines: Lines | None,
        head: Mapping[str, Any],
        total: int | None = None,
        done: int = 0,
        least: float = _LEAST_SECONDS,
    ) -> None:
        self.total, self.step_number = total, done
        self.head = dict(head)
        self.communicated: Callable[[], float] = lambda: 0.0  # seconds so far
        self.listeners: list[Callable[[Recorder, dict[str, Any]], None]] = []
        self._lines, self._least = lines, least
        self._events = 0
        self._began = self._last_step = self._last_line = time.perf_counter()
        self._now = Steps()
        self._loss: float | None = None
        self._communicated = 0.0
        self._handler = _Events(self)
        if lines is not None:
            lines.write({"kind": "run", "format": FORMAT, "time": time.time(), **head})
            logger.addHandler(self._handler)

    def spent(self, phase: str, seconds: float) -> None:
        self._now.phases[phase] += seconds

    def loss(self, value: float) -> None:
        """Of one backward; those of a step that accumulates gradients add up to the step's."""
        self._loss = value + (self._loss or 0.0)

    def tokens(self, real: int, padded: int, gflop: float) -> None:
        self._now.real += real
        self._now.padded += padded
        self._now.gflop += gflop

    def step(self, rate: float | None = None) -> None:
        """An optimizer's step is over."""
        moment, now = time.perf_counter(), self._now
        self.step_number += 1
        now.number += 1
        now.seconds += moment - self._last_step
        self._last_step = moment
        if self._loss is not None:
            now.loss, now.losses, self._loss = now.loss + self._loss, now.losses + 1, None
        if moment - self._last_line >= self._least:
            self._write_steps(moment, rate)

    def event(self, what: str, text: str) -> None:
        self._events += 1
        if self._lines is not None and self._events <= _MOST_EVENTS:
            moment = round(time.perf_counter() - self._began, 3)
            self._lines.write({"kind": "event", "t": moment, "step": self.step_number, "what": what, "text": text})

    def metrics(self, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        if self._lines is not None and numbers:
            moment = round(time.perf_counter() - self._began, 3)
            self._lines.write({"kind": "metrics", "t": moment, "step": self.step_number, "values": numbers})

    def close(self, how: str = "ended") -> None:
        logger.removeHandler(self._handler)
        moment = time.perf_counter()
        if self._now.number:
            self._now.seconds = max(self._now.seconds, self._now.measured())  # a checkpoint after the last step
            self._write_steps(moment, None)
        if self._lines is not None:
            end = {
                "t": round(moment - self._began, 3),
                "step": self.step_number,
                "how": how,
                "peak": process_memory.peak(),
            }
            self._lines.write({"kind": "end", **end})
            self._lines.close()
            self._lines = None

    def _write_steps(self, moment: float, rate: float | None) -> None:
        communicated = self.communicated()
        self._now.phases[BESIDE] += communicated - self._communicated
        entry = self._now.entry(self.step_number, moment - self._began, rate)
        self._now, self._last_line, self._communicated = Steps(), moment, communicated
        if self._lines is not None:
            self._lines.write(entry)
        for listener in self.listeners:
            listener(self, entry)


class _Events(logging.Handler):
    """What cputrain tells the user (fall-backs, guards, restarts) is an event of the run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        self._recorder.event(record.levelname.lower(), shown_value(record.getMessage())[:2000])
