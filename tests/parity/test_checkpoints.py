"""Whatever is saved from an optimised model is everyone's: every key in the file, and nothing of ours in it."""

from __future__ import annotations

import json
import subprocess
import sys

import accelerate
import pytest
import safetensors.torch
import torch
import transformers as hf

import cputrain
from tests.parity.small import RIGHT, bert, ids, pair

KIND = hf.BertForMaskedLM


@pytest.fixture
def trained():
    """An optimised model and its optimizer after two steps."""
    model = bert(KIND)
    model, optimizer = cputrain.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    step(model, optimizer)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    labels = ids(RIGHT, seed=1).masked_fill(RIGHT == 0, -100)
    optimizer.zero_grad()
    loss = model(ids(RIGHT), attention_mask=RIGHT, labels=labels).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_same_weights(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_save_pretrained_and_back_into_stock(trained, tmp_path):
    model, _ = trained
    model.save_pretrained(tmp_path)
    assert "cputrain" not in (tmp_path / "config.json").read_text()
    stock = bert(KIND)
    stock.save_pretrained(tmp_path / "stock")
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (tmp_path / "stock" / "config.json").read_text()
    )
    again = KIND.from_pretrained(tmp_path)
    assert_same_weights(again, model)
    assert again.config._attn_implementation == "sdpa" and "stock" in str(cputrain.explain(again))


def test_save_pretrained_of_a_base_model(tmp_path):
    model = cputrain.optimize(bert())
    model.save_pretrained(tmp_path)
    assert "cputrain" not in (tmp_path / "config.json").read_text()
    assert_same_weights(hf.AutoModel.from_pretrained(tmp_path), model)


def test_safetensors_save_model(trained, tmp_path):
    model, _ = trained
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    stock = bert(KIND, seed=5)
    safetensors.torch.load_model(stock, tmp_path / "model.safetensors")
    assert_same_weights(stock, model)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    distinct = {value.data_ptr() for value in model.state_dict().values()}
    assert len(saved) == len(distinct)  # one name for each tensor, tied ones once


def new_accelerator():
    accelerate.state.AcceleratorState._reset_state(True)
    return accelerate.Accelerator(cpu=True)


def test_accelerate_saves_what_stock_loads(trained, tmp_path):
    model, optimizer = trained
    accelerator = new_accelerator()
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(prepared, tmp_path / "model")
    expected = step(prepared, prepared_optimizer)

    accelerator = new_accelerator()
    stock = bert(KIND, seed=5)
    stock, stock_optimizer = accelerator.prepare(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2))
    accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close(step(stock, stock_optimizer), expected)
    saved = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    names = {id(p): name for name, p in model.named_parameters()}
    assert set(names.values()) <= saved.keys()


def test_accelerate_loads_what_stock_saved(tmp_path):
    accelerator = new_accelerator()
    stock = bert(KIND)
    stock, optimizer = accelerator.prepare(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2))
    step(stock, optimizer)
    accelerator.save_state(tmp_path)
    expected = step(stock, optimizer)

    accelerator = new_accelerator()
    model = bert(KIND, seed=5)
    model, optimizer = cputrain.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(step(model, optimizer), expected)


def test_no_parameter_shares_storage_with_another(trained):
    model, _ = trained
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)


def test_a_pickled_model_is_stock_even_without_cputrain(trained, tmp_path):
    model, _ = trained
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same_weights(again, model)
    stock, _ = pair(cputrain.restore(model))
    given = {"input_ids": ids(RIGHT), "attention_mask": RIGHT}
    assert torch.equal(again(**given).logits, stock(**given).logits)
    assert again.bert.config is again.config and "stock" in str(cputrain.explain(again))
    cputrain.optimize(again)
    assert "one product" in str(cputrain.explain(again))
    assert (again(**given).logits[RIGHT == 0] == 0).all()
    cputrain.restore(again)
    assert torch.equal(again(**given).logits, stock(**given).logits)

    program = f"""
import sys, torch
sys.modules["cputrain"] = None  # importing it is an error
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
model(torch.tensor([[5, 6, 7]]))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_weights_load_into_an_optimised_model(trained):
    model, _ = trained
    other = cputrain.optimize(bert(KIND, seed=5))
    other.load_state_dict(model.state_dict())
    given = {"input_ids": ids(RIGHT), "attention_mask": RIGHT}
    assert torch.equal(other(**given).logits, model(**given).logits)
