"""Whether what stands behind an encoder reads padded positions, where an encoder without padding has nothing but 0.

BERT's pooler reads the first position, which is padding if the batch is padded on the left; other heads read the last,
or the mean of all. A twin of the whole model is asked: the hidden states at padded positions get a term of their own,
and if a result depends on it, the padding has to stay in such a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from cputrain.padding import PaddingMask
from cputrain.patching.bind import parameter_names
from cputrain.patching.probe import REFUSALS, fixed_dropout, quietly, random_rows
from cputrain.patching.twin import CannotCopy, short_twins

# module.__dict__ key of an encoder or stack: the ends of a row at which a head reads padded positions.
READ = "_cputrain_read_by_heads"
_MASKS = {
    "first": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
    "last": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}
# While set, terms that are added to the hidden states behind an encoder.
_terms: ContextVar[list[Tensor] | None] = ContextVar("cputrain_terms_behind_encoders", default=None)


def noted(dense: Tensor) -> Tensor:
    """Hidden states as the padded tensor; while a model is asked what it reads, with a term for each token."""
    terms = _terms.get()
    if terms is None:
        return dense
    terms.append(torch.zeros_like(dense, requires_grad=True))
    return dense + terms[-1]


def why_not(encoder: nn.Module, padding: PaddingMask) -> str | None:
    """Why this batch must keep its padding, or None."""
    read = encoder.__dict__.get(READ)
    if not read or padding.real is None:
        return None
    for end, column in (("first", 0), ("last", -1)):
        if end in read and not bool(padding.real[:, column].all()):
            return f"the {end} position is padding in a row, and may be read behind it"
    return "padded positions are read behind it" if len(read) == 2 else None


def note_reads(model: nn.Module, submodels: list[nn.Module], encoders: list[nn.Module]) -> None:
    """Asks each outermost transformers model in `model`, and writes down what it reads at its encoders."""
    inside: set[nn.Module] = set()
    for outer in submodels:
        if outer in inside:
            continue
        parts = set(outer.modules())
        inside |= parts
        own = [encoder for encoder in encoders if encoder in parts]
        for end in _MASKS if own else ():
            read = _reads(outer, own, end)
            # What stands around it, or can't be asked, may read an encoder's first position: padding on the left is
            # unusual there. A decoder's callers look for the last token that is real.
            unknown = outer is not model or read is None
            for encoder in own:
                if read or (end == "first" and unknown and not _is_causal(encoder)):
                    encoder.__dict__[READ] = (*encoder.__dict__.get(READ, ()), end)


def _is_causal(encoder: nn.Module) -> bool:
    found = [part.is_causal for part in encoder.modules() if hasattr(part, "is_causal")]
    return bool(found) and all(found)


def token_wise(model: nn.Module, encoder: nn.Module, heads: list[nn.Module]) -> list[nn.Module]:
    """Those of the linear layers in `model` that get, for each token, what follows from the encoder's result there.

    A decoder's head gets as many rows if the decoder's input is as long, but they are not those of the encoder.
    """
    names = {part: name for name, part in model.named_modules()}
    found = _ask(model, [encoder], lambda twin: _token_wise_names(twin, [names[head] for head in heads]))
    return [head for head in heads if names[head] in (found or ())]


def _ask(model: nn.Module, encoders: list[nn.Module], question: Callable[[nn.Module], Any]) -> Any:
    """The answer of the first twin that can be asked, or None."""
    try:
        with quietly(may_draw=True), fixed_dropout():
            for _, twin in short_twins(model, *encoders):
                try:
                    return question(twin.eval())
                except REFUSALS:
                    continue
    except CannotCopy:
        pass
    return None


def _token_wise_names(model: nn.Module, heads: list[str]) -> list[str]:
    inputs: dict[str, list[Tensor]] = {name: [] for name in heads}
    for name, seen in inputs.items():
        model.get_submodule(name).register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0]))
    mask = _MASKS["last"]
    terms: list[Tensor] = []
    token = _terms.set(terms)
    try:
        model(**_batch(model, mask))
    finally:
        _terms.reset(token)
    return [name for name, seen in inputs.items() if seen and all(_follows(x, terms, mask) for x in seen)]


def _follows(x: Tensor, terms: list[Tensor], mask: Tensor) -> bool:
    """Whether the second token's row of x depends on what left the encoder (the last of the terms) there alone."""
    if not terms or not _rows(x, mask) or not x.requires_grad:
        return False
    row = x[:, 1]
    (grad,) = torch.autograd.grad(row, terms[-1:], random_rows(*row.shape), retain_graph=True, allow_unused=True)
    if grad is None or not _rows(grad, mask):
        return False
    elsewhere = torch.arange(mask.shape[1]) != 1
    return bool(grad[:, 1].any()) and not bool(grad[:, elsewhere].any())


def _reads(model: nn.Module, encoders: list[nn.Module], end: str) -> bool | None:
    """Whether a result depends on padded positions at this end; None if it can't be asked."""

    def question(twin: nn.Module) -> bool | None:
        batch = _batch(twin, _MASKS[end])
        try:
            return _depends(twin, batch, _MASKS[end])
        except REFUSALS:  # multiple choice: the sequences are the choices of one question
            return _depends(twin, {name: x[None] for name, x in batch.items()}, _MASKS[end])

    return _ask(model, encoders, question)


def _depends(model: nn.Module, batch: dict[str, Tensor], mask: Tensor) -> bool | None:
    """Whether results depend on the hidden states of padded tokens; None if there are none."""
    terms: list[Tensor] = []
    token = _terms.set(terms)
    try:
        results = list(_results(model(**batch), mask))
    finally:
        _terms.reset(token)
    if not terms or not results:
        return None
    total = sum((x * random_rows(*x.shape).to(x.dtype)).sum() for x in results)
    grads = torch.autograd.grad(total, terms, allow_unused=True)
    return any(bool(g[mask == 0].any()) for g in grads if g is not None and _rows(g, mask))


def _rows(x: Tensor, mask: Tensor) -> bool:
    return x.shape[:2] == mask.shape


def _results(out: Any, mask: Tensor) -> Iterator[Tensor]:
    """What a model gives, without what it gives for padded tokens."""
    for x in tree_flatten(dict(out) if hasattr(out, "keys") else out)[0]:
        if isinstance(x, Tensor) and x.requires_grad:
            yield x[mask == 1] if _rows(x, mask) else x


def _batch(model: nn.Module, mask: Tensor) -> dict[str, Tensor]:
    config, names = model.config, parameter_names(type(model).forward)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    if (getattr(config, "pad_token_id", None) or 0) >= vocabulary:
        config.pad_token_id = 0  # the config is the twin's own
    padding = getattr(config, "pad_token_id", None) or 0
    ids = 1 + torch.arange(mask.numel()).view(mask.shape) * 7 % max(vocabulary - 1, 1)
    ids[ids == padding] = (padding + 1) % vocabulary
    batch = {"input_ids": ids.masked_fill(mask == 0, padding), "attention_mask": mask}
    if "decoder_input_ids" in names:
        batch["decoder_input_ids"] = ids
    return batch
