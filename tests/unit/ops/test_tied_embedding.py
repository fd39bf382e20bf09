"""An embedding and a vocabulary head of one table: one gradient, however the table is used beside."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from cputrain.ops import embeddings, shared_table
from cputrain.ops import tied_embedding as module
from cputrain.ops.cross_entropy import summed_loss
from cputrain.ops.tied_embedding import tied_embedding

IDS, LABELS = torch.tensor([[3, 1, 3], [0, 2, 9]]), torch.tensor([1, 3, 9, 2, 0, 5])


def ours(table, mix):
    x = tied_embedding(table, IDS, 2).tanh() @ mix
    return summed_loss(x.view(-1, 8), table, None, LABELS, 6.0)


def stock(table, mix):
    x = F.embedding(IDS, table, 2).tanh() @ mix
    return F.cross_entropy(F.linear(x.view(-1, 8), table), LABELS)


@pytest.fixture
def dense(monkeypatch) -> list[tuple]:
    """The shapes of gradients that embeddings made of their own."""
    made = []
    compute = embeddings.embedding_grad

    def watched(grad, ids, rows, padding_id, add_to=None):
        made.extend([(rows, grad.shape[-1])] if add_to is None else [])
        return compute(grad, ids, rows, padding_id, add_to)

    for place in (module, embeddings):
        monkeypatch.setattr(place, "embedding_grad", watched)
    return made


def leaves():
    torch.manual_seed(0)
    return torch.randn(11, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def grads(function, scale=1.0):
    table, mix = leaves()
    (function(table, mix) * scale).backward()
    return table.grad, mix.grad


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_one_gradient(isa, scale, dense):
    assert_same(grads(ours, scale), grads(stock, scale))
    assert not dense


def test_the_gradient_is_handed_on_without_a_copy(monkeypatch):
    offered = []
    offer = shared_table.SharedTable.offer
    monkeypatch.setattr(shared_table.SharedTable, "offer", lambda t, g: (offered.append(g.data_ptr()), offer(t, g))[1])
    table, mix = leaves()
    ours(table, mix).backward()
    assert table.grad.data_ptr() == offered[0]


FOREIGN = {
    "decay": lambda loss: lambda table, mix: loss(table, mix) + table.pow(2).sum(),
    "decay first": lambda loss: lambda table, mix: table.pow(2).sum() + loss(table, mix),
    "two losses": lambda loss: lambda table, mix: loss(table, mix) + 2 * loss(table, mix),
    "a product": lambda loss: lambda table, mix: loss(table, mix) * (table @ mix).sum(),
    "the head alone": lambda loss: lambda table, mix: loss(table.detach() * 1.0 + 0 * table, mix),
}


@pytest.mark.parametrize("use", FOREIGN.values(), ids=FOREIGN)
def test_other_uses_of_the_table(use):
    assert_same(grads(use(ours)), grads(use(stock)))


def test_the_embedding_alone_and_the_head_alone(dense):
    for function, twin in (
        (lambda t, m: (tied_embedding(t, IDS) @ m).sum(), lambda t, m: (F.embedding(IDS, t) @ m).sum()),
        (
            lambda t, m: summed_loss(m[:6], t, None, LABELS),
            lambda t, m: 6 * F.cross_entropy(F.linear(m[:6], t), LABELS),
        ),
    ):
        assert_same(grads(function), grads(twin))
    assert dense == [(11, 8)]


def test_two_embeddings_and_a_head(dense):
    def two(embed, loss):
        def function(table, mix):
            return loss(table, (embed(table, IDS).mean((0, 1)) + mix + embed(table, IDS + 1)[0, 0]).tanh())

        return function

    assert_same(grads(two(tied_embedding, ours)), grads(two(lambda t, i: F.embedding(i, t), stock)))
    assert not dense


def test_accumulation_and_retained_graphs():
    for function in (ours, stock):
        table, mix = leaves()
        loss = function(table, mix)
        loss.backward(retain_graph=True)
        loss.backward()
        function(table, mix).backward()
        found = table.grad, mix.grad
        if function is ours:
            first = found
    assert_same(first, found)


def test_hooks_see_one_gradient():
    seen = {}
    for function in (ours, stock):
        table, mix = leaves()
        calls: list[torch.Tensor] = []
        table.register_hook(lambda grad, calls=calls: calls.append(grad.clone()))
        function(table, mix).backward()
        (seen[function],) = calls
    torch.testing.assert_close(seen[ours], seen[stock])


def test_only_what_was_asked_for():
    for wanted in ((0,), (1,), (0, 1)):
        found = [
            torch.autograd.grad(function(*given), [given[i] for i in wanted])
            for function in (ours, stock)
            for given in [leaves()]
        ]
        assert_same(*found)


def test_a_backward_that_never_reaches_the_embedding():
    table, mix = leaves()
    x = tied_embedding(table, IDS).detach()
    loss = summed_loss((x @ mix).view(-1, 8), table, None, LABELS)
    loss.backward()
    first = table.grad.clone()
    table.grad = None
    summed_loss((F.embedding(IDS, table).detach() @ mix).view(-1, 8), table, None, LABELS).backward()
    torch.testing.assert_close(first, table.grad)


def test_nothing_is_kept_of_a_graph_that_is_gone():
    table, mix = leaves()
    ours(table, mix).backward()
    gc.collect()
    assert not shared_table._tables[table].waiting and shared_table._tables[table]._offered is None
    with pytest.raises(IndexError):
        tied_embedding(table, IDS + 10)


def test_an_embedding_with_a_norm_adds_to_the_heads_gradient_too(dense):
    """As BERT's: three tables, the first of which is the head's."""
    torch.manual_seed(1)
    position, kind = torch.randn(3, 8), torch.randn(2, 8)

    def run(embed, loss):
        table, mix = leaves()
        weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
        ids = IDS.flatten(), torch.tensor([0, 1, 1, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
        x = embed(*ids, table, position, kind, weight, bias, 1e-5) @ mix
        loss(x, table).backward()
        return table.grad, mix.grad, weight.grad, bias.grad

    ours = run(
        lambda *given: embeddings.embed(*given, 0.0, (2, None, None)),
        lambda x, table: summed_loss(x, table, None, LABELS, 6.0),
    )
    twin = run(
        lambda *given: embeddings.plain(*given, (2, None, None)),
        lambda x, table: F.cross_entropy(F.linear(x, table), LABELS),
    )
    assert_same(ours, twin)
    assert (11, 8) not in dense
