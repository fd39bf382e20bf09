"""The sweep finds what it is for: each kind of mistake is put into cputrain on purpose, and must be reported."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

import cputrain
from cputrain.blocks import leaves
from tests.sweep import cases, choices, dropouts, restoring, shrink
from tests.sweep.cases import Case, check
from tests.sweep.runner import Worker

VIT = {"model": "vit", "kind": "ViTModel"}


@pytest.fixture(autouse=True)
def as_in_a_worker(monkeypatch):
    """One thread, and no layer too small for our kernels."""
    for name in ("WORTHWHILE", "WORTHWHILE_PRODUCT", "FEWEST_FEATURES"):
        monkeypatch.setattr(leaves, name, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def put_wrong(monkeypatch, name: str, wrong) -> None:
    """`wrong` gets our function's result; the patched module forward calls it instead."""
    stock = getattr(leaves, name)
    monkeypatch.setattr(leaves, name, lambda *args: wrong(stock(*args)))


def test_nothing_is_reported_without_a_mistake():
    for what in ("results", "dropout", "restore"):
        assert check(Case(**VIT, side="none", what=what)).kind == "same"


def test_a_result_that_is_off_by_a_thousandth(monkeypatch):
    put_wrong(monkeypatch, "layer_norm", lambda y: y * 1.001)
    verdict = check(Case(**VIT, side="none"))
    assert verdict.kind == "wrong" and "in training" in verdict.text


def test_a_result_that_is_off_by_a_tenth_in_int16(monkeypatch):
    put_wrong(monkeypatch, "layer_norm", lambda y: y * 1.1)
    assert check(Case(**VIT, side="none", dtype="int16")).kind == "wrong"


def test_a_gradient_that_is_lost(monkeypatch):
    put_wrong(monkeypatch, "layer_norm", torch.Tensor.detach)
    verdict = check(Case(**VIT, side="none"))
    assert verdict.kind == "wrong" and "gradient" in verdict.text


def test_a_wrong_result_in_evaluation_only(monkeypatch):
    def wrong(self, stock, input):
        return stock(input) * (1.0 if self.training else 1.01)

    monkeypatch.setattr(leaves, "layer_norm_forward", wrong)
    verdict = check(Case(**VIT, side="none"))
    assert verdict.kind == "wrong" and "in evaluation" in verdict.text


@pytest.mark.parametrize("make", [lambda x, p: x, lambda x, p: nn.functional.dropout(x, p / 2)])
def test_a_dropout_that_is_lost_or_has_another_rate(monkeypatch, make):
    monkeypatch.setattr(leaves, "dropout", make)
    verdict = check(Case(**VIT, side="none", what="dropout"))
    assert verdict.kind == "wrong" and "lost" in verdict.text


def test_a_dropout_of_another_size(monkeypatch):
    stock = leaves.dropout
    monkeypatch.setattr(leaves, "dropout", lambda x, p: torch.cat([stock(x[:1], p), x[1:]]))
    assert check(Case(**VIT, side="none", what="dropout")).kind == "wrong"


def test_an_exception_of_ours(monkeypatch):
    def fail(*args):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(leaves, "layer_norm", fail)
    verdict = check(Case(**VIT, side="none"))
    assert verdict.kind == "crash" and "broken on purpose" in verdict.text


@pytest.mark.parametrize("change", ["attribute", "mode", "buffer", "random"])
def test_a_change_that_restore_leaves(monkeypatch, change):
    def restore(model: nn.Module) -> None:
        part = list(model.modules())[3]
        if change == "attribute":
            part.left_behind = 1
        elif change == "mode":
            part.training = not part.training
        elif change == "buffer":
            part.register_buffer("left_behind", torch.zeros(1), persistent=False)

    def optimize(model: nn.Module, **settings) -> None:
        if change == "random":
            torch.rand(1)

    monkeypatch.setattr(cputrain, "restore", restore)
    monkeypatch.setattr(cputrain, "optimize", optimize)
    assert check(Case(**VIT, side="none", what="restore")).kind == "wrong"


def test_a_replayed_choice_hides_no_other_error():
    scores = torch.tensor([[1.0, 1.0001, 0.0]])
    with choices.Record() as chosen:
        torch.topk(scores, 1)
    other = torch.tensor([[2.0, 1.0, 0.0]])
    with choices.Replay(chosen.made):
        values, indices = torch.topk(other, 1)
    assert indices.tolist() == [[1]] and values.tolist() == [[1.0]]


def test_a_wrong_result_in_a_model_that_chooses_experts(monkeypatch):
    stock = leaves.bias_activation
    monkeypatch.setattr(leaves, "bias_activation", lambda *args: stock(*args) * 1.1)
    case = Case("qwen2_moe", "Qwen2MoeModel", padding="keep", side="none")
    assert check(case).kind == "wrong"


def test_every_key_belongs_to_an_operator_that_is_known():
    from cputrain.ops import dropout

    with dropouts.our_drops() as ours, dropouts.counted_keys() as keys:
        dropout.dropout(torch.ones(4, 8), 0.25)
        dropout.draw_key()
    assert ours == {("dropout", 0.25, 32): 1} and keys == [2]


def test_a_process_that_dies_is_named():
    worker = Worker()
    try:
        worker.start()
        worker.process.send_signal(signal.SIGSEGV)
        record = worker.ask(Case(**VIT))
    finally:
        worker.close()
    assert record["verdict"] == "crash" and "SIGSEGV" in record["text"]


def test_no_parameter_of_a_randomised_model_is_constant():
    model = cases.build(Case("dinov2", "Dinov2Model"))
    assert all(p.numel() == 1 or p.float().std() > 0 for p in model.parameters())


def test_square_and_other_feed_forwards():
    square, other = shrink.shrunken("bert", shrink.SMALL.square()), shrink.shrunken("bert")
    assert square.intermediate_size == square.hidden_size == other.hidden_size != other.intermediate_size


def test_state_knows_every_tensor():
    layer = nn.Linear(2, 2)
    before = restoring.state_of(layer)
    with torch.no_grad():
        layer.bias[0] += 1
    assert restoring.changes(before, restoring.state_of(layer)) == ["|_parameters[bias] has changed"]
