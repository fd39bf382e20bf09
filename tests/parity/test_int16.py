"""dtype="int16": products of block-scaled integers, everything else as in fp32."""

from __future__ import annotations

import copy

import pytest
import torch

import cputrain
from cputrain import hardware
from tests.model_zoo import tiny
from tests.parity.gradients import distance, gradients, in_bf16


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "electra", "mpnet"])
def test_error_is_at_most_a_quarter_of_bf16s(isa, name, padding):
    model, batch = tiny(name, padding=padding)

    def loss(m):
        return m(**batch).loss

    exact = gradients(cputrain.optimize(copy.deepcopy(model)), loss)
    ours = gradients(cputrain.optimize(copy.deepcopy(model), dtype="int16"), loss)
    stock = gradients(copy.deepcopy(model), loss)
    error = distance(ours, exact)
    assert 1e-7 < error <= distance(in_bf16(model, batch), stock) / 4


def test_every_product_of_a_layer_is_int16(monkeypatch):
    """query, key and value are one product, the output and the feed-forward three; each has two gradients."""
    from cputrain.ops import matmul

    model, batch = tiny("bert")
    cputrain.optimize(model, dtype="int16")
    calls = []
    product = matmul.product
    monkeypatch.setattr(matmul, "product", lambda *a, **k: calls.append(1) or product(*a, **k))
    model(**batch).loss.backward()
    assert len(calls) == 3 * 4 * model.config.num_hidden_layers


def test_precision_is_switched_and_restored():
    model, batch = tiny("bert")
    stock = model(**batch).loss
    fp32 = cputrain.optimize(model)(**batch).loss
    int16 = cputrain.optimize(model, dtype=torch.int16)(**batch).loss
    assert not torch.equal(int16, fp32) and "int16" in str(cputrain.explain(model))
    assert torch.equal(cputrain.optimize(model, dtype="fp32")(**batch).loss, fp32)
    assert torch.equal(cputrain.restore(model)(**batch).loss, stock)


def _clamp(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)  # moves no version counter


def _swap_in_averages(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _step_of_another_optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.RMSprop(model.parameters(), lr=0.01).step()


def _load(model):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [_clamp, _swap_in_averages, _step_of_another_optimizer, _load])
@pytest.mark.parametrize("dtype", ["int16", "fp32", "bf16", "native bf16"])
def test_weights_are_packed_anew_after_any_change(change, dtype, monkeypatch):
    """In every precision: joined, converted and packed copies of weights live from a forward to its backward."""
    monkeypatch.setattr(hardware, "has_bf16", lambda: dtype == "native bf16")
    dtype = dtype.removeprefix("native ")
    model, batch = tiny("bert")
    cputrain.optimize(model, dtype=dtype)
    before = model(**batch).loss
    change(model)
    after = model(**batch).loss
    fresh, _ = tiny("bert")
    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(before, after)
    assert torch.equal(after, cputrain.optimize(fresh, dtype=dtype)(**batch).loss)


def test_an_infinity_is_not_hidden():
    model, batch = tiny("bert")
    cputrain.optimize(model, dtype="int16")
    with torch.no_grad():
        model.bert.encoder.layer[0].intermediate.dense.weight[3, 5] = torch.inf
    assert not model(**batch).loss.isfinite()
