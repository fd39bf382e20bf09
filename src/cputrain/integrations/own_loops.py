"""Whether a script under `cputrain run` trained without us: a loop of its own, which no integration takes over.

Imported while torch itself is being imported.
"""

from __future__ import annotations

import sys
from typing import Any

from cputrain.integrations import hook, trial

ADVICE = (
    "nothing was optimised: the script trains in a loop of its own. Add two lines to it, where the optimizer is made: "
    "`import cputrain` and `model, optimizer = cputrain.optimize(model, optimizer)`"
)

# Steps of optimizers, while a model was optimised and while none was.
_steps = {True: 0, False: 0}


def advice() -> str | None:
    """What to say at the end of a script; None if it trained nothing, or something with us."""
    return ADVICE if _steps[False] and not _steps[True] else None


def _note_step(*_: Any) -> None:
    trial.watch_own_loop()
    api, native = sys.modules.get("cputrain.api"), sys.modules.get("cputrain.native")
    if native is None or native.why_not() is None:  # elsewhere nothing can be optimised, and that was said
        _steps[api is not None and api.any_optimized()] += 1


def _watch() -> None:
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(_note_step)


if hook.is_active() and "torch.optim.optimizer" in sys.modules:
    _watch()
