"""Losses of language models without their logits: the model families, evaluation, generation, and labels by users."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import transformers as hf
from torch.nn import functional as F

import cputrain
from cputrain import log
from cputrain.blocks.lazy_logits import LazyLogits
from cputrain.ops import shared_table
from tests.model_zoo import tiny
from tests.parity.small import assert_close, gradients_of, ids, pair

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODERS = {
    "Llama": {},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
    "Phi": {},
    "GPTNeoX": {},
}
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]])


@pytest.fixture
def computed(monkeypatch) -> list[torch.Size]:
    """The shapes of all logits whose values were asked for."""
    seen: list[torch.Size] = []
    values = LazyLogits.computed
    monkeypatch.setattr(LazyLogits, "computed", lambda logits: (seen.append(logits.source.shape), values(logits))[1])
    return seen


def decoder(name: str) -> torch.nn.Module:
    if not hasattr(hf, f"{name}Config"):
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    config = getattr(hf, f"{name}Config")(**SMALL, **TOKENS, **DECODERS[name])
    torch.manual_seed(0)
    return getattr(hf, f"{name}ForCausalLM")(config).train()


def batch_of(mask: torch.Tensor = MASK) -> dict[str, torch.Tensor]:
    tokens = ids(mask) % 99
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("mask", [MASK, torch.ones_like(MASK)], ids=["padded", "full"])
@pytest.mark.parametrize("padding", ["drop", "keep"])
@pytest.mark.parametrize("name", DECODERS)
def test_training_takes_no_logits(name, padding, mask, computed):
    batch = batch_of(mask)
    stock, ours = pair(decoder(name).eval(), padding=padding)  # eval: no dropout in either
    assert_close(gradients_of(ours, lambda m: m(**batch).loss), gradients_of(stock, lambda m: m(**batch).loss))
    assert not computed
    items = batch | {"num_items_in_batch": torch.tensor(7)}
    assert_close(gradients_of(ours, lambda m: m(**items).loss), gradients_of(stock, lambda m: m(**items).loss))
    assert isinstance(ours(**batch).logits, LazyLogits) and not computed


@pytest.mark.parametrize("name", ["bert-mlm", "t5", "bart", "gpt2"])
def test_other_heads_take_none_either(name, computed):
    model, batch = _zoo(name)
    result = cputrain.optimize(model)(**batch)
    result.loss.backward()
    assert isinstance(result.logits, LazyLogits) and not computed


def _zoo(name):
    if name == "bert-mlm":
        config = hf.BertConfig(**SMALL)
        return hf.BertForMaskedLM(config).train(), batch_of()
    if name == "bart":
        sizes = {f"{side}_{what}": 8 for side in ("encoder", "decoder") for what in ("layers", "ffn_dim")}
        sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "vocab_size": 99}
        return hf.BartForConditionalGeneration(hf.BartConfig(**sizes, **TOKENS)).train(), batch_of()
    return tiny(name, padding="right")


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_table_that_is_embedding_and_head_gets_one_gradient(name, monkeypatch):
    monkeypatch.setitem(DECODERS, name, {**DECODERS[name], "tie_word_embeddings": True})
    stock, ours = pair(decoder(name))
    given = []
    held = shared_table.SharedTable.held_by_autograd
    monkeypatch.setattr(
        shared_table.SharedTable, "held_by_autograd", lambda table: given.append(held(table) is not None) or held(table)
    )
    for _ in range(2):  # accumulated
        for model in (stock, ours):
            model(**batch_of()).loss.backward()
    assert given == [True, True]  # the head's was there
    torch.testing.assert_close(ours.lm_head.weight.grad, stock.lm_head.weight.grad)
    assert ours.lm_head.weight is ours.get_input_embeddings().weight


def test_berts_table_gets_one_gradient_too(monkeypatch):
    """Its rows are read by the operator that also adds positions and normalises."""
    torch.manual_seed(0)
    stock, ours = pair(hf.BertForMaskedLM(hf.BertConfig(**SMALL)).eval())
    given = []
    held = shared_table.SharedTable.held_by_autograd
    monkeypatch.setattr(
        shared_table.SharedTable, "held_by_autograd", lambda table: given.append(held(table) is not None) or held(table)
    )
    for model in (stock, ours):
        model(**batch_of()).loss.backward()
    assert given == [True]
    table = ours.get_input_embeddings().weight
    assert table is ours.get_output_embeddings().weight
    torch.testing.assert_close(table.grad, stock.get_input_embeddings().weight.grad)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.masking_utils") is None,
    reason="decoders keep their padding where transformers has no registry of masks",
)
def test_a_label_behind_padding_on_the_left_has_no_gradient_and_that_is_said(caplog):
    """The loss without it, as for the tokens alone; stock predicts it from a padded position."""
    log.say_once.cache_clear()
    stock, ours = pair(decoder("Llama"))
    batch = batch_of(MASK.flip(1))
    tokens, padded = int((batch["labels"][:, 1:] != -100).sum()), 2  # rows that begin with padding
    without = {**batch, "labels": batch["labels"].clone()}
    without["labels"][1, 3] = without["labels"][2, 5] = -100
    share = (tokens - padded) / tokens
    assert_close(
        gradients_of(ours, lambda m: m(**batch).loss), gradients_of(stock, lambda m: share * m(**without).loss)
    )
    assert caplog.text.count("padding on the left") == 1
    log.say_once.cache_clear()


def test_a_users_own_loss_takes_none(computed):
    stock, ours = pair(decoder("Llama"))
    batch = batch_of()
    labels = batch.pop("labels")

    def loss(model):
        logits = model(**batch).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, 99), labels[:, 1:].reshape(-1))

    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))
    assert not computed


def test_evaluation_that_wants_the_loss_alone(computed):
    stock, ours = pair(decoder("Llama").eval())
    with torch.no_grad():
        result = ours(**batch_of())
        expected = stock(**batch_of())
        torch.testing.assert_close(result.loss, expected.loss)
        result.logits.detach()
        assert not computed
        real = MASK.bool()
        torch.testing.assert_close(result.logits[real], expected.logits[real])
        assert computed
        assert type(ours(input_ids=batch_of()["input_ids"]).logits) is torch.Tensor  # without labels there is no loss


def test_generation_is_stocks():
    stock, ours = pair(decoder("Llama"))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for model in (ours, stock):
        model(**batch_of()).loss.backward()
    left = batch_of(MASK.flip(1))
    found = [m.generate(left["input_ids"], attention_mask=left["attention_mask"], **options) for m in (ours, stock)]
    assert torch.equal(*found)


def test_logits_by_name_are_stocks_again_after_restore():
    model = decoder("Llama")
    ours = cputrain.optimize(copy.deepcopy(model))
    assert "logits are computed only where code reads them" in str(cputrain.explain(ours))
    assert isinstance(ours(**batch_of()).logits, LazyLogits)
    assert type(cputrain.restore(ours)(**batch_of()).logits) is torch.Tensor


def test_asked_for_computed_logits(monkeypatch):
    monkeypatch.setenv("CPUTRAIN_LOGITS", "computed")
    ours = cputrain.optimize(decoder("Llama"))
    assert type(ours(**batch_of()).logits) is torch.Tensor
    monkeypatch.setenv("CPUTRAIN_LOGITS", "maybe")
    with pytest.raises(ValueError, match="CPUTRAIN_LOGITS"):
        cputrain.optimize(decoder("Llama"))


def test_a_hook_on_the_head_gets_a_tensor_of_values():
    ours = cputrain.optimize(decoder("Llama"))
    seen = []
    ours.lm_head.register_forward_hook(lambda module, args, out: seen.append(type(out)))
    ours(**batch_of()).loss.backward()
    assert seen == [torch.Tensor]


def test_training_accuracy_beside_the_loss():
    stock, ours = pair(decoder("Llama"))
    batch = batch_of()
    results = [model(**batch) for model in (ours, stock)]
    real = MASK.bool()
    assert torch.equal(*(result.logits.argmax(-1)[real] for result in results))
    for result in results:
        result.loss.backward()
    torch.testing.assert_close(ours.lm_head.weight.grad, stock.lm_head.weight.grad)
