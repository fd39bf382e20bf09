"""A vocabulary head behind dropped padding writes its logits once, and gives what stock gives."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import cputrain
from cputrain.blocks import head
from cputrain.ops import padded_linear as operator

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
MODELS = {
    "masked": (
        transformers.BertForMaskedLM,
        {"vocab_size": 700, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "causal": (transformers.LlamaForCausalLM, {"vocab_size": 700, "num_key_value_heads": 2}),
}


def build(name):
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    return kind(kind.config_class(**SIZES, **sizes)).train()


def batch():
    mask = torch.arange(12) < torch.tensor([12, 5, 9])[:, None]
    ids = torch.randint(10, 700, mask.shape).where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


@pytest.fixture
def products(monkeypatch):
    """Arguments of every padded product; blocks are so small that any head has several."""
    seen = []

    def noted(*args):
        seen.append(args)
        return operator.padded_linear(*args)

    monkeypatch.setattr(operator, "BLOCK_BYTES", 1)
    monkeypatch.setattr(head, "padded_linear", noted)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_gradients_are_stocks(name, products):
    stock, inputs = build(name), batch()
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    expected, found = stock(**inputs), ours(**inputs)
    assert any(args[1] is ours.get_output_embeddings().weight for args in products)
    real = inputs["attention_mask"] == 1
    torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)
    assert not found.logits[~real].any()
    torch.testing.assert_close(found.loss, expected.loss)
    for out in (expected, found):
        out.loss.backward()
    gradients = dict(stock.named_parameters())
    for parameter, theirs in ((p, gradients[n]) for n, p in ours.named_parameters()):
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_under_autocast_stocks_product_runs(products):
    ours = cputrain.optimize(build("causal"), dtype="fp32")
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(**batch()).logits.dtype is torch.bfloat16
    assert not products
