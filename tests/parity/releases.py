"""What the installed transformers can do: the one place in which these tests tell its releases apart.

The suite runs on the oldest release that is served, on the last before 5.0 and on today's. Where a release can't do
what a test asks for, the test asserts what holds there instead; it skips if the release has nothing to compare with.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests.parity.small import what_runs

RELEASE = tuple(int(part) for part in hf.__version__.split(".")[:2])
DROPPED = "padding dropped between embeddings and head"
KEPT = "left alone: padding stays: its layers' mask doesn't come from transformers' mask functions"

# AttentionMaskInterface; without it all stacks of layers (GPT-2, Llama …) keep their padding.
HAS_MASK_REGISTRY = hasattr(hf, "AttentionMaskInterface")
# BERT and its descendants look their attention up by its name, so that it can be switched, and take masks of four
# dimensions.
BERT_IS_REGISTERED = RELEASE >= (5, 0)
# Sequences behind one another in a row are told apart by their position ids.
SEPARATES_PACKED = HAS_MASK_REGISTRY
# Functions that say what a mask hides can be asked for all pairs of tokens at once.
ASKS_MASKS_AT_ONCE = RELEASE >= (5, 0)
# Models follow their inputs' dtype, so that half precision can be served; adapters over 4 bits go with today's peft.
SERVES_HALF_PRECISION = RELEASE >= (5, 0)
# `generate` can be told not to compile.
HAS_DISABLE_COMPILE = RELEASE >= (4, 50)

_MAKE_MASKS_OF_THEIR_OWN = {"opt", "modernbert", "t5"} if RELEASE < (5, 0) else set()
_TAKE_NO_MASK_OF_FOUR_DIMENSIONS = set() if HAS_MASK_REGISTRY else {"gpt2", "opt"}
# Stock raises an error ("value cannot be converted to type float without overflow").
_FAIL_PADDED_IN_FLOAT64 = set() if HAS_MASK_REGISTRY else {"gpt2", "opt"}


# An expert that only padding reaches has a gradient of 0 in stock, and none without padding: the padding stays.
EXPERTS_ONE_BY_ONE = {"mixtral"} if RELEASE < (5, 0) else set()


def drops_padding(stack: str) -> bool:
    return HAS_MASK_REGISTRY and stack not in _MAKE_MASKS_OF_THEIR_OWN | EXPERTS_ONE_BY_ONE


def takes_mask_of_four_dimensions(stack: str) -> bool:
    return stack not in _TAKE_NO_MASK_OF_FOUR_DIMENSIONS


def stock_is_exact_in_float64(name: str) -> bool:
    """Whether stock computes a padded batch in float64."""
    return name not in _FAIL_PADDED_IN_FLOAT64


def needs_model(name: str) -> None:
    if name not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {name}")


def assert_padding_dropped(model: nn.Module, part: str, stack: str) -> None:
    """`explain` says so, or why the padding stays."""
    found = what_runs(model, part).split(" | ")
    if drops_padding(stack):
        assert found == [DROPPED] or (part == "(the model)" and DROPPED in found)
    else:
        assert KEPT in found and DROPPED not in found


def assert_at_padding(stack: str, found: Tensor, expected: Tensor, mask: Tensor) -> None:
    """0 if the padding was dropped, stock's padded numbers if it stays."""
    if drops_padding(stack):
        assert (found[mask == 0] == 0).all()
    else:
        torch.testing.assert_close(found[mask == 0], expected[mask == 0], rtol=1e-3, atol=1e-4)


def in_eager(model: nn.Module) -> nn.Module:
    """The same model with eager attention; where that can't be switched, it is made anew."""
    if RELEASE >= (5, 0):
        model.set_attn_implementation("eager")
        return model
    made = type(model)._from_config(model.config, attn_implementation="eager")
    made.load_state_dict(model.state_dict())
    assert made.config._attn_implementation == "eager"
    return made.train(model.training)


def keys_and_values(cache: object) -> list[tuple[Tensor, Tensor]]:
    """Of each layer, whatever kind of cache the model returns."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    if hasattr(cache, "key_cache"):
        return list(zip(cache.key_cache, cache.value_cache, strict=True))
    return [tuple(layer[:2]) for layer in cache]  # type: ignore[attr-defined, misc]


def without_experts_of_padding_only(
    ours: dict[str, Tensor | None], stock: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Stock's gradients, None where ours is None and stock's is 0.

    Before transformers 5 an expert that gets no token has no gradient; stock's padding reaches more experts.
    """
    return {
        name: None if ours[name] is None and ".experts." in name and grad is not None and not grad.any() else grad
        for name, grad in stock.items()
    }
