"""What `cputrain.explain` says of a model after one training step on a padded batch, in a few words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import cputrain
from tests.sweep import measure

if TYPE_CHECKING:
    from tests.sweep.cases import Case, Pristine, Verdict

# What explain says of a module that only passes something on, or of a single layer: not what a reader looks for.
_MINOR = ("hands ", "as stock; autocast")
_ASIDE, _LEFT = "as stock in its last call: ", "left alone: "


def parts(rows: list[tuple[str, str, str]]) -> tuple[list[str], list[str]]:
    """The kinds of parts that were replaced, and what runs as stock with its reason; each once, in explain's order."""
    replaced: dict[str, None] = {}
    stock: dict[str, None] = {}
    for _, kind, what in rows:
        kind = kind.split(" × ")[0]
        if what.startswith(_LEFT):
            stock[f"`{kind}`: {what.removeprefix(_LEFT)}"] = None
        elif what.startswith(_ASIDE):
            stock[f"`{kind}`: {what.removeprefix(_ASIDE).rsplit('; else ', 1)[0]}"] = None
        elif not what.startswith(_MINOR):
            replaced[what] = None
    return list(replaced), list(stock)


def check(case: Case, given: Pristine) -> Verdict:
    """The verdict's text is the answer, as JSON."""
    from tests.sweep.cases import Verdict, optimised

    model = optimised(case, given.model)
    measure.run(model, given.inputs, training=True, seed=case.seed)
    replaced, stock = parts(cputrain.explain(model).modules)
    return Verdict("same", json.dumps({"replaced": replaced, "stock": stock}))
