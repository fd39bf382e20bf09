"""dtype="int16": products of block-scaled integers, everything else as in fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cputrain
from cputrain.formats import int16_guard, int16_sample, speed
from cputrain.patching.bind import FORMAT
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


@pytest.fixture
def of_any_size(monkeypatch):
    """Tiny products must be int16's, too, where a linear layer stands alone."""
    monkeypatch.setattr("cputrain.blocks.leaves.WORTHWHILE_PRODUCT", 0)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mistral", "modernbert", "t5", "deberta_v2", "mlp"])
def test_linear_layers_outside_recognised_blocks(of_any_size, name):
    model, batch = tiny(name, padding="none" if name == "mlp" else "right")
    exact, ours = (
        gradients(cputrain.optimize(copy.deepcopy(model), dtype=dtype), lambda m: m(**batch).loss)
        for dtype in ("fp32", "int16")
    )
    stock = gradients(copy.deepcopy(model), lambda m: m(**batch).loss)
    assert 1e-6 < distance(ours, exact) <= distance(in_bf16(model, batch), stock) / 4


# A layer's query, key and value are one product in BERT, as in GPT-2; output and feed-forward are three more. GPT-2's
# layers are Conv1D, and its head is wide enough for int16.
@pytest.mark.parametrize(("name", "forward_products"), [("bert", 2 * 4), ("gpt2", 2 * 4 + 1)])
def test_every_product_of_a_layer_is_int16(monkeypatch, of_any_size, name, forward_products):
    """Each has two gradients."""
    from cputrain.formats import int16_matmul as matmul

    model, batch = tiny(name)
    cputrain.optimize(model, dtype="int16")
    calls = []
    product = matmul.product
    monkeypatch.setattr(matmul, "product", lambda left, *a, **k: calls.append(left) or product(left, *a, **k))
    model(**batch).loss.backward()
    assert len([left for left in calls if left.vectors > int16_sample.SAMPLE]) == 3 * forward_products


def _spoil(model):
    """One huge feature that a feed-forward doesn't listen to: beside it int16 loses all others."""
    if model.base_model_prefix == "albert":
        layer = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
        norm, product = layer.attention.LayerNorm, layer.ffn
    else:
        layer = model.bert.encoder.layer[0]
        norm, product = layer.attention.output.LayerNorm, layer.intermediate.dense
    with torch.no_grad():
        norm.weight[3] = 1e7
        product.weight[:, 3] = 0


def test_a_layer_that_int16_spoils_returns_to_fp32_after_its_first_forward(caplog):
    model, batch = tiny("bert")
    _spoil(model)
    cputrain.optimize(model, dtype="int16")
    assert "return to fp32" not in caplog.text
    model(**batch)
    assert caplog.text.count("return to fp32") == 1
    rows = [row for row in cputrain.explain(model).modules if "products in fp32 again" in row[2]]
    assert [row[:2] for row in rows] == [("bert.encoder.layer.*", "BertLayer")]
    assert "in a sample of a forward product int16 was off by" in rows[0][2]


@pytest.mark.parametrize(("name", "reentrant"), [("bert", True), ("bert", False), ("albert", False)])
def test_checkpointed_training_goes_on_when_a_layer_is_spoiled(of_any_size, name, reentrant, monkeypatch):
    """A checkpoint that isn't reentrant raises an error if the second forward keeps other tensors than the first."""
    monkeypatch.setattr(int16_guard, "LOOK_EVERY", 4)
    model, batch = tiny(name)
    loss = _checkpointed(model.train(), batch, reentrant)
    cputrain.optimize(model, dtype="int16")
    layers = list(patched(model))
    for step in range(8):
        if step == 4:
            assert not any(layer.trouble for layer in layers)
            _spoil(model)
        model.zero_grad()
        loss().backward()
    assert any(layer.trouble for layer in layers)
    assert all(layer.returned == (layer.trouble is not None) for layer in layers)


def _checkpointed(model, batch, reentrant):
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return lambda: model(**batch).loss
    # ALBERT, which runs one layer several times.
    return lambda: checkpoint(lambda: model(**batch).loss, use_reentrant=reentrant)


def patched(model):
    return (part.__dict__[FORMAT].guard for part in model.modules() if FORMAT in part.__dict__)


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
    monkeypatch.setattr(speed, "bf16_pays", lambda: dtype == "native bf16")
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
