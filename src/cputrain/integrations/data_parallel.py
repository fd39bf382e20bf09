"""DistributedDataParallel with `grad_compression`, made by Accelerate, by Trainer or by a script's own loop.

Imported while torch itself is being imported, so everything that needs torch is imported when a model is wrapped.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from cputrain.integrations import hook, settings

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def compress(model: DistributedDataParallel) -> None:
    """Lets gradients travel as the environment says."""
    compression = settings.grad_compression()
    if compression != "none" and model.device_type == "cpu":
        from cputrain.distributed import gradient_hooks

        gradient_hooks.register_later(model, compression)


def _compress_all() -> None:
    """Every model that is wrapped from now on."""
    kind = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
    stock = kind.__init__

    @functools.wraps(stock)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        compress(self)

    kind.__init__ = init


if hook.is_active() and "torch.nn.parallel.distributed" in sys.modules:
    _compress_all()
