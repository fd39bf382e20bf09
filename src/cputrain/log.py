"""The one logger, lines that are said once, and how they look on a terminal: all with the prefix `cputrain:`."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys

logger = logging.getLogger("cputrain")


@functools.cache
def say_once(line: str) -> None:
    """What the user should know of, but needn't act on at once."""
    logger.warning("%s", line)


@functools.cache
def mention_once(line: str) -> None:
    """What went as it should."""
    logger.info("%s", line)


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
