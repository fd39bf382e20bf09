"""`cputrain_state.json`: what resumption to the bit needs beside stock's files. Each rank writes its own.

Plain values, read by json: nothing in a checkpoint of ours is executed when it is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cputrain import __version__, api, hardware
from cputrain.checkpoints import ranks
from cputrain.checkpoints.manifest import Bad
from cputrain.formats import choose
from cputrain.log import say_once

FORMAT = 1
State = dict[str, Any]


def name(rank: int) -> str:
    return f"cputrain_state_{rank}.json" if rank else "cputrain_state.json"


def write(folder: Path, state: State) -> None:
    (folder / name(ranks.number())).write_text(json.dumps(state))


def read(folder: Path) -> State | None:
    """This rank's; rank 0's if it has none; None if the checkpoint is stock's."""
    for file in (folder / name(ranks.number()), folder / name(0)):
        try:
            found = json.loads(file.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            raise Bad(f"{file.name} is damaged") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise Bad(f"{file.name} is of another version of cputrain")
        return found
    return None


def now(model: nn.Module, data: int | None) -> State:
    """What is the same in all steps, and what layers remember. `data`: how many samples there are, if that is known."""
    return {"format": FORMAT, "here": _here(model, data), "decisions": api.decisions(model)}


def _here(model: nn.Module | None, data: int | None) -> dict[str, Any]:
    """What must be the same for the same bits; `model` and `data` for a resumption at all, or for its place."""
    return {
        "model": None if model is None else [type(model).__name__, sum(p.numel() for p in model.parameters())],
        "data": data,
        "ranks": ranks.size(),
        "threads": torch.get_num_threads(),
        "instruction set": hardware.best_isa()[0],
        "cputrain": __version__,
        "torch": str(torch.__version__),
    }


def why_not(state: State | None, model: nn.Module | None) -> str:
    """Why a checkpoint can't be resumed with this model; empty if it can."""
    before = (state or {}).get("here", {}).get("model")
    if before is None or model is None or before == _here(model, None)["model"]:
        return ""
    return f"it is of another model ({before[0]} with {before[1]:,} parameters)"


def say_what_differs(state: State | None, data: int | None) -> None:
    """What doesn't keep the training from going on, but from the same numbers."""
    before = (state or {}).get("here", {})
    now = {**_here(None, data), "model": before.get("model")}
    found = [f"{what} {before[what]} → {now[what]}" for what in now if what in before and before[what] != now[what]]
    if found:
        say_once(f"the training goes on, but not with the numbers it would have had: {', '.join(found)}")


def prepare(state: State | None) -> None:
    """Before a model is optimised: the format that was chosen is chosen again, and not measured."""
    decided = (state or {}).get("decisions")
    same = state is not None and state["here"]["instruction set"] == hardware.best_isa()[0]
    choose.choose_again(choose.Choice(*decided["choice"]) if decided and same else None)


def restore(state: State | None, model: nn.Module) -> None:
    """After it was optimised: what its layers remember."""
    if state is not None and state["decisions"]:
        api.remember(model, state["decisions"])
