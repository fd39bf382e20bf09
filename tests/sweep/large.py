"""The sweep's models at the size that speed and memory are measured at (benchmarks/sweep_speed.py, sweep_memory.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from tests.sweep import classes, inputs, measure, shrink, weights
from tests.sweep.inputs import Inputs, Maker, Shape
from tests.sweep.sixty import SIXTY

# 4 × 128 tokens; sound of 128 frames behind the usual convolutions.
SHAPE = Shape(lengths=(128,) * 4, target_lengths=(64,) * 4, samples=128 * 320 + 80, image=shrink.FOR_SPEED.image)
# A vocabulary as large as BERT's: logits are then what takes the memory.
_WITH_LOGITS = replace(shrink.FOR_SPEED, vocabulary=30_000)
_LONGEST, _TEXTS = 128, 8


def chosen(models: Iterable[str] | None) -> list[tuple[str, str]]:
    """The sixty, or those of them that are named."""
    known = dict(SIXTY)
    wrong = [model for model in models or () if model not in known]
    if wrong:
        raise ValueError(f"{wrong} are not among the sixty; choose from {sorted(known)}")
    return SIXTY if models is None else [(model, known[model]) for model in models]


def _built(model: str, kind: str, size: shrink.Size) -> nn.Module:
    measure.seed_everything(0)
    made = classes.load(model, kind)(shrink.shrunken(model, size, dropout=True))
    weights.randomise(made, 0)
    weights.switch_dropout_off(made, layers_only=True)
    return made.train()


def model_and_inputs(model: str, kind: str) -> tuple[nn.Module, dict[str, Any]]:
    made = _built(model, kind, shrink.FOR_SPEED)
    return made, _accepted(made).arguments


def _accepted(model: nn.Module) -> Inputs:
    """The first inputs that the model takes."""
    errors = []
    for recipe in inputs.recipes(model):
        try:
            made = Maker(model, "none", 0, SHAPE).make(recipe)
            with torch.no_grad():
                model(**made.arguments)
        except Exception as error:  # noqa: BLE001 - the next recipe may fit
            errors.append(f"{recipe}: {error}")
        else:
            return made
    raise RuntimeError(f"{type(model).__name__} takes none of the inputs: {'; '.join(errors)[:1000]}")


def mean_square(outputs: Any) -> Tensor:
    """A loss of every output, at the cost of one pass over each."""
    found = [value for _, value in measure.tensors_in(outputs) if value.is_floating_point() and value.requires_grad]
    return torch.stack([value.float().clamp(-1e3, 1e3).square().mean() for value in found]).sum()


def language_models(models: Iterable[str] | None) -> list[tuple[str, str]]:
    """Of each type of the sixty its masked or causal language model, if it has one."""
    found = []
    for model, _ in chosen(models):
        for mapping in (
            modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        ):
            kind = mapping.get(model)
            if kind is not None and kind not in _DECODERS_ALONE:
                found.append((model, kind if isinstance(kind, str) else kind[0]))
                break
    return found


# Causal mappings also have the decoder of a sequence-to-sequence model by itself, which nobody trains so.
_DECODERS_ALONE = {
    "BartForCausalLM", "MBartForCausalLM", "PegasusForCausalLM", "MarianForCausalLM", "ProphetNetForCausalLM",
    "BigBirdPegasusForCausalLM", "WhisperForCausalLM",
}  # fmt: skip


def language_model(model: str, kind: str) -> nn.Module:
    return _built(model, kind, _WITH_LOGITS)


def batch_of_varying_length(model: nn.Module, number: int) -> dict[str, Tensor]:
    """Texts padded on the right; lengths are others in every step, and the same for both sides."""
    generator = torch.Generator().manual_seed(number)
    longest = int(torch.randint(32, _LONGEST + 1, (), generator=generator))
    lengths = torch.randint(16, longest + 1, (_TEXTS,), generator=generator)
    lengths[0] = longest
    mask = (torch.arange(longest)[None, :] < lengths[:, None]).long()
    ids = torch.randint(5, 1000, mask.shape, generator=generator) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if "bbox" in inputs.names_of(model):
        batch["bbox"] = torch.zeros(*mask.shape, 4, dtype=torch.long)
    return batch
