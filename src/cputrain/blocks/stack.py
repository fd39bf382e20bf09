"""Stacks of layers that make their own mask (GPT-2, OPT, Mistral, ModernBERT …): the layers work on real tokens only.

Such a model embeds, makes the mask, and hands both from layer to layer. The first layer that gets a `PaddingMask`
gathers the real tokens; each returns `RaggedStates`, which the next one takes as they are. Other code that reads them
finds stock's padded tensor, with 0 at padded positions: so whatever stands between and behind the layers stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.blocks import config_view, head
from cputrain.blocks.attention_registry import stock_reasons
from cputrain.blocks.config_view import is_transformers_model
from cputrain.blocks.encoder import DROPPED, Verdicts, parts_of, why_changed
from cputrain.padding import PaddingMask, RaggedTokens, StandIn, computed, gather, scatter, scatter_heads
from cputrain.patching import padded_reads
from cputrain.patching.bind import (
    KEEPS_PADDING,
    Patches,
    has_hook,
    is_ours,
    outputs_to_record,
    parameter_names,
    probed,
    step_aside,
    untouched,
    why_not_global_hooks,
    why_not_tensors,
)
from cputrain.patching.probe import REFUSALS
from cputrain.patching.without_padding import REAL, why_padding_is_needed

_OF_EACH_TOKEN = ("position_ids", "position_embeddings")
_CACHES = ("past_key_values", "past_key_value", "layer_past")  # as versions of transformers call them
_HARMLESS = {"attention_mask", "cache_position", "num_items_in_batch", "position_bias", *_OF_EACH_TOKEN}


class RaggedStates(StandIn):
    """The hidden states of the real tokens, which stand for the padded (batch, length, hidden)."""

    def __init__(self, rows: Tensor, ragged: RaggedTokens) -> None:
        self.rows, self.ragged = rows, ragged
        self.dense: Tensor | None = None
        self.shape = torch.Size((ragged.batch, ragged.length, rows.shape[-1]))
        self.dtype, self.device = rows.dtype, rows.device

    def compute(self) -> Tensor:
        if self.dense is None:
            self.dense = padded_reads.noted(scatter(self.rows, self.ragged))
        return self.dense

    def of(self, ragged: RaggedTokens) -> Tensor:
        """The rows of these tokens; from the padded tensor if other code has had it, which may have changed it."""
        alike = self.ragged is ragged or torch.equal(self.ragged.place, ragged.place)
        return self.rows if self.dense is None and alike else gather(self.compute(), ragged)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.compute()[index] = computed(value)


class FilledCache:
    """Stands before an empty cache: it gets keys and values as stock would fill it in, the layers keep the ragged."""

    def __init__(self, behind: Any, ragged: RaggedTokens) -> None:
        self._behind, self._ragged = behind, ragged

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        dense = (scatter_heads(x, self._ragged) for x in (keys, values))
        self._behind.update(*dense, *args, **kwargs)
        return keys, values


@dataclass
class _Call:
    """One call of a stack, and the padding that its layers have dropped."""

    stack: nn.Module
    recorded: set[str]
    dropped: PaddingMask | None = None


@dataclass
class _Probe:
    """A stack is being asked whether it can do without padding: whether it is to keep it, and why it did."""

    keep: bool
    kept_because: str = "its layers' mask doesn't come from transformers' mask functions"


_call: ContextVar[_Call | None] = ContextVar("cputrain_stack_call", default=None)
_probe: ContextVar[_Probe | None] = ContextVar("cputrain_stack_probe", default=None)
# The tokens that an attention with a bias by distance works on now.
_tokens: ContextVar[RaggedTokens | None] = ContextVar("cputrain_tokens_of_a_layer", default=None)
_verdicts = Verdicts(lambda stack: _needs_padding(stack))


@probed
def stack_forward(self: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(_names(type(self).forward), args, strict=False)) | kwargs
    asked = {name for name in ("hidden_states", "attentions") if given.get(f"output_{name}")}
    call = _Call(self, asked)
    token = _call.set(call)
    try:
        out = stock(*args, **kwargs)
    finally:
        _call.reset(token)
    head.note_encoded(call.dropped)
    return out if call.dropped is None else _with_zeros(out, call.dropped.ragged)


def _with_zeros(out: Any, ragged: RaggedTokens) -> Any:
    """The norm behind the layers turns a padded position's 0 into its bias: back to 0, and no gradient from there."""
    if isinstance(out, tuple):
        return (_zeroed(out[0], ragged), *out[1:])
    out["last_hidden_state"] = _zeroed(out["last_hidden_state"], ragged)
    return out


