"""Padding dropped: every real token's result is stock's for the real tokens alone, and padded positions are 0."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import cputrain
from tests.model_zoo import TINY, bert_like, stir_parameters, tiny
from tests.parity import releases
from tests.parity.small import EMPTY_ROW, HOLES, LEFT, RIGHT, bert, ids, pair, what_runs

MASKS = {"right": RIGHT, "left": LEFT, "holes": HOLES, "one row": RIGHT[1:2], "one column": torch.ones(3, 1).long()}


def alone(model, input_ids, mask):
    """Stock's hidden states of each row's real tokens, with the positions that they have in the padded batch."""
    for row, real in enumerate(mask.bool()):
        positions = torch.arange(mask.shape[1])[real][None]
        if real.any():
            yield row, real, model(input_ids[row][real][None], position_ids=positions)


def without_pooler(config):
    """BERT whose hidden states alone are wanted: its pooler reads the first position, and is tested below."""
    return hf.BertModel(config, add_pooling_layer=False)


@pytest.mark.parametrize("name", MASKS)
def test_hidden_states_are_those_of_the_real_tokens_alone(name):
    stock, ours = pair(bert(without_pooler))
    mask = MASKS[name]
    hidden = ours(ids(mask), attention_mask=mask).last_hidden_state
    for row, real, expected in alone(stock, ids(mask), mask):
        torch.testing.assert_close(hidden[row][real], expected.last_hidden_state[0], rtol=1e-4, atol=1e-5)
    assert (hidden[mask == 0] == 0).all()


@pytest.mark.parametrize("dtype", ["fp32", "int16"])
@pytest.mark.parametrize("mask", [LEFT, HOLES, EMPTY_ROW], ids=["left", "holes", "empty row"])
@pytest.mark.parametrize("kind", [hf.BertModel, hf.BertForSequenceClassification])
def test_heads_that_read_the_first_position_get_stocks_numbers(kind, mask, dtype):
    stock, ours = pair(bert(kind), dtype=dtype)
    expected, found = (m(ids(mask), attention_mask=mask)[-1] for m in (stock, ours))
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    encoder = "encoder" if kind is hf.BertModel else "bert.encoder"
    assert "the first position is padding in a row" in what_runs(ours, encoder)
    ours(ids(RIGHT), attention_mask=RIGHT)
    assert what_runs(ours, encoder) == "padding dropped between embeddings and head"


class Wrapped(torch.nn.Module):
    """A classifier of a user's own, which reads the first position."""

    def __init__(self):
        super().__init__()
        self.bert, self.score = bert(without_pooler), torch.nn.Linear(32, 3)

    def forward(self, input_ids, attention_mask):
        return self.score(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])


