"""Dropout on: one seed gives one result, and the gradient is that of the mask that was used."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from safetensors.torch import load, save

import cputrain
from tests.model_zoo import tiny
from tests.parity.small import HOLES, LEFT, RIGHT, bert, gradients_of, ids

MODELS = ["bert", "albert", "distilbert", "roberta", "gpt2", "opt", "mistral", "vit", "t5", "modernbert", "mlp"]


@pytest.fixture(autouse=True)
def no_size_limit(monkeypatch):
    """Tiny models must go through the kernels too."""
    monkeypatch.setattr("cputrain.blocks.leaves.WORTHWHILE", 0)


def seeded_loss(batch, seed=7):
    def loss(model):
        torch.manual_seed(seed)
        return model(**batch).loss

    return loss


def padding_of(name):
    return "none" if name in ("vit", "mlp") else "right"


@pytest.mark.parametrize("name", MODELS)
def test_one_seed_gives_bit_identical_losses_and_gradients(name):
    model, batch = tiny(name, padding=padding_of(name), dropout=0.2)
    cputrain.optimize(model)
    first, second = (gradients_of(model, seeded_loss(batch)) for _ in range(2))
    other = gradients_of(model, seeded_loss(batch, seed=8))
    assert all(torch.equal(first[n], second[n]) for n in first if first[n] is not None)
    assert any(not torch.equal(first[n], other[n]) for n in first if first[n] is not None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int16"])
def test_any_number_of_threads_gives_the_same_bits(dtype, threads):
    model, batch = tiny("bert", padding="right", dropout=0.2)
    cputrain.optimize(model, dtype=dtype)
    found = gradients_of(model, seeded_loss(batch))
    torch.set_num_threads(1)
    assert all(torch.equal(found[name], grad) for name, grad in gradients_of(model, seeded_loss(batch)).items())


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert", "vit"])
def test_the_gradient_is_that_of_the_mask_that_was_used(name):
    """A step along the gradient, with the same masks, changes the loss by its squared norm; another mask's doesn't."""
    model, batch = tiny(name, padding=padding_of(name), dropout=0.3)
    cputrain.optimize(model)
    loss = seeded_loss(batch)
    grads = gradients_of(model, loss)
    squared = sum(g.double().square().sum() for g in grads.values() if g is not None)
    step = 1e-2 / float(squared.sqrt())
    ends = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name_, parameter in moved.named_parameters():
                if grads[name_] is not None:
                    parameter.add_(grads[name_], alpha=sign * step)
            ends.append(loss(moved).double())
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), squared, rtol=5e-3, atol=0)


def test_attention_dropout_is_applied_at_the_rate_that_stock_uses():
    """With a rate of nearly 1 next to nothing of the attention is left, in training only."""
    model = cputrain.optimize(bert(dropout=0.0))
    for layer in model.encoder.layer:
        attention = layer.attention.self
        attention.dropout.p = 0.999
        if hasattr(attention, "dropout_prob"):  # where transformers before 5 has the rate from
            attention.dropout_prob = 0.999
    seen = model(ids(RIGHT), attention_mask=RIGHT).last_hidden_state
    model.eval()
    kept = model(ids(RIGHT), attention_mask=RIGHT).last_hidden_state
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.value.weight.zero_(), layer.attention.self.value.bias.zero_()
    nothing = model(ids(RIGHT), attention_mask=RIGHT).last_hidden_state
    differs = (seen - nothing).abs().amax(-1) > 1e-4
    assert differs.float().mean() < 0.5  # only a token with one of the few weights left, blown up, differs
    assert ((kept - nothing).abs().amax(-1) > 1e-4)[RIGHT == 1].all()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("mask", [RIGHT, LEFT, HOLES, torch.ones(3, 7).long()], ids=["right", "left", "holes", "full"])
@pytest.mark.parametrize("dtype", ["fp32", "int16"])
def test_checkpointed_gradients_equal_plain_ones_bit_for_bit(dtype, reentrant, mask):
    model = cputrain.optimize(bert(hf.BertForQuestionAnswering, dropout=0.2), dtype=dtype)
    start = mask.argmax(1)
    batch = {"input_ids": ids(mask), "attention_mask": mask, "start_positions": start, "end_positions": start}
    plain = gradients_of(model, seeded_loss(batch))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients_of(model, seeded_loss(batch))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "electra", "vit"])
def test_checkpointed_gradients_in_bf16(monkeypatch, name, reentrant):
    """A layer's input is kept as its norm keeps it, but rounded by itself when a checkpoint runs the layer again."""
    monkeypatch.setattr("cputrain.hardware.has_bf16", lambda: False)
    model, batch = tiny(name, padding=padding_of(name), dropout=0.2)
    if name == "gpt2":
        batch["use_cache"] = False
    cputrain.optimize(model, dtype="bf16")
    plain = gradients_of(model, seeded_loss(batch))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients_of(model, seeded_loss(batch))
    for n in plain:
        assert plain[n] is again[n] is None or (plain[n] - again[n]).norm() <= 2**-6 * plain[n].norm() + 1e-6, n


@pytest.mark.parametrize("name", ["gpt2", "opt", "mistral", "electra", "vit", "modernbert"])
def test_checkpointed_gradients_of_other_models(name):
    model, batch = tiny(name, padding=padding_of(name), dropout=0.2)
    if name in ("gpt2", "opt", "mistral"):
        batch["use_cache"] = False
    cputrain.optimize(model)
    plain = gradients_of(model, seeded_loss(batch))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients_of(model, seeded_loss(batch))
    assert all(torch.equal(plain[n], again[n]) for n in plain if plain[n] is not None)


def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        batch = {"input_ids": ids(RIGHT, seed=step), "attention_mask": RIGHT}
        labels = ids(RIGHT, seed=100 + step)
        optimizer.zero_grad()
        loss = model(**batch, labels=labels.masked_fill(RIGHT == 0, -100)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_run():
    model = bert(hf.BertForMaskedLM, dropout=0.2)
    return cputrain.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def test_stop_and_resume_equals_the_undisturbed_run(tmp_path):
    model, optimizer = new_run()
    torch.manual_seed(3)
    undisturbed = [*train(model, optimizer, 3), *train(model, optimizer, 3)]

    model, optimizer = new_run()
    torch.manual_seed(3)
    before = train(model, optimizer, 3)
    weights = save({name: value.contiguous().clone() for name, value in model.state_dict().items()})
    torch.save({"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}, tmp_path / "state.pt")

    torch.manual_seed(99)
    model, optimizer = new_run()
    model.load_state_dict(load(weights))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    assert before + train(model, optimizer, 3) == undisturbed
