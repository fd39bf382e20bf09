"""How a training gets on, in one line: step, loss, real tokens a second, share of the CPU's peak, time left, memory.

Trainer's own bar shows step and time left already, and gets the rest behind them. A script with a loop of its own gets
a line of ours; where there is no terminal, a plain line from time to time.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from cputrain import settings

# Between plain lines: soon at first, then seldom enough for a log that people read.
_FIRST_SECONDS, _MOST_SECONDS = 5.0, 60.0


def wanted() -> str | None:
    """live, lines or None: only the first rank says anything, and only under `run` or `launch`."""
    from cputrain.integrations import hook

    asked = settings.one_of(settings.PROGRESS) or "auto"
    if asked == "off" or not settings.is_first_rank() or (asked == "auto" and not hook.is_active()):
        return None
    if asked != "auto":
        return asked
    return "live" if sys.stderr is not None and sys.stderr.isatty() else "lines"


class Progress:
    """Listens to a recorder."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._next, self._pause = time.perf_counter() + _FIRST_SECONDS, _FIRST_SECONDS
        self._shown = False

    def __call__(self, record: Any, entry: dict[str, Any]) -> None:
        bar = _trainers_bar()
        if bar is not None and self._how == "live":
            bar.set_postfix_str(", ".join(parts(entry, record.head)), refresh=False)
        elif self._how == "live":
            self._show(line(entry, record.head, record.total))
        elif time.perf_counter() >= self._next:
            self._pause = min(_MOST_SECONDS, 2 * self._pause)
            self._next = time.perf_counter() + self._pause
            print(f"cputrain: {line(entry, record.head, record.total)}", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
        self._shown = True

    def close(self) -> None:
        if self._shown:
            print(file=sys.stderr, flush=True)


def line(entry: dict[str, Any], head: dict[str, Any], total: int | None) -> str:
    of = f"/{total:,}" if total and total > 0 else ""
    words = [f"step {entry['step']:,}{of}", *parts(entry, head)]
    if of and entry["n"]:
        left = (total - entry["step"]) * entry["s"] / entry["n"]  # type: ignore[operator]
        words.insert(-1, f"{duration(left)} left")
    elif entry["n"]:
        words.insert(1, f"{entry['s'] / entry['n']:.3g} s a step")
    return ", ".join(words)


def parts(entry: dict[str, Any], head: dict[str, Any]) -> list[str]:
    """What a progress bar doesn't know."""
    words = []
    if entry.get("loss") is not None:
        words.append(f"loss {entry['loss']:.4g}")
    if entry.get("real") and entry["s"]:
        words.append(f"{entry['real'] / entry['s']:,.0f} tokens/s")
    share = share_of_peak(entry, head)
    if share is not None:
        words.append(f"{share:.0%} of peak" if share >= 0.1 else f"{share:.1%} of peak")
    if entry.get("rss"):
        words.append(f"{entry['rss'] / 1e9:.1f} GB")
    return words


def share_of_peak(entry: dict[str, Any], head: dict[str, Any]) -> float | None:
    peak, gflop = head.get("peak_gflops"), entry.get("gflop")
    return gflop / entry["s"] / peak if peak and gflop and entry["s"] else None


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _trainers_bar() -> Any:
    """tqdm's bar of a training, if one is on the screen."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    bars = [bar for bar in getattr(tqdm, "_instances", ()) if not getattr(bar, "disable", True)]
    return min(bars, key=lambda bar: abs(bar.pos), default=None)
