"""Models in bf16 or fp16, the dtypes in which transformers 5 loads most checkpoints of language models.

Inside, activations are fp32. Frozen matrices stay as they are: products read their two bytes. What is trained becomes
fp32 in place (same Parameter objects), so that gradients, clipping, DDP, optimizer and checkpoints are those of an fp32
model; so do vectors and buffers, which are small. What goes in and comes out has the dtype that it had.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cputrain.formats.weights import HALF

# module.__dict__ key: the dtypes of its parameters and buffers that are fp32 now, by name.
PROMOTED = "_cputrain_promoted"
# … and the dtype of what a model takes and gives.
LOADED = "_cputrain_loaded_dtype"

# Adapters of peft that multiply by the sum of a frozen weight and what they train.
_SUMS = ("peft.tuners.trainable_tokens.", "peft.tuners.shira.")

_inside: ContextVar[bool] = ContextVar("cputrain_inside_a_half_precision_model", default=False)


def is_half(tensor: Tensor | None) -> bool:
    """Not those of bitsandbytes, whose bytes may be stored as bf16."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.dtype in HALF  # type: ignore[union-attr]


def is_frozen_half(weight: Tensor) -> bool:
    return weight.dtype in HALF and not weight.requires_grad


def reads_halves(module: nn.Module) -> bool:
    """Its matrices may stay in half precision: its product, or its look-up, is ours."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    return isinstance(module, nn.Embedding) or type(module) is nn.Linear or name == "transformers.pytorch_utils.Conv1D"


def why_not(model: nn.Module) -> str | None:
    """Why activations can't be fp32 inside: other code would multiply them with a frozen matrix of another dtype."""
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        return "DistributedDataParallel has its parameters already: call optimize before"
    if (release := _earlier_transformers(model)) is not None:
        return f"models of transformers {release} look at their parameters' dtype themselves: 5.0 or later is needed"
    frozen = False
    for part in model.modules():
        if any(is_half(p) and p.dim() > 1 and not p.requires_grad for p in part._parameters.values() if p is not None):
            frozen = True
            if not reads_halves(part):
                return f"frozen weights of {type(part).__name__} are multiplied by its own code"
    reader = next(filter(_reads_weights, model.modules()), None) if frozen else None
    return None if reader is None else f"the code of {type(reader).__name__} reads weights of its parts by itself"


def _earlier_transformers(model: nn.Module) -> str | None:
    """Its release, if models of it make masks and numbers in the dtype of their parameters, whatever the input's is."""
    library = sys.modules.get("transformers")
    release = str(getattr(library, "__version__", "5"))
    is_theirs = any(type(part).__module__.startswith("transformers.") for part in model.modules())
    return release if is_theirs and int(release.partition(".")[0]) < 5 else None


