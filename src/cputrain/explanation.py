"""What `explain` returns: a table that prints itself, and shows itself in the REPL and in notebooks."""

from __future__ import annotations

import html
import re
import shutil
import textwrap
from collections import Counter
from dataclasses import dataclass

from torch import nn

from cputrain.blocks.encoder import DROPPED
from cputrain.log import printable
from cputrain.patching.bind import STEPPED_ASIDE, Patches, format_of

Row = tuple[str, str, str]


_HEAD = ("module", "class", "what runs")
_LEAST_WIDTH = 30  # of the last column; on narrower terminals it stands below the others


@dataclass(frozen=True, repr=False)
class Explanation:
    """Facts about the whole model, and one row per kind of module: where, what, how or why not.

    `print` shows it with long lines, which can be searched; a REPL within the terminal's width; a notebook as HTML.
    """

    facts: list[Row]
    modules: list[Row]

    def __str__(self) -> str:
        return printable("\n".join(self._lines(None)))

    def __repr__(self) -> str:
        return printable("\n".join(self._lines(shutil.get_terminal_size().columns)))

    def _repr_html_(self) -> str:
        modules = _html([_HEAD], "th") + _html(self.modules, "td") if self.modules else ""
        tables = [_html(self.facts, "td"), modules]
        return "\n".join(f"<table>{rows}</table>" for rows in tables if rows)

    def _lines(self, width: int | None) -> list[str]:
        if not self.modules:
            return _table(self.facts, width)
        return [*_table(self.facts, width), "", *_table([_HEAD, *self.modules], width)]


def _table(rows: list[Row], width: int | None) -> list[str]:
    """The first two columns as wide as their texts; the third is wrapped if there is a width to keep to."""
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    start = sum(widths) + 4
    if width is None:
        return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    if width - start >= _LEAST_WIDTH:
        return [line for a, b, c in rows for line in _wrapped(f"{a:<{widths[0]}}  {b:<{widths[1]}}  ", c, start, width)]
    return [line for a, b, c in rows for line in (f"{a:<{widths[0]}}  {b}", *_wrapped(" " * 4, c, 4, width))]


def _wrapped(first: str, text: str, indent: int, width: int) -> list[str]:
    lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False)
    return lines or [first.rstrip()]


def _html(rows: list[Row], cell: str) -> str:
    """Rows of a table. Names of modules and classes are the user's: whatever they hold is shown as text."""
    style = "text-align:left;vertical-align:top"
    styles = (f"{style};white-space:nowrap", f"{style};white-space:nowrap", style)  # only the last column is wrapped
    made = [
        "".join(f'<{cell} style="{how}">{html.escape(text)}</{cell}>' for how, text in zip(styles, row, strict=True))
        for row in rows
    ]
    return "".join(f"<tr>{row}</tr>" for row in made)


def _pattern(name: str) -> str:
    """Layers of one kind share a row: encoder.layer.3.output → encoder.layer.*.output."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) or "(the model)"


def explain_patches(patches: Patches) -> list[Row]:
    counts: Counter[Row] = Counter()
    counted: set[tuple[Row, nn.Module]] = set()  # a module of which several methods were replaced counts once
    inside = {part for entry in patches.replaced for child in entry.bypassed for part in child.modules()}
    for entry in patches.replaced:
        if entry.module in inside:
            continue
        aside = entry.module.__dict__.get(STEPPED_ASIDE)
        how = "padding kept" if entry.what == DROPPED else "as stock"
        what = entry.what if aside is None else f"{how} in its last call: {aside}; else {entry.what}"
        trouble = format_of(entry.module).fallback
        what += f"; products in fp32 again: {trouble}" if trouble else ""
        row = (_pattern(entry.name), type(entry.module).__name__, what)
        counts[row] += (row, entry.module) not in counted
        counted.add((row, entry.module))
    for name, kind, reason in patches.left:
        counts[(_pattern(name), kind, f"left alone: {reason}")] += 1
    return [(name, kind if n == 1 else f"{kind} × {n}", what) for (name, kind, what), n in counts.items()]
