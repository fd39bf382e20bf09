"""What `explain` returns: a table that prints itself."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from torch import nn

from cputrain.layers.encoder import DROPPED
from cputrain.layers.patch import STEPPED_ASIDE, Patches, arithmetic_of

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Explanation:
    """Facts about the whole model, and one row per kind of module: where, what, how or why not."""

    facts: list[Row]
    modules: list[Row]

    def __str__(self) -> str:
        return "\n".join(
            [*_table(self.facts), "", *_table([("module", "class", "what runs"), *self.modules])]
            if self.modules
            else _table(self.facts)
        )


def _table(rows: list[Row]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else [0, 0]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]


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
        trouble = arithmetic_of(entry.module).trouble
        what += f"; products in fp32 again: {trouble}" if trouble else ""
        row = (_pattern(entry.name), type(entry.module).__name__, what)
        counts[row] += (row, entry.module) not in counted
        counted.add((row, entry.module))
    for name, kind, reason in patches.left:
        counts[(_pattern(name), kind, f"left alone: {reason}")] += 1
    return [(name, kind if n == 1 else f"{kind} × {n}", what) for (name, kind, what), n in counts.items()]
