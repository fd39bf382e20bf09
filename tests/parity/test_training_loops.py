"""`optimize` inside the training loops that people have: accumulation, frozen and tied parameters, autocast, DDP …"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import cputrain
from tests.model_zoo import tiny
from tests.parity.small import FULL, RIGHT, assert_close, bert, gradients_of, ids, pair, span_batch, what_runs


def span_loss(model):
    return model(**span_batch()).loss


def test_gradients_accumulate():
    stock, ours = pair(bert(hf.BertForQuestionAnswering))
    for model in (stock, ours):
        for seed in range(3):
            model(**span_batch(seed=seed)).loss.div(3).backward()
    assert_close(
        {name: p.grad for name, p in ours.named_parameters()}, {name: p.grad for name, p in stock.named_parameters()}
    )


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    stock, ours = pair(bert(hf.BertForQuestionAnswering).eval())
    with context():
        found, expected = ours(**span_batch()), stock(**span_batch())
    assert not found.loss.requires_grad
    torch.testing.assert_close(found.loss, expected.loss)
    assert gradients_of(ours, span_loss)  # and training goes on


def test_eval_has_no_dropout():
    stock, ours = pair(bert(hf.BertForQuestionAnswering, dropout=0.5).eval())
    torch.testing.assert_close(ours(**span_batch()).loss, stock(**span_batch()).loss)


@pytest.mark.parametrize("frozen", ["embeddings", "query", "LayerNorm", "encoder.layer.0", "bias", "qa_outputs"])
def test_frozen_parameters_have_no_gradient(frozen):
    model = bert(hf.BertForQuestionAnswering)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    stock, ours = pair(model)
    assert_close(gradients_of(ours, span_loss), gradients_of(stock, span_loss))


def test_tied_parameters():
    stock, ours = pair(bert(hf.BertForMaskedLM))
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight
    labels = ids(FULL, seed=1)
    loss = lambda model: model(ids(FULL), attention_mask=FULL, labels=labels).loss  # noqa: E731
    assert_close(gradients_of(ours, loss), gradients_of(stock, loss))


def test_several_parameter_groups_train_as_stock():
    stock, ours = pair(bert(hf.BertForQuestionAnswering))
    for model in (stock, ours):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], lr=1e-2
        )
        if model is ours:
            same, returned = cputrain.optimize(model, optimizer)
            assert same is model and returned is optimizer
        for seed in range(3):
            optimizer.zero_grad()
            model(**span_batch(seed=seed)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(ours(**span_batch()).loss, stock(**span_batch()).loss, rtol=1e-3, atol=1e-4)


def test_autocast_keeps_padding_out_of_the_span_loss():
    ours = cputrain.optimize(bert(hf.BertForQuestionAnswering))
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(**span_batch(RIGHT))
    assert out.start_logits.isfinite().all() and out.loss.isfinite()
    torch.testing.assert_close(out.loss.float(), ours(**span_batch(RIGHT)).loss, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_another_dtype_after_optimize_runs_as_stock(dtype):
    stock, ours = pair(bert(hf.BertForQuestionAnswering))
    stock.to(dtype), ours.to(dtype)
    torch.testing.assert_close(ours(**span_batch()).loss, stock(**span_batch()).loss, rtol=1e-2, atol=1e-2)
    span_loss(ours).backward()
    assert str(dtype).removeprefix("torch.") in what_runs(ours, "bert.encoder.layer.*.attention.self")


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 1e-5), ("int16", 5e-3), ("bf16", 5e-2)])
def test_default_dtype_is_of_no_concern(dtype, most):
    stock, ours = pair(bert(hf.BertForQuestionAnswering), dtype=dtype)
    torch.set_default_dtype(torch.float64)
    try:
        again = cputrain.optimize(copy.deepcopy(stock), dtype=dtype)
        found = [gradients_of(model, span_loss) for model in (ours, again)]
    finally:
        torch.set_default_dtype(torch.float32)
    for grads in found:
        assert_close(grads, gradients_of(stock, span_loss), most)
    assert "one product" in what_runs(again, "bert.encoder.layer.*.attention.self")


def test_int32_ids_as_stock():
    stock, ours = pair(bert())
    given = ids(FULL).int()
    torch.testing.assert_close(
        ours(given, attention_mask=FULL).last_hidden_state, stock(given, attention_mask=FULL).last_hidden_state
    )


def test_ids_outside_the_vocabulary_are_an_error():
    ours = cputrain.optimize(bert())
    before = ours(ids(FULL)).last_hidden_state
    with pytest.raises(IndexError):
        ours(torch.full((1, 3), 10**6))
    assert torch.equal(ours(ids(FULL)).last_hidden_state, before)  # and leave nothing behind


def test_differentiating_twice_is_an_error_and_not_a_wrong_result():
    ours = cputrain.optimize(bert(hf.BertForQuestionAnswering))
    inside = ours.bert.encoder.layer[0].output.dense.weight
    (grad,) = torch.autograd.grad(span_loss(ours), [inside], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_ddp_gives_the_same_gradients(tmp_path):
    stock, ours = pair(bert(hf.BertForQuestionAnswering))
    expected = gradients_of(stock, span_loss)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(ours, find_unused_parameters=True)
        found = gradients_of(wrapped, span_loss)
        outside = cputrain.optimize(nn.parallel.DistributedDataParallel(copy.deepcopy(stock)))
        found_outside = gradients_of(outside, span_loss)
    finally:
        torch.distributed.destroy_process_group()
    for grads in (found, found_outside):
        assert_close({name.removeprefix("module."): g for name, g in grads.items()}, expected)


def test_data_hooks_on_parameters_fire():
    model = cputrain.optimize(bert(hf.BertForQuestionAnswering))
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.append(n))
    span_loss(model).backward()
    assert sorted(seen) == sorted(name for name, p in model.named_parameters() if p.grad is not None)


def test_gradients_are_dense_and_dont_overlap():
    model = cputrain.optimize(bert(hf.BertForQuestionAnswering))
    span_loss(model).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.layout is torch.strided and grad.is_contiguous() for grad in grads)
    for number, grad in enumerate(grads):
        grad.fill_(number)
    assert all((grad == number).all() for number, grad in enumerate(grads))


@pytest.mark.parametrize("name", ["bert", "gpt2", "mlp"])
def test_compiled_models_step_aside_with_a_reason(name):
    model, batch = tiny(name, padding="none")
    stock, ours = pair(model)
    expected = gradients_of(stock, lambda m: m(**batch).loss)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=name == "bert")
    compiled(**batch).loss.backward()
    assert_close({n: p.grad for n, p in ours.named_parameters()}, expected)
    assert "torch.compile" in str(cputrain.explain(ours))
    torch.compiler.reset()


def test_compiled_with_padding():
    model = bert(hf.BertForTokenClassification)
    stock, ours = pair(model)
    torch.compiler.reset()
    found = torch.compile(ours, backend="eager")(ids(RIGHT), attention_mask=RIGHT).logits
    expected = stock(ids(RIGHT), attention_mask=RIGHT).logits
    torch.testing.assert_close(found[RIGHT == 1], expected[RIGHT == 1], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_function_transforms_step_aside():
    stock, ours = pair(bert(hf.BertForQuestionAnswering))
    parameters = {name: p.detach() for name, p in ours.named_parameters()}

    def loss(model):
        return lambda given: torch.func.functional_call(model, given, (), span_batch()).loss

    plain = loss(ours)(parameters)
    torch.testing.assert_close(plain, loss(stock)(parameters))
    found, expected = torch.func.grad(loss(ours))(parameters), torch.func.grad(loss(stock))(parameters)
    assert_close(found, expected)
    assert "torch.func" in what_runs(ours, "bert.encoder.layer.*.attention.self")


def test_vmap_over_an_ensemble():
    model, batch = tiny("mlp")
    stock, ours = pair(model)
    states = [
        {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in m.named_parameters()} for m in (stock, ours)
    ]
    found, expected = (
        torch.func.vmap(lambda state, m=m: torch.func.functional_call(m, state, (), batch).loss)(state)
        for m, state in zip((ours, stock), reversed(states), strict=True)
    )
    torch.testing.assert_close(found, expected)


def test_tracing_steps_aside():
    """A trace would keep our results as constants."""
    model, batch = tiny("mlp")
    stock, ours = pair(model.layers.eval())
    traced = torch.jit.trace(ours, batch["inputs"])
    other = torch.randn_like(batch["inputs"])
    torch.testing.assert_close(traced(other), stock(other))


def test_dispatch_modes_see_every_operator():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for model in pair(bert(hf.BertForQuestionAnswering)):
        with FlopCounterMode(display=False) as counter:
            span_loss(model)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_forward_mode_differentiation():
    model, batch = tiny("mlp")
    stock, ours = pair(model.layers)
    tangent = torch.randn_like(batch["inputs"])
    found, expected = (torch.func.jvp(m, (batch["inputs"],), (tangent,))[1] for m in (ours, stock))
    torch.testing.assert_close(found, expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(batch["inputs"], tangent)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent, expected)
