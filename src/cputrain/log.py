"""What a user reads: the one logger, with the prefix `cputrain:`, and text that a terminal of ASCII can show."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
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


# --- Where a terminal takes only ASCII or Latin-1: … becomes ..., × becomes x, and nothing ends in a traceback -------

_IN_ASCII = {"…": "...", "×": "x", "–": "-", "—": "-", "→": "->", "≤": "<=", "≥": ">=", "’": "'", "•": "*"}
_HANDLER = "cputrain_plain_text"


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start]
    if found in _IN_ASCII:
        return _IN_ASCII[found], error.start + 1
    one = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    return codecs.backslashreplace_errors(one)


codecs.register_error(_HANDLER, _replaced)


def printable(text: str) -> str:
    """The text, with look-alikes for what standard output can't show."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, _HANDLER).decode(encoding)


def tolerate_ascii_terminals() -> None:
    """Standard output and error of this process never raise for a character that they can't show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
