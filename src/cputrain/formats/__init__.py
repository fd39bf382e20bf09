"""Number formats: how a layer multiplies and what it saves for the backward. A file for each; operators know none."""

from __future__ import annotations

from cputrain.formats.base import FORMATS, Activated, Call, Format, OutputGrad, Saved, Use, probing
from cputrain.formats.bf16 import Bf16
from cputrain.formats.bf16_saved import Bf16Saved
from cputrain.formats.fp32 import FP32, Fp32
from cputrain.formats.int16 import Int16
from cputrain.formats.weights import Dense, Joined, Packed, Weight

__all__ = [
    "FORMATS", "FP32", "Activated", "Bf16", "Bf16Saved", "Call", "Dense", "Format", "Fp32", "Int16", "Joined",
    "OutputGrad", "Packed", "Saved", "Use", "Weight", "probing",
]  # fmt: skip
