"""The loss of a vocabulary head without its logits: losses and every gradient, against stock in float64."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_as_accurate
from torch.nn import functional as F

from cputrain.formats import FORMATS
from cputrain.ops import cross_entropy as ce
from cputrain.ops.cross_entropy import Capping, Loss
from cputrain.ops.token_losses import token_losses

# Tokens, features, vocabulary: one, odd, more than a vector, several chunks.
SIZES = [(1, 1, 2), (3, 5, 2), (5, 17, 33), (130, 24, 1001), (7, 8, 16), (64, 33, 515)]
LOSSES = [
    Loss(),
    Loss(smoothing=0.1),
    Loss(Capping(0.5)),
    Loss(Capping(1 / 30, 30.0, True)),
    Loss(Capping(1 / 5, 5.0, True), 0.2),
]
NAMES = ["loss", "grad_x", "grad_w", "grad_bias"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 64 tokens, or two of 130 would be one."""
    monkeypatch.setattr(ce, "CHUNK_BYTES", 1)


def _operands(tokens, features, vocabulary, bias=True):
    x, w = 2 * torch.randn(tokens, features), torch.randn(vocabulary, features) / features**0.5 * 3
    labels = torch.randint(vocabulary, (tokens,))
    return x, w, torch.randn(vocabulary) if bias else None, labels


def _run(function, operands, dtype, grad=None):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in operands[:3]]
    out = function(*leaves, operands[3])
    out.backward(None if grad is None else grad.to(dtype))
    return [out.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def _compare(ours, twin, operands, grad=None):
    assert_as_accurate(
        _run(ours, operands, torch.float32, grad),
        _run(twin, operands, torch.float32, grad),
        _run(twin, operands, torch.float64, grad),
        NAMES,
        floor=1e-6,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_summed_loss(isa, size, loss, bias):
    operands = _operands(*size, bias)
    _compare(
        lambda *a: ce.summed_loss(*a, 3.0, loss),
        lambda *a: ce.plain(*a, loss).sum() / 3,
        operands,
    )


@pytest.mark.parametrize("format", ["int16", "bf16_saved", "bf16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_other_formats(isa, format, loss):
    """Within bf16's error of the exact gradients, and int16 within a quarter of it."""
    operands = _operands(150, 96, 1000)
    found = _run(lambda *a: ce.summed_loss(*a, 150.0, loss, FORMATS[format]()), operands, torch.float32)
    exact = _run(lambda *a: ce.plain(*a, loss).mean(), operands, torch.float64)
    limit = 1e-3 if format == "int16" else 2e-2
    for ours, truth, name in zip(found, exact, NAMES, strict=True):
        assert ((ours - truth).norm() / truth.norm()).item() < limit, name


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1), (2,)])
@pytest.mark.parametrize("format", ["fp32", "int16"])
def test_frozen_operands_get_no_gradient(frozen, format):
    operands = _operands(130, 24, 1001)
    leaves = [t.clone().requires_grad_(i not in frozen) for i, t in enumerate(operands[:3])]
    twins = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    ce.summed_loss(*leaves, operands[3], 1.0, Loss(), FORMATS[format]()).backward()
    ce.plain(*twins, operands[3]).sum().backward()
    for leaf, twin in zip(leaves, twins, strict=True):
        assert (leaf.grad is None) == (twin.grad is None)
        if twin.grad is not None:
            assert ((leaf.grad - twin.grad).norm() / twin.grad.norm()).item() < 1e-3


def test_same_bits_with_any_number_of_threads(isa, threads):
    operands = _operands(150, 96, 1000)

    def everything():
        return _run(lambda *a: ce.summed_loss(*a, 7.0, LOSSES[4], FORMATS["int16"]()), operands, torch.float32)

    ours = everything()
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(ours, everything(), strict=True))


def test_a_second_backward_gives_the_same_again():
    x, w, bias, labels = _operands(130, 24, 1001)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    loss = ce.summed_loss(*leaves, labels, 5.0)
    first = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    second = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    third = torch.autograd.grad(loss, leaves)
    for a, b, c in zip(first, second, third, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, 3 * c)


def test_extreme_logits_are_stocks(isa):
    """Infinities and NaN among the logits, and differences that overflow an exponential."""
    rows = torch.randn(6, 19)
    rows[0, 3], rows[1, 4], rows[2, 5], rows[3] = float("nan"), float("-inf"), 1e30, rows[3] * 1e4
    rows[4] = -1e4 - torch.arange(19)
    labels = torch.tensor([3, 4, 5, 0, 18, 2])
    grads = torch.ones(6)

    def run(function):
        z = rows.clone()
        losses = torch.empty(6)
        function(z, losses)
        return losses, z

    ours = run(lambda z, losses: ce._losses_of_logits(z, labels, Loss(), ce.PerToken(losses, grads=grads)))
    z = rows.double().requires_grad_()
    losses = F.cross_entropy(z, labels, reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(ours[0], losses.detach().float(), equal_nan=True)
    torch.testing.assert_close(ours[1], z.grad.float(), equal_nan=True, atol=1e-6, rtol=1e-5)


def test_labels_outside_the_vocabulary_are_refused_as_stock_does():
    x, w, bias, labels = _operands(5, 4, 10)
    for wrong in (10, -1):
        labels[2] = wrong
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            ce.summed_loss(x, w, bias, labels)
    with pytest.raises(ValueError, match="labels must be 5 of int64"):
        ce.summed_loss(x, w, bias, labels.float())


def test_only_a_chunk_of_logits_exists(monkeypatch):
    """The largest tensor of 600 tokens × 1001 would be 2.4 MB; chunks of 64 are 256 KB."""
    sizes = []
    found = ce._losses_of_logits
    monkeypatch.setattr(ce, "_losses_of_logits", lambda z, *rest: (sizes.append(z.numel()), found(z, *rest)))
    ce.summed_loss(*_operands(600, 8, 1001))
    assert sum(sizes) == 600 * 1001 and max(sizes) <= 64 * 1001


@pytest.mark.parametrize("loss", [ce.summed_loss, token_losses])
def test_evaluation_computes_no_gradients(monkeypatch, loss):
    operands = _operands(70, 8, 101)
    for leaf in operands[:3]:
        leaf.requires_grad_()
    trained = loss(*operands)
    monkeypatch.setattr(ce._Gradients, "add", lambda *args: pytest.fail("a gradient was computed"))
    with torch.no_grad():
        torch.testing.assert_close(loss(*operands), trained.detach(), rtol=0, atol=0)
    loss(*(None if t is None else t.detach() for t in operands))
