"""Fused steps beneath stock optimizers, and the fused norm behind `clip_grad_norm_`."""

from __future__ import annotations

from cputrain.optimizers.takeover import Takeover, give_back, take_over

__all__ = ["Takeover", "give_back", "take_over"]
