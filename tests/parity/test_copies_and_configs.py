"""The optimised model as an object: its names, copies and configs, optimised again, restored, in threads."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref

import pytest
import torch
import transformers as hf

import cputrain
from cputrain.optimizers import clipping
from tests.model_zoo import NAMES, tiny
from tests.parity import releases
from tests.parity.small import assert_close, batch, gradients_of, loss, pair, token_bert

ATTENTION = "bert.encoder.layer.*.attention.self"


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


def test_explain_lists_what_runs_and_not_the_parts_that_it_bypasses():
    modules = [name for name, _, _ in cputrain.explain(cputrain.optimize(token_bert())).modules]
    assert "bert.encoder.layer.*" in modules and ATTENTION in modules
    assert not [name for name in modules if name.startswith(("bert.encoder.layer.*.output", f"{ATTENTION}."))]
    assert not [name for name in modules if "intermediate" in name or name.startswith("bert.embeddings.")]


def test_a_part_that_was_optimised_before_is_restored_with_the_model():
    model = token_bert()
    expected = gradients_of(model, loss)
    inner = torch.optim.AdamW(model.bert.parameters())
    cputrain.optimize(model.bert, inner)
    cputrain.optimize(model)
    assert "part of an optimised model" in str(cputrain.explain(model.bert))
    assert_close(gradients_of(model, loss), expected)
    cputrain.restore(model)
    assert "_init_group" not in inner.__dict__
    assert not [key for part in model.modules() for key in part.__dict__ if "cputrain" in key or key == "forward"]
    assert "as stock" in str(cputrain.explain(model.bert))


def test_copies_of_parts_are_restored_with_the_model():
    """Somebody makes a model deeper by copies of its layers, or takes its encoder into another."""
    model = cputrain.optimize(token_bert())
    model.bert.encoder.layer.append(copy.deepcopy(model.bert.encoder.layer[1]))
    model.config.num_hidden_layers = 3  # which counts the masks of heads in transformers before 5
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
    implementations = {m.config._attn_implementation for m in ours.bert.modules() if hasattr(m, "config")}
    assert ("sdpa" not in implementations) == releases.BERT_IS_REGISTERED


def test_another_attention_implementation_chosen_later():
    if not releases.BERT_IS_REGISTERED:
        pytest.skip(f"transformers {hf.__version__} chooses BERT's attention when the model is made")
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


def test_the_last_restored_model_gives_freed_memory_back(monkeypatch):
    gc.collect()  # models of other tests
    released = []
    monkeypatch.setattr("cputrain.memory.release", lambda: released.append(1))
    monkeypatch.setattr("cputrain.api._in_libraries", weakref.WeakKeyDictionary())
    first, second = cputrain.optimize(token_bert()), cputrain.optimize(token_bert())
    cputrain.restore(first)
    assert not released
    cputrain.restore(second)
    assert released


def sparse_decoder() -> torch.nn.Module:
    """DeepSeek V3.2, whose attention sees the eight keys that an indexer chooses for each token."""
    config = hf.DeepseekV32Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        index_topk=8, index_head_dim=16, index_n_heads=2, first_k_dense_replace=2, pad_token_id=0,
    )  # fmt: skip
    return hf.DeepseekV32ForCausalLM(config)


@pytest.mark.skipif(not hasattr(hf, "DeepseekV32Config"), reason="this transformers has no DeepSeek V3.2")
def test_code_that_asks_for_the_name_of_its_attention_keeps_stocks():
    stock, ours = pair(sparse_decoder())
    ids = torch.randint(1, 50, (2, 20))
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-5)
    assert "DeepseekV32Attention" in str(cputrain.explain(ours))
