"""Whether a script under `cputrain run` trained without us: a loop of its own, which no integration takes over.

Imported while torch itself is being imported.
"""

from __future__ import annotations

import sys
from typing import Any

from cputrain import blame, settings
from cputrain.integrations import hook, trial
from cputrain.log import say_once

ADVICE = (
    "nothing was optimised: the script trains in a loop of its own. Add two lines to it, where the optimizer is made: "
    "`import cputrain` and `model, optimizer = cputrain.optimize(model, optimizer)`"
)

UNRESUMABLE = (
    "nothing can resume this script, which trains in a loop of its own: a restart begins anew. cputrain.Checkpoints "
    "saves such a loop's state and goes on from it, Trainer does it by itself"
)

# Steps of optimizers, while a model was optimised and while none was.
_steps = {True: 0, False: 0}


def advice() -> str | None:
    """What to say at the end of a script; None if it trained nothing, or something with us."""
    return ADVICE if _steps[False] and not _steps[True] else None


def _note_step(*_: Any) -> None:
    trial.watch_own_loop()
    if not _is_resumable():
        steps = sum(_steps.values())
        blame.note_step(steps + 1)
        if steps == 0 and settings.is_first_rank() and _goes_on():
            say_once(UNRESUMABLE)
    api, native = sys.modules.get("cputrain.api"), sys.modules.get("cputrain.native")
    if native is None or native.why_not() is None:  # elsewhere nothing can be optimised, and that was said
        _steps[api is not None and api.any_optimized()] += 1


def _is_resumable() -> bool:
    """Trainer or Checkpoints train, or an Accelerator is there, which saves what its script tells it to."""
    resume, accelerate = sys.modules.get("cputrain.checkpoints.resume"), sys.modules.get("accelerate.state")
    return bool((resume and resume.has_trainings()) or (accelerate and accelerate.AcceleratorState._shared_state))


def _goes_on() -> bool:
    """Whether a resumption was asked for, or a restart is to go on."""
    return settings.value_of(settings.RESUME) not in ("", "never") or settings.seconds_between_saves() is not None


def _watch() -> None:
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(_note_step)


if hook.is_active() and "torch.optim.optimizer" in sys.modules:
    _watch()
