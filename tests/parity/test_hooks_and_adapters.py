"""`optimize` with what people put on models: hooks, adapters, pruning, other classes; nothing may be skipped."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import parametrizations, prune

import cputrain
from tests.parity import releases
from tests.parity.small import RIGHT, assert_close, batch, bert, gradients_of, ids, loss, pair, token_bert, what_runs

ATTENTION = "bert.encoder.layer.*.attention.self"


# ---- hooks ---------------------------------------------------------------------------------------------------------

PLACES = {
    "linear": lambda m: m.bert.encoder.layer[0].intermediate.dense,
    "query": lambda m: m.bert.encoder.layer[1].attention.self.query,
    "dropout": lambda m: m.bert.encoder.layer[0].output.dropout,
    "norm": lambda m: m.bert.encoder.layer[0].attention.output.LayerNorm,
    "activation": lambda m: m.bert.encoder.layer[0].intermediate.intermediate_act_fn,
    "intermediate": lambda m: m.bert.encoder.layer[0].intermediate,
    "layer": lambda m: m.bert.encoder.layer[1],
    "encoder": lambda m: m.bert.encoder,
    "embeddings": lambda m: m.bert.embeddings,
    "word embeddings": lambda m: m.bert.embeddings.word_embeddings,
    "embedding norm": lambda m: m.bert.embeddings.LayerNorm,
    "classifier": lambda m: m.classifier,
}


def first_tensor(out):
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_added_in_mid_training_sees_and_changes_what_it_would_in_stock(place):
    stock, ours = pair(token_bert())
    gradients_of(ours, loss)
    shapes = {}
    for model in (stock, ours):

        def hook(module, inputs, out, model=model):
            shapes.setdefault(id(model), []).append(first_tensor(out).shape)
            changed = first_tensor(out) * 1.5
            if isinstance(out, torch.Tensor):
                return changed
            if isinstance(out, tuple):
                return (changed, *out[1:])
            out["last_hidden_state"] = changed
            return out

        PLACES[place](model).register_forward_hook(hook)
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))
    assert shapes[id(ours)] == shapes[id(stock)]


@pytest.mark.parametrize("place", ["linear", "norm", "layer", "word embeddings"])
def test_full_backward_hooks(place):
    stock, ours = pair(token_bert())
    seen = {}
    for model in (stock, ours):
        record = seen.setdefault(id(model), [])
        PLACES[place](model).register_full_backward_hook(lambda m, gi, go, r=record: r.append(go[0].clone()))
        gradients_of(model, loss)
    found, expected = seen[id(ours)], seen[id(stock)]
    assert len(found) == len(expected) == 1
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-5)


def test_global_hooks_see_dense_shapes():
    stock, ours = pair(token_bert())
    shapes = {}
    for model in (stock, ours):
        record = shapes.setdefault(id(model), [])
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, i, o, r=record: r.append((type(m).__name__, o.shape)) if isinstance(o, torch.Tensor) else None
        )
        loss(model)
        handle.remove()
    assert shapes[id(ours)] == shapes[id(stock)]


def test_explain_names_the_hook_and_forgets_it_when_it_is_gone():
    model = cputrain.optimize(token_bert())
    handle = PLACES["query"](model).register_forward_hook(lambda *_: None)
    loss(model)
    assert "hook" in what_runs(model, ATTENTION) and "hook" in what_runs(model, "bert.encoder")
    handle.remove()
    loss(model)
    assert "hook" not in str(cputrain.explain(model))


def test_users_hooks_sleep_while_optimize_looks_at_the_model():
    model = token_bert()
    seen = []
    for part in model.modules():
        part.register_forward_hook(lambda *_: seen.append(1))
    state = torch.get_rng_state()
    cputrain.optimize(model)
    assert not seen and torch.equal(torch.get_rng_state(), state) and model.training
    loss(model)
    assert seen


# ---- other things put on a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["linear", "query", "layer", "encoder", "embeddings", "norm", "classifier"])
def test_a_forward_put_on_an_instance_is_never_bypassed(place, when):
    stock, ours = token_bert(), token_bert()
    if when == "after":
        cputrain.optimize(ours)
    for model in (stock, ours):
        part = PLACES[place](model)
        before = part.forward

        def doubled(*args, before=before, **kwargs):
            out = before(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                return 2 * out
            if isinstance(out, tuple):
                return (2 * out[0], *out[1:])
            out["last_hidden_state"] = 2 * out["last_hidden_state"]
            return out

        part.forward = doubled
    if when == "before":
        cputrain.optimize(ours)
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
def test_lora(when, padded):
    settings = peft.LoraConfig(target_modules=["query", "value", "dense"], init_lora_weights=False, lora_dropout=0.0)
    stock, ours = token_bert(), token_bert()
    if when == "after":
        cputrain.optimize(ours)
    torch.manual_seed(0)
    stock = peft.get_peft_model(stock, settings)
    torch.manual_seed(0)
    ours = peft.get_peft_model(ours, settings)
    if when == "before":
        cputrain.optimize(ours)
    given = batch(RIGHT if padded else torch.ones_like(RIGHT))
    found, expected = (gradients_of(m, lambda m: m(**given).loss) for m in (ours, stock))
    assert_close(found, expected)
    adapters = [name for name, grad in found.items() if grad is not None]
    assert adapters and all("lora" in name for name in adapters)


def test_lora_keeps_dropping_padding():
    """Adapted before; if attention doesn't go through the registry, only stock's module knows what to do with them."""
    model = peft.get_peft_model(token_bert(), peft.LoraConfig(target_modules=["query", "value"]))
    cputrain.optimize(model)
    logits = model(ids(RIGHT), attention_mask=RIGHT).logits
    assert (logits[RIGHT == 0] == 0).all() == releases.BERT_IS_REGISTERED
    assert ("padding stays" not in what_runs(model, "base_model.model.bert.encoder")) == releases.BERT_IS_REGISTERED


def test_lora_after_optimize_keeps_dropping_padding():
    model = cputrain.optimize(token_bert())
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"]))
    logits = model(ids(RIGHT), attention_mask=RIGHT).logits
    assert (logits[RIGHT == 0] == 0).all()


def test_lora_of_a_question_answering_model():
    """peft wraps the head, whose copies must keep padding out of the loss."""
    settings = peft.LoraConfig(task_type="QUESTION_ANS", target_modules=["query", "value"])
    for when in ("before", "after"):
        model = bert(hf.BertForQuestionAnswering)
        model = (
            cputrain.optimize(peft.get_peft_model(model, settings))
            if when == "before"
            else peft.get_peft_model(cputrain.optimize(model), settings)
        )
        out = model(input_ids=ids(RIGHT), attention_mask=RIGHT)
        assert (out.start_logits[RIGHT == 0] == -1e4).all()


def test_pruning():
    stock, ours = pair(token_bert())
    for model in (stock, ours):
        torch.manual_seed(0)
        for place in ("linear", "query"):
            prune.random_unstructured(PLACES[place](model), "weight", amount=0.5)
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.orthogonal, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrizations(make, when):
    torch.manual_seed(0)
    stock, ours = token_bert(), token_bert()
    if when == "after":
        cputrain.optimize(ours)
    for model in (stock, ours):
        for place in ("linear", "query"):
            make(PLACES[place](model))
    if when == "before":
        cputrain.optimize(ours)
    ours.load_state_dict(stock.state_dict())  # orthogonal's base is random
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("when", ["before", "after"])
def test_subclasses_of_linear_are_called(when):
    models = token_bert(), token_bert()
    if when == "after":
        cputrain.optimize(models[1])
    for model in models:
        layer = model.bert.encoder.layer[0]
        for parent, name in ((layer.intermediate, "dense"), (layer.output, "dense"), (layer.attention.self, "key")):
            getattr(parent, name).__class__ = Doubled
    if when == "before":
        cputrain.optimize(models[1])
    assert_close(gradients_of(models[1], loss), gradients_of(models[0], loss))


def test_parts_replaced_by_something_that_looks_at_several_tokens():
    """After optimize has found that the encoder can do without padding: it must ask again."""

    class Mixing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = self.inner(x)
            return x + x.cumsum(1)

    stock, ours = pair(token_bert())
    loss(ours)
    for model in (stock, ours):
        layer = model.bert.encoder.layer[0]
        layer.intermediate.dense = Mixing(layer.intermediate.dense)
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))
    assert "padding" in what_runs(ours, "bert.encoder")


def test_inplace_dropout_and_norm_without_weights(monkeypatch):
    monkeypatch.setattr("cputrain.blocks.leaves.WORTHWHILE", 0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Dropout(0.0, inplace=True), nn.LayerNorm((3, 8)),
        nn.LayerNorm(8, bias=False), nn.GELU(), nn.SiLU(inplace=True), nn.ReLU(inplace=True), nn.Dropout(1.0),
    )  # fmt: skip
    stock, ours = pair(model)
    x = torch.randn(2, 3, 8)
    assert_close(gradients_of(ours[:-1], lambda m: m(x).sum()), gradients_of(stock[:-1], lambda m: m(x).sum()))
    assert (ours(x) == 0).all()
    ours[2].p = 0.5
    torch.manual_seed(0)
    expected = nn.functional.dropout(torch.ones(4, 8), 0.5, inplace=True)
    torch.manual_seed(0)
    given = torch.ones(4, 8)
    assert torch.equal(ours[2](given), expected) and torch.equal(given, expected)


def test_an_embedding_module_that_scales_its_rows():
    """What a model does with its tables' rows besides adding them must work on the rows that wait."""

    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.place = nn.Embedding(9, 8), nn.Embedding(5, 8)
            self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.0)

        def forward(self, ids):
            word, place = self.word(ids) * 3.0, self.place(torch.arange(ids.shape[1]))
            joined = torch.cat([word, -word / 2], dim=1)[:, : ids.shape[1]]
            return self.dropout(self.norm(joined + place)) + self.word(ids)[:, :1]

    stock, ours = pair(Embeddings())
    given = torch.randint(9, (2, 5))
    found, expected = (gradients_of(m, lambda m: m(given).square().sum()) for m in (ours, stock))
    assert_close(found, expected)


def test_embeddings_that_drop_before_they_normalise():
    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.place = nn.Embedding(9, 8), nn.Embedding(5, 8)
            self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.5)

        def forward(self, ids):
            return self.norm(self.dropout(self.word(ids) + self.place(torch.arange(ids.shape[1]))))

    stock, ours = pair(Embeddings())
    given = torch.randint(9, (2, 5))
    torch.manual_seed(1)
    expected = stock(given)
    torch.manual_seed(1)
    assert torch.equal(ours(given), expected)


def test_residual_blocks_complain_as_stock_about_shapes():
    model = cputrain.optimize(token_bert())
    block = model.bert.encoder.layer[0].output
    with pytest.raises(RuntimeError):
        block(torch.randn(2, 3, 48), torch.randn(2, 4, 32))
    broadcast = block(torch.randn(2, 3, 48), torch.randn(1, 1, 32))
    assert broadcast.shape == (2, 3, 32)