def _zeroed(hidden_states: Any, ragged: RaggedTokens) -> Tensor:
    return padded_reads.noted(scatter(gather(computed(hidden_states), ragged), ragged))


@probed
def layer_forward(self: nn.Module, stock: Callable, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(_names(type(self).forward)[1:], args, strict=False)) | kwargs
    padding = given.get("attention_mask")
    if isinstance(padding, PaddingMask) and padding.real is not None:
        if padding.kept_because is None:
            padding.kept_because = _why_kept(hidden_states, given, padding)
        if not padding.kept_because:
            return _on_real_tokens(self, stock, hidden_states, args, kwargs, padding)
    elif isinstance(padding, Tensor) and (call := _call.get()) is not None:
        step_aside(call.stack, "its mask is not a plain one of (batch, length)", KEEPS_PADDING)
    return stock(computed(hidden_states), *args, **kwargs)


def _on_real_tokens(
    layer: nn.Module, stock: Callable, hidden_states: Any, args: tuple, kwargs: dict[str, Any], padding: PaddingMask
) -> Any:
    ragged = padding.ragged
    rows = hidden_states.of(ragged) if isinstance(hidden_states, RaggedStates) else gather(hidden_states, ragged)
    # What came without a name goes on without one: a reentrant checkpoint inside passes gradients only to such.
    names = _names(type(layer).forward)[1:]
    args = tuple(_ragged_argument(name, value, ragged) for name, value in zip(names, args, strict=False))
    kwargs = {name: _ragged_argument(name, value, ragged) for name, value in kwargs.items()}
    token = stock_reasons.set([])
    try:
        out = stock(rows, *args, **kwargs)
        if reasons := stock_reasons.get():
            step_aside(layer, f"its attention, on padded rows: {reasons[0]}", "runs partly as stock")
    finally:
        stock_reasons.reset(token)
    first = out[0] if isinstance(out, tuple) else out
    # A checkpoint, which is around us before transformers 5.23 and inside since, passes gradients on to tensors only.
    checkpointed = layer.training and getattr(layer, "gradient_checkpointing", False)
    states = scatter(first, ragged) if checkpointed else RaggedStates(first, ragged)
    return (states, *out[1:]) if isinstance(out, tuple) else states


