"""The public functions: optimize, explain, restore."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.optim import Optimizer

from cputrain import hardware, log, memory, native, settings
from cputrain.blocks import config_view, encoder, fused_lm_head, head, lora, quantised, recognise
from cputrain.explanation import Explanation, explain_patches
from cputrain.formats import FORMATS, choose
from cputrain.log import logger
from cputrain.native import recycled, workspace
from cputrain.optimizers import clipping, takeover
from cputrain.patching import bind, half_precision
from cputrain.patching.bind import Patches

Padding = Literal["drop", "keep"]
log.show_where_nobody_logs()

# model.__dict__ key of the record of what was done to it; copied with the model.
_RECORD = "_cputrain"
# The optimizer that was taken over together with a model; not in the record, because a copy has no share in it.
_optimizers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
# What releases a model's share in functions of ours that stand in other libraries, called when it is restored or
# collected; a copy has none.
_in_libraries: weakref.WeakKeyDictionary[nn.Module, weakref.finalize] = weakref.WeakKeyDictionary()


def _optimizer_of(model: nn.Module) -> Optimizer | None:
    reference = _optimizers.get(model)
    return None if reference is None else reference()


@dataclass
class Record:
    """What `optimize` did to one model."""

    dtype: str
    dtype_reason: str
    padding: Padding
    patches: Patches = field(default_factory=Patches)

    def __deepcopy__(self, memo: dict) -> Record:
        return Record(self.dtype, self.dtype_reason, self.padding, copy.deepcopy(self.patches, memo))

    def __reduce__(self) -> tuple:
        return type(None), ()  # a pickled model is loaded as stock, even where cputrain isn't installed


@overload
def optimize(
    model: nn.Module, optimizer: None = None, *, dtype: str | torch.dtype = "auto", padding: Padding = "drop"
) -> nn.Module: ...
@overload
def optimize(
    model: nn.Module, optimizer: Optimizer, *, dtype: str | torch.dtype = "auto", padding: Padding = "drop"
) -> tuple[nn.Module, Optimizer]: ...
def optimize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    padding: Padding = "drop",
) -> nn.Module | tuple[nn.Module, Optimizer]:
    """Makes `model`, and `optimizer` if given, faster on this CPU, in place; returns what it was given.

    >>> model, optimizer = cputrain.optimize(model, optimizer)
    >>> loss = model(**batch).loss
    >>> loss.backward()
    >>> optimizer.step()

    Class, parameter names and checkpoints stay. Results agree with stock's within the error of `dtype`, and up to what
    `padding` says; dropout has stock's rate, but draws another pattern from the same seed. `explain(model)` lists what
    was replaced and why, `restore(model)` undoes it.

    `dtype` is the number format of matrix products. Parameters, gradients and the optimizer's state are fp32 in each.

    - "auto" (default): bf16 if the CPU has AMX, else int16 if it has AVX2, else fp32; a short measurement can veto it.
    - "fp32" or torch.float32: stock's arithmetic. Only the order of sums differs.
    - "int16" or torch.int16: products of block-scaled 16-bit integers, with a tenth of bf16's error.
    - "bf16" or torch.bfloat16: products in bf16 where the CPU is fast at it; elsewhere products in fp32, and what is
      kept for the backward in bf16, at half the memory.

    `padding` is what happens to the positions that `attention_mask` hides.

    - "drop" (default): they are not computed. Each real token's result is stock's for the real tokens alone; hidden
      states and token logits at padded positions are 0, span logits -10,000, and the loss doesn't see padding.
    - "keep": they are computed as stock does, and the numbers are stock's for the padded batch.

    >>> model = cputrain.optimize(model, dtype="fp32", padding="keep")  # stock's numbers, up to rounding

    CPUTRAIN_DTYPE and CPUTRAIN_PADDING win over both arguments.
    """
    dtype, padding = settings.win_over(dtype, padding)  # type: ignore[assignment]
    _check(model, optimizer, padding)
    if native.why_not() is not None:
        logger.warning("the model trains as stock: %s", native.why_not())
        return model if optimizer is None else (model, optimizer)
    if (damaged := quantised.why_damaged(model)) is not None:
        raise ValueError(f"{damaged}.")
    native.kernels()  # a library that doesn't load is reported before anything is touched
    choice = choose.choose(dtype)
    choose.tell(choice)

    earlier = half_precision.noted(model)
    _undo_model(model)
    half_precision.note(earlier)
    record = Record(choice.dtype, choice.reason, padding, Patches(FORMATS[choice.format]))
    model.__dict__[_RECORD] = record
    _widen(model, optimizer, record.patches)
    _take_over_model(model, record)
    memory.keep_freed_memory()
    if optimizer is None:
        return model
    if _optimizer_of(model) is not optimizer:
        _give_optimizer_back(model)
    takeover.take_over(optimizer)
    _optimizers[model] = weakref.ref(optimizer)
    return model, optimizer


def explain(model: nn.Module) -> Explanation:
    """What was replaced in `model`, what was not, and why. Shows itself in a REPL and in a notebook; else `print` it.

    >>> model = cputrain.optimize(model, dtype="fp32")
    >>> print(cputrain.explain(model))  # doctest: +ELLIPSIS
    precision ... fp32 ... asked for
    ...
    """
    _check_module(model)
    record: Record | None = model.__dict__.get(_RECORD)
    if record is None:
        as_part = "part of an optimised model: explain that one" if bind.has_patches(model) else None
        found = as_part or f"as stock: {native.why_not() or 'cputrain.optimize was not called on it'}"
        return Explanation([("model", type(model).__name__, found)], [])
    optimizer = _optimizer_of(model)
    facts = [
        ("precision", record.dtype, record.dtype_reason),
        ("instruction set", *hardware.best_isa()),
        ("padding", record.padding, _padding_reason(model, record)),
    ]
    if (dtype := half_precision.described(model)) is not None:
        facts.append(("parameters", *dtype))
    if (adapters := lora.described(model)) is not None:
        facts.append(adapters)
    if optimizer is not None:
        facts.append(("optimizer", type(optimizer).__name__, takeover.described(optimizer)))
    return Explanation(facts, explain_patches(record.patches))


def is_optimized(model: nn.Module) -> bool:
    """Whether `optimize` was called on this model, and not undone since."""
    return model.__dict__.get(_RECORD) is not None


def any_optimized() -> bool:
    """Whether any model of this process is optimised now."""
    return len(_in_libraries) > 0


def why_stock(model: nn.Module) -> str | None:
    """Why an optimised model computes as stock does all the same; None if something of it was replaced."""
    if native.why_not() is not None:
        return native.why_not()
    patches: Patches = model.__dict__[_RECORD].patches
    if any(entry.computes for entry in patches.replaced):
        return None
    left = [f"{name or type(model).__name__} is left alone: {reason}" for name, _, reason in patches.left]
    return left[0] if left else "it has no part that cputrain knows"


def decisions(model: nn.Module) -> dict[str, Any] | None:
    """What was chosen for this model, and what its layers remember, as plain values; None if it isn't optimised."""
    record: Record | None = model.__dict__.get(_RECORD)
    if record is None:
        return None
    layers = {name: bind.format_of(part).remembered() for name, part in model.named_modules()}
    return {
        "choice": [record.dtype, record.patches.format.name, record.dtype_reason],
        "padding": record.padding,
        "layers": {name: found for name, found in layers.items() if found},
    }


