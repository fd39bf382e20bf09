"""padding="keep": stock's padded numbers, from our attention with a mask of keys."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import cputrain
from tests.parity.small import EMPTY_ROW, HOLES, LEFT, RIGHT, assert_close, bert, gradients_of, ids, pair

MASKS = {"right": RIGHT, "left": LEFT, "holes": HOLES, "empty row": EMPTY_ROW}


def loss_of(mask):
    def loss(model):
        out = model(ids(mask), attention_mask=mask)
        weights = torch.randn(out.last_hidden_state.shape, generator=torch.Generator().manual_seed(1))
        return (out.last_hidden_state * weights).sum() + out.pooler_output.sum()

    return loss


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MASKS)
def test_results_and_gradients_are_stocks_at_every_position(name, implementation):
    mask = MASKS[name]
    model = bert(hf.BertModel, attn_implementation=implementation)
    stock, ours = pair(model, padding="keep")
    expected, found = (m(ids(mask), attention_mask=mask).last_hidden_state for m in (stock, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert_close(gradients_of(ours, loss_of(mask)), gradients_of(stock, loss_of(mask)))
    if hf.__version__ >= "5":  # what eager attention makes of a row without any key is left to it
        left_to_stock = "the mask is not plain" in str(cputrain.explain(ours))
        assert left_to_stock == (name == "empty row" and implementation == "eager")


@pytest.mark.skipif(hf.__version__ < "5", reason="BERT of this release takes no such mask")
def test_a_mask_of_more_than_keys_is_stocks():
    stock, ours = pair(bert(hf.BertModel), padding="keep")
    seen = torch.ones(3, 1, 7, 7).tril().bool() & RIGHT.bool()[:, None, None, :]
    expected, found = (m(ids(RIGHT), attention_mask=seen).last_hidden_state for m in (stock, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if hf.__version__ >= "5":
        assert "the mask is not plain" in str(cputrain.explain(ours))


@pytest.mark.skipif(hf.__version__ < "5", reason="BERT of this release takes no such mask")
def test_a_mask_that_changes_in_place_is_looked_at_again():
    stock, ours = pair(bert(hf.BertModel), padding="keep")
    seen = RIGHT.bool()[:, None, None, :].expand(3, 1, 7, 7).clone()
    for _ in range(2):
        expected, found = (m(ids(RIGHT), attention_mask=seen).last_hidden_state for m in (stock, ours))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        seen[:, :, :, 1] = False
