"""cputrain: train transformer models on CPUs, several times faster than stock PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cputrain.api import explain, optimize, restore
    from cputrain.checkpoints.own_loops import Checkpoints
    from cputrain.estimation import estimate
    from cputrain.integrations.accelerate import Accelerator
    from cputrain.integrations.trainer import Trainer
    from cputrain.integrations.training_arguments import TrainingArguments

# Loaded when first asked for: `import cputrain` costs nothing, and the command line can answer without torch.
_HOME_OF = {
    "optimize": "cputrain.api",
    "explain": "cputrain.api",
    "restore": "cputrain.api",
    "Checkpoints": "cputrain.checkpoints.own_loops",
    "estimate": "cputrain.estimation",
    "Accelerator": "cputrain.integrations.accelerate",
    "Trainer": "cputrain.integrations.trainer",
    "TrainingArguments": "cputrain.integrations.training_arguments",
}

__all__ = [
    "Accelerator",
    "Checkpoints",
    "Trainer",
    "TrainingArguments",
    "__version__",
    "estimate",
    "explain",
    "optimize",
    "restore",
]


def __dir__() -> list[str]:
    """The public names are there before their first use: an editor or notebook completes them."""
    return sorted({*globals(), *_HOME_OF})


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cputrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
