"""Lines of the logger `cputrain` on the terminal, all with the prefix `cputrain:`."""

from __future__ import annotations

import contextlib
import logging
import sys

logger = logging.getLogger("cputrain")


class Terminal(logging.StreamHandler):
    """Lines on stderr, with one prefix, above progress bars rather than in them."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if line.startswith(("cputrain ", "cputrain:")) else f"cputrain: {line}"

    def emit(self, record: logging.LogRecord) -> None:
        with _bars_cleared(self.stream):
            super().emit(record)


def show_where_nobody_logs() -> None:
    """Gives warnings their prefix in a script that set up no logging; Python would print the bare sentences."""
    if not logger.handlers:
        handler = Terminal()
        handler.setLevel(logging.WARNING)
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logger.addHandler(handler)


def _bars_cleared(stream: object) -> contextlib.AbstractContextManager:
    """tqdm's bars that end on this terminal are drawn again below the line."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if not getattr(tqdm, "_instances", None):
        return contextlib.nullcontext()
    return tqdm.external_write_mode(file=stream)  # type: ignore[union-attr]
