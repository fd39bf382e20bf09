"""Each token's loss, entropy and likeliest choice without logits: values and every gradient, against float64."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_as_accurate
from torch import Tensor

from cputrain.formats import FORMATS
from cputrain.ops import cross_entropy as ce
from cputrain.ops import token_losses as tl
from cputrain.ops.cross_entropy import Capping, Loss

SIZES = [(1, 3, 5), (130, 24, 301), (7, 8, 16)]
LOSSES = [Loss(), Loss(smoothing=0.1), Loss(Capping(0.5)), Loss(Capping(1 / 5, 5.0, True), 0.2)]
NAMES = ["loss", "entropy", "log squares", "mean logit", "grad_x", "grad_w", "grad_bias"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(ce, "CHUNK_BYTES", 1)  # 64 tokens


def _operands(tokens, features, vocabulary):
    x, w = 2 * torch.randn(tokens, features), torch.randn(vocabulary, features) / features**0.5 * 3
    return x, w, torch.randn(vocabulary), torch.randint(vocabulary, (tokens,))


def _run(function, operands, dtype, shares, of_entropy=None, frozen=()):
    leaves = [t.detach().to(dtype).requires_grad_(i not in frozen) for i, t in enumerate(operands[:3])]
    found = function(*leaves, operands[3])
    total = (found.losses * shares.to(dtype)).sum()
    if of_entropy is not None:
        total = total + (found.entropy * of_entropy.to(dtype)).sum()
    total.backward()
    assert not any(one.requires_grad for one in found[2:])
    return [*(one.detach() for one in found[:4]), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def _compare(operands, loss, *rest):
    def twin(*a):
        return tl.plain(*a, loss)

    ours = _run(lambda *a: tl.described_tokens(*a, loss, alike=True), operands, torch.float32, *rest)
    assert_as_accurate(
        ours, _run(twin, operands, torch.float32, *rest), _run(twin, operands, torch.float64, *rest), NAMES, floor=1e-6
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_entropies(isa, size, loss):
    operands, tokens = _operands(*size), size[0]
    _compare(operands, loss, torch.full((tokens,), -0.3))  # all count alike, as the first forward guesses
    _compare(operands, loss, torch.randn(tokens))
    _compare(operands, loss, torch.randn(tokens), torch.randn(tokens))
    _compare(operands, loss, torch.zeros(tokens), torch.randn(tokens))


@pytest.mark.parametrize("frozen", [(1, 2), (0,), (2,)])
def test_frozen_operands(frozen):
    operands = _operands(130, 24, 1001)
    for entropies in (None, torch.randn(130)):
        rest = torch.randn(130), entropies, frozen
        ours = _run(tl.described_tokens, operands, torch.float32, *rest)
        exact = _run(tl.plain, operands, torch.float64, *rest)
        for one, truth in zip(ours, exact, strict=True):
            torch.testing.assert_close(one, truth.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["int16", "bf16_saved", "bf16"])
def test_other_formats(isa, format):
    operands, shares = _operands(150, 96, 1000), torch.rand(150)
    for of_entropy in (None, torch.randn(150)):
        found = _run(
            lambda *a: tl.described_tokens(*a, format=FORMATS[format]()), operands, torch.float32, shares, of_entropy
        )
        exact = _run(tl.plain, operands, torch.float64, shares, of_entropy)
        limit = 1e-3 if format == "int16" else 2e-2
        for ours, truth, name in zip(found, exact, NAMES, strict=True):
            assert ((ours - truth).norm() / truth.norm()).item() < limit, name


def test_the_likeliest_choice_is_the_first_of_several():
    x, w = torch.ones(4, 1), torch.tensor([[1.0], [3.0], [3.0], [2.0]])
    found = tl.described_tokens(x, w, None, torch.tensor([0, 1, 2, 3]))
    assert found.is_top.tolist() == [False, True, False, False]


class _Counted:
    """Leaves of one head, and how many chunks of logits its training has computed."""

    def __init__(self, monkeypatch, frozen: bool) -> None:
        self.chunks = 0
        self.leaves = [t.requires_grad_(i == 0 or not frozen) for i, t in enumerate(_operands(60, 8, 101)[:3])]
        found = ce._losses_of_logits
        monkeypatch.setattr(ce, "_losses_of_logits", lambda *a: (setattr(self, "chunks", self.chunks + 1), found(*a)))

    def train(self, shares: Tensor, alike: bool = True) -> int:
        before = self.chunks
        (tl.token_losses(*self.leaves, torch.arange(60), alike=alike) * shares).sum().backward()
        return self.chunks - before


def test_nothing_is_computed_twice_that_a_frozen_head_or_an_equal_share_spares(monkeypatch):
    equal, unequal = torch.full((60,), 0.1), torch.rand(60)
    frozen, trained = _Counted(monkeypatch, True), _Counted(monkeypatch, False)
    assert [frozen.train(unequal), frozen.train(equal), frozen.train(unequal, alike=False)] == [1, 1, 1]
    assert trained.train(equal, alike=False) == 2  # so that a training that is resumed rounds as if it had gone on
    # The first time that tokens count differently is found out in the backward; from then on it is known.
    assert [trained.train(equal), trained.train(unequal), trained.train(unequal)] == [1, 2, 2]


def test_a_second_backward_gives_the_same_again():
    leaves = [t.requires_grad_() for t in _operands(130, 24, 1001)[:3]]
    losses = tl.token_losses(*leaves, torch.arange(130))
    found = [torch.autograd.grad(losses.sum() * 3, leaves, retain_graph=True) for _ in range(2)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens_at_all(format):
    leaves = [t.requires_grad_() for t in _operands(0, 8, 101)[:3]]
    found = tl.described_tokens(*leaves, torch.empty(0, dtype=torch.int64), format=FORMATS[format]())
    (found.losses.sum() + found.entropy.sum()).backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_wrong_labels_are_refused_as_stock_does():
    x, w, bias, labels = _operands(5, 4, 10)
    with pytest.raises(ValueError, match="labels must be 5 of int64"):
        tl.token_losses(x, w, bias, labels.float())
    labels[3] = 10
    with pytest.raises(IndexError, match="Target 10 is out of bounds"):
        tl.described_tokens(x, w, bias, labels)