def remember(model: nn.Module, decided: dict[str, Any]) -> None:
    """What layers remembered when `decisions` was asked, if they are still in the same format."""
    record: Record | None = model.__dict__.get(_RECORD)
    if record is not None and record.patches.format.name == decided["choice"][1]:
        for name, part in model.named_modules():
            if name in decided["layers"]:
                bind.format_of(part).remember(decided["layers"][name])


def restore(model: nn.Module) -> nn.Module:
    """Undoes `optimize`: model and optimizer are stock's again, with the parameters and the state they have now.

    >>> model = cputrain.restore(model)
    """
    _check_module(model)
    half_precision.round_back(model, _optimizer_of(model))
    _undo_model(model)
    for part in model.modules():  # one of them may have been optimised by itself before
        _give_optimizer_back(part)
    if not _in_libraries:  # no other model in this process is optimised
        workspace.clear()
        recycled.clear()
        memory.release()
    return model


def _give_optimizer_back(model: nn.Module) -> None:
    optimizer = _optimizer_of(model)
    if optimizer is not None:
        del _optimizers[model]
        if not any(other() is optimizer for other in _optimizers.values()):  # it may train two models
            takeover.give_back(optimizer)


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, found {type(model).__name__}.")


def _check(model: nn.Module, optimizer: Optimizer | None, padding: str) -> None:
    _check_module(model)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(f"the optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}.")
    if padding not in ("drop", "keep"):
        raise ValueError(f"padding must be 'drop' or 'keep', found {padding!r}.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise ValueError(
                f"cputrain works on the CPU, but {name!r} is on {tensor.device}; call model.to('cpu') first."
            )
    if optimizer is not None:
        own = {id(parameter) for parameter in model.parameters()}
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in own for parameter in given):
            raise ValueError(
                f"none of the optimizer's {len(given)} parameters belongs to this {type(model).__name__}; "
                "pass the optimizer that was made from this model's parameters."
            )