@probed
def biased_attention_forward(self: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    """Remembers the tokens for the bias that is made inside: here, because a checkpoint runs it again by itself."""
    token = _tokens.set(next((x for x in (*args, *kwargs.values()) if isinstance(x, RaggedTokens)), None))
    try:
        return stock(*args, **kwargs)
    finally:
        _tokens.reset(token)


@probed
def bias_of_padded_batch(
    self: nn.Module, stock: Callable, query_length: int, key_length: int, *args: Any, **kwargs: Any
) -> Any:
    """T5's bias by distance: the distances are those of the padded batch, and the attention takes what it needs."""
    if (ragged := _tokens.get()) is not None:
        query_length = key_length = ragged.length
    return stock(query_length, key_length, *args, **kwargs)


def _ragged_argument(name: str, value: Any, ragged: RaggedTokens) -> Any:
    if value is None:
        return None
    if name == "attention_mask":
        return ragged
    if name in _CACHES:
        return FilledCache(value, ragged)
    if name in _OF_EACH_TOKEN:
        return tuple(map(ragged.of_each_token, value)) if isinstance(value, tuple) else ragged.of_each_token(value)
    return value


@cache
def _names(forward: Callable) -> list[str]:
    return parameter_names(forward)


# ---- when the padding must stay ------------------------------------------------------------------------------------


def _why_kept(hidden_states: Any, given: dict[str, Any], padding: PaddingMask) -> str:
    call = _call.get()
    if call is None:
        return "its layers are called by other code"
    probe = _probe.get()
    if probe is None:
        reason = _why_not_recording(call) or _why_not(call.stack, computed(hidden_states), given, padding) or ""
    else:
        reason = probe.kept_because = "asked to" if probe.keep else _why_not_arguments(given, padding) or ""
    if not reason:
        call.dropped = padding  # from the result at least
        reason = "" if len(padding.ragged.place) else "the batch is nothing but padding"
    if reason:
        step_aside(call.stack, reason, KEEPS_PADDING)
    return reason


def _why_not_recording(call: _Call) -> str | None:
    recorded = call.recorded | outputs_to_record(call.stack)  # which transformers 5 begins within the call
    return f"{' and '.join(f'output_{name}' for name in sorted(recorded))} was asked for" if recorded else None


def _why_not(stack: nn.Module, hidden_states: Tensor, given: dict[str, Any], padding: PaddingMask) -> str | None:
    reason = (
        _why_not_arguments(given, padding)
        or padded_reads.why_not(stack, padding)
        or why_not_tensors(hidden_states)
        or why_not_global_hooks()
        or _why_not_hooks(stack)
    )
    if reason is None and not all(is_ours(layer.__dict__.get("forward")) for layer in _layers(stack) or ()):
        return "its layers have changed"
    return why_changed(_verdicts, stack) if reason is None else reason


def _why_not_arguments(given: dict[str, Any], padding: PaddingMask) -> str | None:
    if given.get("encoder_hidden_states") is not None:
        return "cross-attention is in use"
    cached = [given[name] for name in _CACHES if given.get(name) is not None]
    if any(hasattr(found, "self_attention_cache") or not hasattr(found, "update") for found in cached):
        return "a cache with a part for cross-attention, or of an unknown kind, is in use"
    for name in _OF_EACH_TOKEN:
        value = given.get(name)
        for tensor in value if isinstance(value, tuple) else (value,):
            if tensor is not None and not _has_tokens(tensor, padding):
                return f"its layers get {name} of {tuple(tensor.shape)}"
    unknown = [name for name, value in given.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    return f"its layers get {' and '.join(unknown)}" if unknown else None


def _has_tokens(tensor: Any, padding: PaddingMask) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        return False
    return tensor.shape[0] in (1, padding.batch) and tensor.shape[1] == padding.length


def _why_not_hooks(stack: nn.Module) -> str | None:
    """A hook inside would see ragged shapes; those of the embeddings run before."""
    for part in parts_of(stack):
        if part is not stack and not isinstance(part, nn.Embedding) and has_hook(part):
            return f"{type(part).__name__} inside has a hook, which would see tokens without their padding"
    return None


# ---- recognising them ----------------------------------------------------------------------------------------------


def _layers(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a stack: those of its list whose modules take hidden states and a mask."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) and all(map(_is_layer, child)):
            return list(child)
    return None


def _is_layer(module: nn.Module) -> bool:
    names = parameter_names(type(module).forward)
    return names[:1] == ["hidden_states"] and "attention_mask" in names


def _has_bias_by_distance(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding) or not untouched(module):
        return False
    compute = getattr(type(module), "compute_bias", None)
    return compute is not None and parameter_names(compute)[:2] == ["query_length", "key_length"]


def looks_like_stack(module: nn.Module) -> bool:
    if not is_transformers_model(module) or _layers(module) is None:
        return False
    return {"inputs_embeds", "attention_mask"} <= set(parameter_names(type(module).forward))


def _needs_padding(stack: nn.Module) -> str | None:
    """Why it doesn't give the same for real tokens without padding, which stands between the tokens too; or None."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts_of(stack)):
        return "a part of it looks at all tokens"  # but only at one by one while it is asked
    try:
        width = stack.get_input_embeddings().weight.shape[1]  # type: ignore[operator, union-attr]
    except REFUSALS:
        return "its input embeddings are not known"
    kept, dropped = _Probe(keep=True), _Probe(keep=False)
    reason = why_padding_is_needed(stack, width, *(partial(_last_hidden_state, probe) for probe in (kept, dropped)))
    return dropped.kept_because or reason


def _last_hidden_state(probe: _Probe, stack: nn.Module, x: Tensor) -> Tensor:
    token = _probe.set(probe)
    try:
        return stack(inputs_embeds=x, attention_mask=REAL.long())[0]
    finally:
        _probe.reset(token)


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    """To be called when attention goes through our function."""
    layers = _layers(module)
    assert layers is not None
    if not all(map(untouched, layers)):
        patches.leave(name, module, "padding stays: the forward of a layer was replaced on the instance")
        return False
    before = len(patches.replaced)
    patches.bind(name, module, "forward", stack_forward, DROPPED)
    names = {part: part_name for part_name, part in module.named_modules()}
    for layer in layers:
        patches.bind(".".join(filter(None, (name, names[layer]))), layer, "forward", layer_forward, "real tokens only")
    for part, part_name in names.items():
        if _has_bias_by_distance(part):
            bias_name = ".".join(filter(None, (name, part_name)))
            for method, ours in (("forward", biased_attention_forward), ("compute_bias", bias_of_padded_batch)):
                patches.bind(bias_name, part, method, ours, "distances of the padded batch")
    config_view.choose(module, True)
    reason = _verdicts.of(module)
    if reason is not None:
        patches.take_back(before)
        patches.leave(name, module, f"padding stays: {reason}")
    return reason is None
