"""Every model of the list: gradients as exact as stock's, without padding, with it dropped, and with it kept."""

from __future__ import annotations

import copy

import pytest
import torch

import cputrain
from tests.model_zoo import NAMES, TEXT_NAMES, alone, tiny
from tests.parity import releases
from tests.parity.gradients import assert_as_exact_as_stock, exact_and_stock, gradients, in_float64
from tests.parity.small import assert_close, gradients_of, pair


def _loss(batch):
    return lambda model: model(**batch).loss


def _loss_alone(name, batch, convert=lambda b: b):
    """The loss of the batch computed sequence by sequence, without padding."""
    return lambda model: sum(weight * model(**convert(single)).loss for single, weight in alone(name, batch))


@pytest.fixture(autouse=True)
def no_size_limit(monkeypatch):
    """Tiny models must go through the kernels too."""
    monkeypatch.setattr("cputrain.blocks.leaves.WORTHWHILE", 0)


@pytest.mark.parametrize("name", NAMES)
def test_without_padding(name):
    model, batch = tiny(name)
    exact, stock = exact_and_stock(model, _loss(batch), _loss(in_float64(batch)))
    ours = gradients(cputrain.optimize(copy.deepcopy(model)), _loss(batch))
    assert_as_exact_as_stock(ours, stock, exact)


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_right_padding_dropped_equals_each_sequence_alone(name):
    model, batch = tiny(name, padding="right")
    exact, stock = exact_and_stock(model, _loss_alone(name, batch), _loss_alone(name, batch, in_float64))
    ours = gradients(cputrain.optimize(copy.deepcopy(model)), _loss(batch))
    assert_as_exact_as_stock(ours, stock, exact)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", TEXT_NAMES)
def test_padding_kept_equals_stock_padded(name, padding):
    model, batch = tiny(name, padding=padding)
    if not releases.stock_is_exact_in_float64(name):
        stock, ours = pair(model, padding="keep")
        assert_close(gradients_of(ours, _loss(batch)), gradients_of(stock, _loss(batch)))
        return
    exact, stock = exact_and_stock(model, _loss(batch), _loss(in_float64(batch)))
    ours = gradients(cputrain.optimize(copy.deepcopy(model), padding="keep"), _loss(batch))
    assert_as_exact_as_stock(ours, stock, exact)


@pytest.mark.parametrize("name", NAMES)
def test_same_keys_class_and_restored_results(name):
    model, batch = tiny(name)
    keys, kind, before = list(model.state_dict()), type(model), model(**batch).loss
    cputrain.optimize(model)
    assert list(model.state_dict()) == keys and type(model) is kind
    cputrain.restore(model)
    assert torch.equal(model(**batch).loss, before)
    assert all("forward" not in part.__dict__ for part in model.modules())
