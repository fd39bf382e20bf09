"""What the machines of a training tell each other while it runs: I live, my ranks have ended, mine have failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_BEAT_SECONDS = 5.0
# An agent that ends its ranks, or is stopped for a minute, is late and not gone.
_SILENT_SECONDS = 90.0


class Failure(NamedTuple):
    """Why the training is over for everybody, in words, and with which exit code."""

    sentence: str
    code: int


class Peers:
    """The agents of one round, by their numbers, through the store that they share."""

    def __init__(self, store: Any, own: int, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._own, self._size, self._clock = store, own, size, clock
        self._beats = 0
        self._next_beat = 0.0
        self._heard: dict[int, tuple[str, float]] = {}  # the last state of a peer, and since when it is the same
        # A static rendezvous keeps one store for all starts: without a count, the last start's end would count again.
        self.start = self._store.add(f"cputrain/starts/{own}", 1)
        self._failed = f"cputrain/failed/{self.start}"
        self.beat()

    def beat(self) -> None:
        if self._clock() >= self._next_beat:
            self._beats += 1
            self._say(f"running {self._beats}")

    def say_ended(self) -> None:
        self._say("ended")

    def say_failed(self, failure: Failure) -> None:
        """The first counts: what fails then fails because of it."""
        self._store.compare_set(self._failed, "", json.dumps(failure))

    def failure(self) -> Failure | None:
        if not self._store.check([self._failed]):
            return None
        self._store.set(f"cputrain/heard/{self.start}/{self._own}", "")
        return Failure(*json.loads(self._store.get(self._failed)))

    def all_heard(self) -> bool:
        """Whether no machine needs the store any more, which may end with this process."""
        return self._store.check(
            [f"cputrain/heard/{self.start}/{peer}" for peer in range(self._size) if peer != self._own]
        )

    def has_ended(self, peer: int) -> bool:
        return self._state(peer) == f"{self.start} ended"

    def all_ended(self) -> bool:
        return all(map(self.has_ended, range(self._size)))

    def lost(self) -> list[int]:
        """Those that have been silent for long, or have started anew without us. To be asked again and again."""
        return [peer for peer in range(self._size) if peer != self._own and self._is_lost(peer)]

    def _is_lost(self, peer: int) -> bool:
        state, now = self._state(peer), self._clock()
        before, since = self._heard.setdefault(peer, (state, now))
        if state != before:
            self._heard[peer] = (state, now)
            since = now
        start, _, doing = state.partition(" ")
        return int(start or 0) > self.start or (doing != "ended" and now - since > _SILENT_SECONDS)

    def _say(self, doing: str) -> None:
        self._store.set(f"cputrain/state/{self._own}", f"{self.start} {doing}")
        self._next_beat = self._clock() + _BEAT_SECONDS

    def _state(self, peer: int) -> str:
        """The number of its start, and what it does; nothing if it hasn't begun."""
        key = f"cputrain/state/{peer}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
