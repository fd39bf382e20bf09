"""A rank that is much slower than the others is named: all wait for it in every step.

What counts is the time for data and forward, in which no rank waits for another one.
"""

from __future__ import annotations

import socket
import statistics
from typing import Any, NamedTuple

from transformers import TrainerCallback

from cputrain.checkpoints import ranks
from cputrain.integrations import recording
from cputrain.log import logger
from cputrain.record.recorder import Recorder

_EVERY = 50  # steps
_TIMES = 1.5
_LEAST_SECONDS = 0.01  # a step: below that it is noise


class Pace(NamedTuple):
    host: str
    seconds: float  # of data and forward, in a step


class SlowRanks(TrainerCallback):
    def __init__(self) -> None:
        self._seconds, self._steps = 0.0, 0
        self._record: Recorder | None = None
        self._named: set[int] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size == 1:
            return
        run = recording.current()
        if run is not None and run.record is not self._record:
            self._record = run.record
            run.record.listeners.append(self._listen)
        if state.global_step % _EVERY == 0:
            found = ranks.of_all(Pace(socket.gethostname(), self._seconds / max(self._steps, 1)))
            self._seconds, self._steps = 0.0, 0
            slow = slowest(found)
            if slow is not None and slow not in self._named and args.process_index == 0:
                logger.warning(sentence(found, slow))
            self._named |= {slow} if slow is not None else set()

    def _listen(self, _: Recorder, entry: dict[str, Any]) -> None:
        self._steps += entry["n"]
        self._seconds += entry["phases"].get("data", 0.0) + entry["phases"].get("forward", 0.0)


def slowest(found: list[Pace]) -> int | None:
    """The rank that all others wait for, if there is one."""
    rank = max(range(len(found)), key=lambda rank: found[rank].seconds)
    usual = _usual(found, rank)
    slow = usual > 0 and found[rank].seconds > _TIMES * usual and found[rank].seconds - usual > _LEAST_SECONDS
    return rank if slow else None


def _usual(found: list[Pace], rank: int) -> float:
    return statistics.median(pace.seconds for other, pace in enumerate(found) if other != rank)


def sentence(found: list[Pace], rank: int) -> str:
    times, host = found[rank].seconds / _usual(found, rank), found[rank].host
    return (
        f"rank {rank} on {host} takes {times:.1f} times as long as the others for its part of a step, and all wait for "
        "it: look there for other programs, a lower clock, or fewer cores (cputrain doctor)"
    )
