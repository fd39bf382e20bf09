"""Output where a terminal takes only ASCII or Latin-1: … becomes ..., × becomes x, and nothing ends in a traceback."""

from __future__ import annotations

import codecs
import io
import sys

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


def for_this_terminal() -> None:
    """Standard output and error of this process never raise for a character that they can't show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
