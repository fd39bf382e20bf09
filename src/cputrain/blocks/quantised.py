"""Linear layers of bitsandbytes: 4 bits (NF4, FP4) with a scale for each block, 8 bits with one for each row.

Products unpack the weight on its way into their panels, in forward and backward, in training and in evaluation: on a
CPU with bf16, bitsandbytes' own evaluation forward repacks the weight in place, with loss, and breaks training.
"""

from __future__ import annotations

import math
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.formats import Weight, stored
from cputrain.formats.stored import Nested
from cputrain.formats.weights import Packed

_MODULE = "bitsandbytes.nn.modules"
_FOUR_BITS = {"Linear4bit", "LinearNF4", "LinearFP4"}
_EIGHT_BITS = {"Linear8bitLt"}
REPACKED = (
    "its weight was repacked by an evaluation forward of bitsandbytes, which lost some of it: load the model again, "
    "and call cputrain.optimize before it runs"
)


def is_four_bits(module: nn.Module) -> bool:
    return type(module).__module__ == _MODULE and type(module).__name__ in _FOUR_BITS


def is_eight_bits(module: nn.Module) -> bool:
    return type(module).__module__ == _MODULE and type(module).__name__ in _EIGHT_BITS


def is_quantised(module: nn.Module) -> bool:
    return is_four_bits(module) or is_eight_bits(module)


def weight_of(module: Any) -> Weight | str:
    """The weight as it is stored, or why only bitsandbytes can say what it is."""
    return _four_bits(module) if is_four_bits(module) else _eight_bits(module)


OLDEST = (0, 46)  # the first bitsandbytes whose 4-bit layers train on a CPU
_NOT_YET = "its weight was not quantised yet"


def why_damaged(model: nn.Module) -> str | None:
    """Why a quantised layer can't be trained by anyone: it was repacked or damaged, or its library is too old."""
    layers = [(name, part) for name, part in model.named_modules() if is_quantised(part)]
    if not layers:
        return None
    version = metadata.version("bitsandbytes")
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"bitsandbytes {version} doesn't train on CPUs: install 0.46 or later (pip install cputrain[qlora])"
    for name, layer in layers:
        reason = _four_bits(layer) if is_four_bits(layer) else None
        if isinstance(reason, str) and reason != _NOT_YET:
            return f"{name or type(layer).__name__} can't be trained: {reason}"
    return None


def _four_bits(module: Any) -> Weight | str:
    state = getattr(module.weight, "quant_state", None)
    state = getattr(module, "quant_state", None) if state is None else state
    if state is None:
        return _NOT_YET
    if getattr(state, "packing_format_for_cpu", False):
        return REPACKED
    reason = _why_not_state(module, state)
    if reason is not None:
        return reason
    values = module.weight.data.detach().reshape(-1).view(torch.uint8)
    shape = (int(state.shape[0]), int(state.shape[1]))
    nested = _nested(state) if state.nested else None
    scales = state.absmax.contiguous() if nested is not None else state.absmax.float().contiguous()
    return Packed(stored.four_bits(values, shape, state.code.float().contiguous(), scales, state.blocksize, nested))


def _nested(state: Any) -> Nested:
    inner = state.state2
    return Nested(
        inner.code.float().contiguous(), inner.absmax.float().contiguous(), inner.blocksize, float(state.offset)
    )


def _why_not_state(module: Any, state: Any) -> str | None:
    """A state that doesn't fit its layer: damaged, or another layer's."""
    shape = tuple(state.shape or ())
    if shape != (module.out_features, module.in_features):
        return f"its 4-bit state is one of a layer {shape}, not of {(module.out_features, module.in_features)}"
    count = math.prod(shape)
    block = state.blocksize
    if not isinstance(block, int) or block < stored.FEWEST_IN_BLOCK or block % 2:
        return f"its 4-bit state has blocks of {block}"
    size = module.weight.data.numel() * module.weight.data.element_size()
    if size < (count + 1) // 2 or not module.weight.data.is_cpu:
        return f"its 4-bit weight has {size} bytes, {(count + 1) // 2} are needed"
    if not isinstance(state.code, Tensor) or state.code.numel() != 16:
        return "its 4-bit state has no code of 16 numbers"
    if state.absmax.numel() != -(-count // block):
        return f"its 4-bit state has {state.absmax.numel()} scales, {-(-count // block)} are needed"
    return _why_not_nested(state) if state.nested else None


def _why_not_nested(state: Any) -> str | None:
    inner = state.state2
    if state.absmax.dtype != torch.uint8 or inner.code.numel() != 256 or state.offset is None:
        return "its 4-bit state has scales of an unknown kind"
    needed = -(-state.absmax.numel() // inner.blocksize)
    return None if inner.absmax.numel() == needed else f"its 4-bit state has {inner.absmax.numel()} scales of scales"


def _eight_bits(module: Any) -> Weight | str:
    """CB · SCB / 127, which is what bitsandbytes' backward multiplies by. CB moves at the first forward."""
    if not module.training:
        return "8-bit layers run as stock in evaluation"
    if module.state.has_fp16_weights:
        return "its 8-bit weights are trained"
    found = ((module.weight.CB, module.weight.SCB), (module.state.CB, module.state.SCB))
    values, scales = next((pair for pair in found if pair[0] is not None and pair[1] is not None), (None, None))
    if values is None or scales is None or values.dtype != torch.int8:
        return _NOT_YET
    shape = (module.out_features, module.in_features)
    if tuple(values.shape) != shape or scales.numel() != shape[0] or not values.is_cpu:
        return f"its 8-bit state is one of a layer {tuple(values.shape)}, not of {shape}"
    return Packed(stored.eight_bits(values.contiguous(), scales.reshape(-1).float() / 127))
