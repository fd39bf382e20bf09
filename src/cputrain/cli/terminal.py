"""Text for a terminal: lines that are wrapped between words, never within an option or a path, and help pages."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable

Rows = list[tuple[str, str]]

_WIDEST = 140  # longer lines are hard to read
_NARROWEST = 40
_NAMES_END = 32  # a longer name stands on a line of its own; on wide terminals it may take three tenths of the width


def _width() -> int:
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
    return filled(text, _width(), first, " " * indent)


def help_page(usage: list[str], text: str, lists: Iterable[tuple[str, Rows]], examples: str) -> str:
    """Usage, a text, lists in two columns, and examples as they are written; without a newline at the end."""
    width = _width()
    starts = ["Usage: ", *["       "] * (len(usage) - 1)]
    lines = [filled(command, width, start, " " * 11) for start, command in zip(starts, usage, strict=True)]
    parts = ["\n".join(lines)]
    parts += [filled(" ".join(paragraph.split()), width, "  ") for paragraph in inspect.cleandoc(text).split("\n\n")]
    parts += [f"{title}:\n{_two_columns(rows, width)}" for title, rows in lists if rows]
    parts.append(f"Examples:\n{textwrap.indent(inspect.cleandoc(examples), '  ')}")
    return "\n\n".join(parts)


def _two_columns(rows: Rows, width: int) -> str:
    """Names on the left, what they mean on the right; all texts start in the same column."""
    longest = max(_NAMES_END, width * 3 // 10)
    start = 4 + min(max(len(name) for name, _ in rows), longest)
    lines = []
    for name, text in rows:
        if len(name) > longest:
            lines.append(f"  {name}")
            name = ""
        lines.append(filled(text, width, f"  {name}".ljust(start), " " * start))
    return "\n".join(lines)


def in_bytes(number: int | None) -> str:
    """In the largest unit that leaves a whole part: 25274793984 is 23.5 GiB."""
    if number is None:
        return "unknown"
    power = max(0, (number.bit_length() - 1) // 10)
    return f"{number / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[min(power, 4)]}"
