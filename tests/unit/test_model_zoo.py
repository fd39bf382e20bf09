"""The zoo is the ground of the parity tests, so its own claims are checked on stock models."""

from __future__ import annotations

import pytest
import torch
from model_zoo import MODELS, NAMES, TEXT_NAMES, alone, tiny


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model, batch = tiny(name)
    model(**batch).loss.backward()
    without = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


@pytest.mark.parametrize("name", [name for name in TEXT_NAMES if MODELS[name].task != "span"])
def test_sequences_alone_add_up_to_the_padded_batch(name: str) -> None:
    """Except for span heads, whose stock loss counts the padded positions."""
    model, batch = tiny(name, padding="right")
    model.double()
    total = sum(weight * model(**single).loss for single, weight in alone(name, batch))
    torch.testing.assert_close(total, model(**batch).loss, atol=2e-6, rtol=1e-6, check_dtype=False)


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (tiny("bert", seed=seed)[0].state_dict() for seed in (1, 1, 2))
    key = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(first[key], second[key])
    assert not torch.equal(first[key], other[key])
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'brt'.*bert, roberta"):
        tiny("brt")