def _reads_weights(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    libraries = ("torch.", "peft.", "bitsandbytes.")
    if code is None or "weight" in module._parameters or type(module).__module__.startswith(libraries):
        return False
    return "weight" in code.co_names


def promote(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Makes fp32 of what is trained, of vectors and buffers, and of an optimizer's state; notes what they were."""
    in_sums = _in_sums(model)
    for part in model.modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and is_half(tensor) and (tensor in in_sums or not _stays(part, name, tensor)):
                part.__dict__.setdefault(PROMOTED, {})[name] = tensor.dtype
                _cast(tensor, tensor.dtype, torch.float32, optimizer)


def _in_sums(model: nn.Module) -> set[Tensor]:
    adapters = (part for part in model.modules() if type(part).__module__.startswith(_SUMS))
    bases = (getattr(adapter, "base_layer", None) for adapter in adapters)
    return {parameter for base in bases if isinstance(base, nn.Module) for parameter in base.parameters()}


def _stays(module: nn.Module, name: str, tensor: Tensor) -> bool:
    return name in module._parameters and tensor.dim() > 1 and not tensor.requires_grad


def round_back(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Undoes `promote`."""
    for part in model.modules():
        for name, dtype in part.__dict__.pop(PROMOTED, {}).items():
            tensor = part._parameters.get(name, part._buffers.get(name))
            if tensor is not None:
                _cast(tensor, torch.float32, dtype, optimizer)


def _cast(tensor: Tensor, before: torch.dtype, after: torch.dtype, optimizer: Optimizer | None) -> None:
    if tensor.dtype != before:
        return
    tensor.data = tensor.data.to(after)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(after)
    state = {} if optimizer is None else optimizer.state.get(tensor, {})
    for name, value in state.items():  # moments; a count of steps has another shape
        if isinstance(value, Tensor) and value.dtype == before and value.shape == tensor.shape:
            state[name] = value.to(after)


def mark(model: nn.Module, *parts: nn.Module) -> None:
    """Notes on the model, and on models inside, the dtype that they take and give."""
    dtype = loaded_dtype(model)
    for part in (model, *parts) if dtype is not None else ():
        part.__dict__[LOADED] = dtype


def noted(model: nn.Module) -> list[tuple[nn.Module, dict[str, torch.dtype]]]:
    """What was promoted, to be put back (`note`) after all other notes have been taken off the model."""
    return [(part, part.__dict__[PROMOTED]) for part in model.modules() if PROMOTED in part.__dict__]


def note(notes: list[tuple[nn.Module, dict[str, torch.dtype]]]) -> None:
    for part, dtypes in notes:
        part.__dict__[PROMOTED] = dtypes


def loaded_dtype(model: nn.Module) -> torch.dtype | None:
    """The model's, if it was half precision before `promote`: as transformers says it, its first parameter's."""
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                dtype = part.__dict__.get(PROMOTED, {}).get(name, parameter.dtype)
                return dtype if dtype in HALF and type(parameter) is nn.Parameter else None
    return None


def described(model: nn.Module) -> tuple[str, str] | None:
    """The dtype that was loaded, and what became of it; None for a model in fp32."""
    changed = Counter(dtype for part in model.modules() for dtype in part.__dict__.get(PROMOTED, {}).values())
    kept = Counter(p.dtype for p in model.parameters() if is_half(p))
    if not changed and not kept:
        return None
    dtypes = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in (*changed, *kept)}))
    if not changed and not any(LOADED in part.__dict__ for part in model.modules()):
        return dtypes, f"as loaded: {why_not(model) or 'nothing of it was replaced'}"
    parts = [f"{changed.total()} tensors (trained, vectors, buffers) are fp32 in place, until restore rounds them back"]
    if kept:
        parts.append(f"{kept.total()} frozen matrices stay, and products read them so")
    return dtypes, "; ".join(parts)


# ---- what goes in and comes out ------------------------------------------------------------------------------------


def is_outermost(module: nn.Module) -> bool:
    """Whether what this call takes and gives has the model's dtype: calls inside it have fp32."""
    return LOADED in module.__dict__ and not _inside.get()


def call(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    token = _inside.set(True)
    try:
        args = tuple(_each(args, HALF, torch.float32))
        out = forward(module, *args, **dict(zip(kwargs, _each(kwargs.values(), HALF, torch.float32), strict=True)))
    finally:
        _inside.reset(token)
    return _given(out, module.__dict__.get(LOADED, torch.float32))


def _each(values: Any, before: tuple[torch.dtype, ...], after: torch.dtype) -> Iterator[Any]:
    return (x.to(after) if isinstance(x, Tensor) and x.dtype in before else x for x in values)


def _given(out: Any, dtype: torch.dtype) -> Any:
    """A loss, which is a single number, stays fp32."""
    if isinstance(out, Tensor):
        cast = getattr(out, "as_dtype", out.to)  # logits that are computed where they are read stay so
        return cast(dtype) if out.dtype is torch.float32 and out.dim() else out
    if isinstance(out, dict):
        for name, value in list(out.items()):
            if name != "loss":
                out[name] = _given(value, dtype)
    elif type(out) in (tuple, list):
        return type(out)(_given(value, dtype) for value in out)
    return out