def test_a_users_head_that_reads_the_first_position():
    stock, ours = pair(Wrapped())
    torch.testing.assert_close(ours(ids(LEFT), LEFT), stock(ids(LEFT), LEFT), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("summary", ["last", "mean", "first"])
def test_heads_that_read_other_positions(summary):
    config = hf.ElectraConfig(**bert_like(TINY, 0.0), embedding_size=32, summary_type=summary, summary_last_dropout=0.0)
    model = hf.ElectraForMultipleChoice(config)
    stir_parameters(model)
    stock, ours = pair(model.train())
    for mask in (RIGHT, LEFT):
        expected, found = (m(ids(mask)[None], attention_mask=mask[None]).logits for m in (stock, ours))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_row_of_nothing_but_padding():
    stock, ours = pair(bert(without_pooler))
    hidden = ours(ids(EMPTY_ROW), attention_mask=EMPTY_ROW).last_hidden_state
    hidden.sum().backward()
    for row, real, expected in alone(stock, ids(EMPTY_ROW), EMPTY_ROW):
        torch.testing.assert_close(hidden[row][real], expected.last_hidden_state[0], rtol=1e-4, atol=1e-5)
    assert (hidden[1] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize("dtype", ["fp32", "int16"])
def test_a_batch_of_nothing_but_padding(dtype):
    ours = cputrain.optimize(bert(without_pooler), dtype=dtype)
    hidden = ours(ids(RIGHT), attention_mask=torch.zeros_like(RIGHT)).last_hidden_state
    hidden.sum().backward()
    assert (hidden == 0).all()


def test_distances_counted_inside_the_encoder_are_those_of_the_padded_batch():
    """ESM-2 turns queries and keys by their columns: tokens on both sides of a hole are further apart."""
    settings = {"pad_token_id": 0, "mask_token_id": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.EsmConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        position_embedding_type="rotary", **settings,
    )  # fmt: skip
    stock, ours = pair(hf.EsmModel(config))
    expected, found = (m(ids(HOLES), attention_mask=HOLES).last_hidden_state for m in (stock, ours))
    torch.testing.assert_close(found[HOLES == 1], expected[HOLES == 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64])
def test_masks_of_any_dtype(dtype):
    model = cputrain.optimize(bert())
    expected = model(ids(RIGHT), attention_mask=RIGHT).last_hidden_state
    assert torch.equal(model(ids(RIGHT), attention_mask=RIGHT.to(dtype)).last_hidden_state, expected)


def test_mask_as_positional_argument():
    model = cputrain.optimize(bert(hf.BertForQuestionAnswering))
    by_name = model(ids(RIGHT), attention_mask=RIGHT).start_logits
    assert torch.equal(model(ids(RIGHT), RIGHT).start_logits, by_name)


@pytest.mark.parametrize("kind", [hf.BertForTokenClassification, hf.BertForMaskedLM])
def test_token_logits_are_those_of_the_real_tokens_and_0_at_padding(kind):
    stock, ours = pair(bert(kind))
    logits = ours(ids(HOLES), attention_mask=HOLES).logits
    for row, real, expected in alone(stock, ids(HOLES), HOLES):
        torch.testing.assert_close(logits[row][real], expected.logits[0], rtol=1e-4, atol=1e-4)
    assert (logits[HOLES == 0] == 0).all()


def test_a_model_called_twice_in_one_forward_keeps_its_real_tokens():
    """Which padding belongs to which hidden states can't be told then, so the head computes all positions."""

    class Twice(hf.BertForTokenClassification):
        def forward(self, input_ids, attention_mask, other_mask):
            first = self.bert(input_ids, attention_mask=attention_mask)[0]
            self.bert(input_ids, attention_mask=other_mask)
            return self.classifier(first)

    stock, ours = pair(bert(Twice))
    logits = ours(ids(RIGHT), RIGHT, LEFT)
    expected = stock(ids(RIGHT), RIGHT, LEFT)
    torch.testing.assert_close(logits[RIGHT == 1], expected[RIGHT == 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
def test_span_logits_and_loss_without_padding(mask):
    stock, ours = pair(bert(hf.BertForQuestionAnswering))
    start = mask.argmax(1)
    out = ours(ids(mask), attention_mask=mask, start_positions=start, end_positions=start)
    lowest = -1e4
    losses = []
    for row, real, expected in alone(stock, ids(mask), mask):
        torch.testing.assert_close(out.start_logits[row][real], expected.start_logits[0], rtol=1e-4, atol=1e-5)
        zero = torch.zeros(1, dtype=torch.long)
        for logits in (expected.start_logits, expected.end_logits):
            losses.append(torch.nn.functional.cross_entropy(logits, zero) / 2)
    assert (out.start_logits[mask == 0] == lowest).all() and (out.end_logits[mask == 0] == lowest).all()
    torch.testing.assert_close(out.loss, torch.stack(losses).sum() / len(mask))


@pytest.mark.parametrize("name", ["bert", "distilbert", "mpnet"])
def test_span_logits_are_lowest_whether_or_not_the_encoder_drops_padding(name):
    model, batch = tiny(name, padding="right")
    out = cputrain.optimize(model)(**batch)
    assert (out.start_logits[batch["attention_mask"] == 0] == -1e4).all()
    assert out.loss.isfinite()


def test_padding_kept_gives_stocks_padded_numbers():
    stock, ours = pair(bert(hf.BertForQuestionAnswering), padding="keep")
    expected, found = stock(ids(HOLES), attention_mask=HOLES), ours(ids(HOLES), attention_mask=HOLES)
    torch.testing.assert_close(found.start_logits, expected.start_logits, rtol=1e-4, atol=1e-5)


def test_a_mask_of_four_dimensions_is_stocks():
    stock, ours = pair(bert())
    four = (RIGHT[:, None, None, :] * torch.ones(7, 7).tril()).bool()
    four = four if releases.BERT_IS_REGISTERED else four[:, 0]  # of which transformers makes one of four
    expected, found = (m(ids(RIGHT), attention_mask=four).last_hidden_state for m in (stock, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "plain" in what_runs(ours, "encoder")


def test_packed_position_ids():
    """Sequences behind one another in one row, told apart by their positions, are stock's to mask."""
    model, _ = tiny("mistral")
    stock, ours = pair(model)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    given = {"input_ids": torch.arange(4, 12)[None], "position_ids": positions, "use_cache": False}
    torch.testing.assert_close(ours(**given).logits, stock(**given).logits, rtol=1e-4, atol=1e-4)
    if not releases.SEPARATES_PACKED:
        return
    together = ours(**given).logits[0, 3:7]
    apart = ours(input_ids=torch.arange(7, 11)[None]).logits[0]
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
def test_inputs_embeds(mask):
    stock, ours = pair(bert(without_pooler))
    embeds = torch.randn(*mask.shape, 32, requires_grad=True)
    hidden = ours(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    hidden.square().sum().backward()
    for row, real in enumerate(mask.bool()):
        positions = torch.arange(mask.shape[1])[real][None]
        single = embeds.detach()[row][real][None].requires_grad_()
        expected = stock(inputs_embeds=single, position_ids=positions).last_hidden_state
        torch.testing.assert_close(hidden[row][real], expected[0], rtol=1e-4, atol=1e-5)
        expected.square().sum().backward()
        torch.testing.assert_close(embeds.grad[row][real], single.grad[0], rtol=1e-3, atol=1e-4)
    assert (embeds.grad[mask == 0] == 0).all()


@pytest.mark.parametrize("by_config", [False, True], ids=["argument", "config"])
def test_output_hidden_states_are_stocks(by_config):
    model = bert()
    model.config.output_hidden_states = by_config
    stock, ours = pair(model)
    asked = {} if by_config else {"output_hidden_states": True}
    expected, found = (m(ids(RIGHT), attention_mask=RIGHT, **asked).hidden_states for m in (stock, ours))
    assert len(found) == len(expected) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "output_hidden_states" in what_runs(ours, "encoder")


def test_config_changed_after_optimize_is_heeded():
    model = bert(hf.BertForQuestionAnswering)
    config = model.config
    cputrain.optimize(model)
    config.output_hidden_states = True
    assert model.config is config
    assert len(model(ids(RIGHT), attention_mask=RIGHT).hidden_states) == 3


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert", "gpt2", "opt", "vit"])
def test_output_attentions_with_eager_are_stocks(name):
    model, batch = tiny(name, padding="none" if name == "vit" else "right")
    stock, ours = pair(releases.in_eager(model))
    for _ in range(2):  # the second time transformers' recorders are already installed
        expected, found = (m(**batch, output_attentions=True).attentions for m in (stock, ours))
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        ours(**batch)


def test_output_attentions_by_config():
    model = bert(attn_implementation="eager", output_attentions=True)
    stock, ours = pair(model)
    expected, found = (m(ids(RIGHT), attention_mask=RIGHT).attentions for m in (stock, ours))
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    assert "output_attentions" in what_runs(ours, "encoder")


def test_explain_tells_what_the_last_call_did():
    model = cputrain.optimize(bert())
    model(ids(RIGHT), attention_mask=RIGHT, output_hidden_states=True)
    assert "output_hidden_states" in what_runs(model, "encoder")
    model(ids(RIGHT), attention_mask=RIGHT)
    assert what_runs(model, "encoder") == "padding dropped between embeddings and head"
    assert "each one's result is stock's for the real tokens alone" in str(cputrain.explain(model))


def test_a_chunked_feed_forward_keeps_its_padding():
    """Chunks of the sequence need its padded length; without it stock's chunking would refuse."""
    stock, ours = pair(bert())
    stock.config.chunk_size_feed_forward = ours.config.chunk_size_feed_forward = 7
    for part in (*stock.encoder.layer, *ours.encoder.layer):
        part.chunk_size_feed_forward = 7
    expected, found = (m(ids(RIGHT), attention_mask=RIGHT).last_hidden_state for m in (stock, ours))
    torch.testing.assert_close(found[RIGHT == 1], expected[RIGHT == 1], rtol=1e-4, atol=1e-5)
    assert "chunk_size_feed_forward" in what_runs(ours, "encoder")


def test_a_causal_bert_without_padding():
    stock, ours = pair(bert(hf.BertLMHeadModel, is_decoder=True))
    logits = ours(ids(LEFT), attention_mask=LEFT, use_cache=False).logits
    for row, real in enumerate(LEFT.bool()):
        positions = torch.arange(7)[real][None]
        expected = stock(ids(LEFT)[row][real][None], position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(logits[row][real], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mistral", "t5"])
def test_generate_with_a_cache_on_left_padded_input(name):
    model, batch = tiny(name, padding="left")
    stock, ours = pair(model.eval())
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "use_cache": True}
    assert torch.equal(ours.generate(**given, **settings), stock.generate(**given, **settings))
