"""Whether it is time to save: rank 0's clock decides, and is asked seldom, because the others have to hear it."""

from __future__ import annotations

import time

from cputrain.checkpoints import ranks


class Due:
    """Called at the end of every step, on all ranks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.saved()

    def saved(self) -> None:
        """Now, whatever the reason: the time begins anew."""
        self._began, self._steps, self._look = time.monotonic(), 0, 1

    def __call__(self) -> bool:
        self._steps += 1
        if self._steps < self._look:
            return False
        self._look = ranks.of_first(self._next_look())
        return self._look == 0

    def _next_look(self) -> int:
        """The step that comes at half of the time that is left, 0 if none is."""
        passed = time.monotonic() - self._began
        if passed >= self.seconds:
            return 0
        ahead = (self.seconds - passed) / max(passed / self._steps, 1e-6) / 2
        return self._steps + (max(1, min(int(ahead), 10_000)) if ranks.size() > 1 else 1)
