"""How a help page looks: usage, a text, lists in two columns and examples, as wide as the terminal."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable

from cputrain.cli.wrapping import filled, terminal_width

Rows = list[tuple[str, str]]

_NAMES_END = 32  # a longer name stands on a line of its own; on wide terminals it may take three tenths of the width


def page(usage: Iterable[str], text: str, lists: Iterable[tuple[str, Rows]], examples: str) -> str:
    """The whole page, without a newline at its end. Examples are shown as they are written."""
    width = terminal_width()
    parts = [_usage(usage, width)]
    parts += [filled(" ".join(paragraph.split()), width, "  ") for paragraph in inspect.cleandoc(text).split("\n\n")]
    parts += [f"{title}:\n{_two_columns(rows, width)}" for title, rows in lists if rows]
    parts.append(f"Examples:\n{textwrap.indent(inspect.cleandoc(examples), '  ')}")
    return "\n\n".join(parts)


def _usage(commands: Iterable[str], width: int) -> str:
    lines: list[str] = []
    for command in commands:
        start = "Usage: " if not lines else "       "
        lines.append(filled(command, width, start, "           "))
    return "\n".join(lines)


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
