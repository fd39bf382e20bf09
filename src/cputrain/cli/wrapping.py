"""Lines that are wrapped between words: neither options nor paths are cut in two."""

from __future__ import annotations

import shutil
import sys
import textwrap

_WIDEST = 140  # longer lines are hard to read
_NARROWEST = 40


def terminal_width() -> int:
    return max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))


def filled(text: str, width: int, first: str = "", others: str | None = None) -> str:
    """`first` begins the first line; `others`, or `first` again, all that follow."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=first if others is None else others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def on_a_terminal(first: str, text: str, indent: int) -> str:
    """`first` and `text`, wrapped with an indent if people read them; a file or pipe gets one line."""
    if not sys.stdout.isatty():
        return first + text
    return filled(text, terminal_width(), first, " " * indent)
