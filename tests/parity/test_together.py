"""`optimize` with what people do to models: hooks, adapters, pruning, copies, checkpoints; nothing may be skipped."""

from __future__ import annotations

import copy
import gc
import inspect

import peft
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import parametrizations, prune

import cputrain
from cputrain.optimizers import clipping
from tests.model_zoo import NAMES, tiny
from tests.parity.small import RIGHT, assert_close, bert, gradients_of, ids, pair, what_runs

ATTENTION = "bert.encoder.layer.*.attention.self"


def batch(mask=RIGHT):
    return {
        "input_ids": ids(mask),
        "attention_mask": mask,
        "labels": (ids(mask, seed=1) % 2).masked_fill(mask == 0, -100),
    }


def loss(model):
    """Token classification, labels of -100 at padding: the same loss with padding and without."""
    return model(**batch()).loss


def token_bert(**settings):
    return bert(hf.BertForTokenClassification, **settings)


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
    model = peft.get_peft_model(token_bert(), peft.LoraConfig(target_modules=["query", "value"]))
    cputrain.optimize(model)
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
        assert (out.start_logits[RIGHT == 0] == torch.finfo(torch.float32).min).all()


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
    monkeypatch.setattr("cputrain.layers.leaves.WORTHWHILE", 0)
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


# ---- the model itself ----------------------------------------------------------------------------------------------


def test_modules_may_be_called_by_the_names_of_their_arguments():
    stock, ours = pair(token_bert())
    x, y = torch.randn(2, 3, 48), torch.randn(2, 3, 32)
    found, expected = (m.bert.encoder.layer[0].output(input_tensor=y, hidden_states=x) for m in (ours, stock))
    torch.testing.assert_close(found, expected)
    found, expected = (m.bert.encoder(attention_mask=None, hidden_states=y)[0] for m in (ours, stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_signature_keys_and_class_stay(name):
    model, _ = tiny(name)
    signatures = {n: inspect.signature(m.forward) for n, m in model.named_modules()}
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    cputrain.optimize(model)
    assert {n: inspect.signature(m.forward) for n, m in model.named_modules()} == signatures
    assert [type(m) for m in model.modules()] == kinds and list(model.state_dict()) == keys


def test_optimize_again_and_restore_in_the_middle():
    stock, ours = pair(token_bert())
    expected = gradients_of(stock, loss)
    first = str(cputrain.explain(ours))
    cputrain.optimize(cputrain.optimize(ours, dtype=torch.float32), dtype="auto")
    assert str(cputrain.explain(ours)) == first
    assert_close(gradients_of(ours, loss), expected)
    cputrain.restore(ours)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(ours, loss).values(), expected.values(), strict=True))
    assert ours.bert.config is ours.config and "stock" in str(cputrain.explain(ours))
    cputrain.optimize(ours, padding="keep")
    assert_close(gradients_of(ours, loss), expected)


def test_copies_of_parts_are_restored_with_the_model():
    """Somebody makes a model deeper by copies of its layers, or takes its encoder into another."""
    model = cputrain.optimize(token_bert())
    model.bert.encoder.layer.append(copy.deepcopy(model.bert.encoder.layer[1]))
    base = copy.deepcopy(model.bert)
    gradients_of(model, loss)
    for restored in (cputrain.restore(model), cputrain.restore(base)):
        assert all("forward" not in part.__dict__ for part in restored.modules())
        assert {type(part.config) for part in restored.modules() if hasattr(part, "config")} == {hf.BertConfig}
        assert not [key for part in restored.modules() for key in part.__dict__ if "cputrain" in key]


@pytest.mark.parametrize("part", ["output", "attention.self", "intermediate"])
def test_a_class_changed_after_optimize_is_heeded(part):
    stock, ours = pair(token_bert())
    for model in (stock, ours):
        block = model.bert.encoder.layer[0].get_submodule(part)

        class Other(type(block)):
            def forward(self, *args, **kwargs):
                out = super().forward(*args, **kwargs)
                return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

        block.__class__ = Other
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))


def test_restore_leaves_what_others_have_put_on_the_model_since():
    model = cputrain.optimize(token_bert())
    classifier = model.classifier
    mine = lambda x: classifier.weight.new_zeros(*x.shape[:-1], 2)  # noqa: E731
    classifier.forward = mine
    cputrain.restore(model)
    assert classifier.forward is mine
    assert cputrain.restore(model) is model  # twice is harmless


def test_a_copy_is_optimised_and_on_its_own():
    model = cputrain.optimize(token_bert())
    expected = gradients_of(model, loss)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = gradients_of(twin, loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert str(cputrain.explain(twin)) == str(cputrain.explain(model))
    before = str(cputrain.explain(model))
    cputrain.restore(twin)
    assert all("forward" not in part.__dict__ for part in twin.modules())
    assert str(cputrain.explain(model)) == before and "one product" in before
    assert torch.nn.utils.clip_grad_norm_ is clipping.clip_grad_norm_
    cputrain.restore(model)
    gc.collect()  # models of other tests
    assert torch.nn.utils.clip_grad_norm_ is not clipping.clip_grad_norm_


def test_another_model_of_the_same_config_stays_stock():
    config = token_bert().config
    ours, other = (hf.BertForTokenClassification(config) for _ in range(2))
    cputrain.optimize(ours)
    made_later = hf.BertForTokenClassification(ours.config)
    for model in (other, made_later):
        implementations = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert implementations == {"sdpa"}
    assert "sdpa" not in {m.config._attn_implementation for m in ours.bert.modules() if hasattr(m, "config")}


def test_another_attention_implementation_chosen_later():
    stock, ours = pair(token_bert())
    for model in (stock, ours):
        model.set_attn_implementation("eager")
    attentions = ours(**batch(), output_attentions=True).attentions
    torch.testing.assert_close(attentions, stock(**batch(), output_attentions=True).attentions, rtol=1e-4, atol=1e-5)
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))
    cputrain.restore(ours)
    assert ours.bert.config._attn_implementation == "eager"


def test_a_model_whose_modules_are_shared():
    """ALBERT runs one layer several times."""
    model, given = tiny("albert")
    model.albert.encoder.config.num_hidden_layers = 5
    stock, ours = pair(model)
    assert_close(*(gradients_of(m, lambda m: m(**given).loss) for m in (ours, stock)))


def test_two_models_in_two_threads():
    from concurrent.futures import ThreadPoolExecutor

    models = [cputrain.optimize(token_bert(seed=seed)) for seed in range(2)]
    expected = [gradients_of(model, loss) for model in models]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for found, wanted in zip(pool.map(lambda m: gradients_of(m, loss), models), expected, strict=True):
                assert_close(found, wanted)