def _widen(model: nn.Module, optimizer: Optimizer | None, patches: Patches) -> None:
    """What is trained in half precision becomes fp32 in place, if activations can be fp32 inside."""
    patches.halves = half_precision.why_not(model) is None
    if patches.halves:
        inside = (part for part in model.modules() if config_view.is_transformers_model(part))
        half_precision.promote(model, None if optimizer is None else takeover.unwrapped(optimizer))
        half_precision.mark(model, *inside)


def _take_over_model(model: nn.Module, record: Record) -> None:
    patches = record.patches
    try:
        unregistered = config_view.take_over(model, patches)
        recognise.take_over_pieces(model, patches)
        if unregistered is not None and not recognise.replaces_attention(patches):
            patches.leave("", model, unregistered)
        ragged = record.padding == "drop" and recognise.take_over_encoders(model, patches)
        config_view.choose(model, ragged)
        recognise.take_over_model(model, patches)
    except BaseException:
        half_precision.round_back(model, _optimizer_of(model))
        _undo_model(model)
        raise
    gc.collect()  # twins of parts hold as much as their largest parameter, and refer to themselves
    clipping.install()
    fused_lm_head.install()
    _in_libraries[model] = weakref.finalize(model, _leave_libraries)


def _leave_libraries() -> None:
    clipping.uninstall()
    fused_lm_head.uninstall()


def _undo_model(model: nn.Module) -> None:
    bind.undo(model)
    config_view.undo(model)
    for part in model.modules():
        part.__dict__.pop(_RECORD, None)
        if part in _in_libraries:
            _in_libraries.pop(part)()


_DROPPED_MEANS = (
    "real tokens only between embeddings and head; each one's result is stock's for the real tokens alone, with the "
    "position ids and distances of the padded batch; hidden states and token logits at padded positions are 0"
)


def _padding_reason(model: nn.Module, record: Record) -> str:
    if record.padding == "keep":
        return "asked for: stock's padded numbers"
    done = {entry.what for entry in record.patches.replaced}
    spans = "; span logits at padded positions get -10,000" if head.SPAN in done else ""
    if encoder.DROPPED in done:
        return f"{_DROPPED_MEANS}{spans}"
    if not recognise.takes_padding(model):
        return "none: this model takes no mask"
    return f"stays inside the model: no encoder was recognised that can do without{spans}"
