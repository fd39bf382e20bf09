"""Logits that nothing reads are never computed; what reads them finds stock's, connected to autograd."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cputrain.blocks.lazy_logits import LazyLogits, Source
from cputrain.formats import FP32

VOCABULARY = 33


class Head:
    """Hidden states, weight and bias, with logits of both kinds."""

    def __init__(self, bias: bool = True, real: Tensor | None = None) -> None:
        torch.manual_seed(1)
        self.x, self.w = torch.randn(2, 5, 8), torch.randn(VOCABULARY, 8)
        self.leaves = [self.x, self.w, *([torch.randn(VOCABULARY)] if bias else [])]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.bias = self.leaves[2] if bias else None
        self.computed = 0
        self.real = real

    def _compute(self) -> Tensor:
        self.computed += 1
        return self.stock()

    def lazy(self) -> LazyLogits:
        return LazyLogits.of(Source(self.x * 1.0, self.w, self.bias, self.real, FP32), self._compute)

    def stock(self) -> Tensor:
        z = F.linear(self.x * 1.0, self.w, self.bias)
        return z if self.real is None else z * self.real.unsqueeze(-1)

    def grads(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves, retain_graph=True))

    def same(self, function, lazily: bool) -> None:
        """`function` gives the same of both, gradients included; whether it computes the logits."""
        lazy = self.lazy()
        ours, stock = function(lazy), function(self.stock())
        assert type(ours) is Tensor
        torch.testing.assert_close(ours, stock)
        assert (self.computed == 0) == lazily
        for a, b in zip(self.grads(ours.sum()), self.grads(stock.sum()), strict=True):
            torch.testing.assert_close(a, b)


LABELS = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))
SOME = LABELS.masked_fill(torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0]]) == 1, -100)
ON_THE_WAY = {
    "as they are": lambda z: z,
    "float": lambda z: z.float().contiguous().to(torch.float32).to("cpu"),
    "cap": lambda z: torch.tanh(z / 3.0) * 3.0,
    "scale": lambda z: (2 * z) / 3,
    "clone": lambda z: z.clone(),
    "a bias of all tokens": lambda z: z + torch.arange(VOCABULARY).float().unsqueeze(0) / 7,
}


def loss_of(z: Tensor, labels: Tensor = SOME, **options) -> Tensor:
    return F.cross_entropy(z.view(-1, VOCABULARY), labels.reshape(-1), **options)


@pytest.mark.parametrize("way", ON_THE_WAY)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("labels", [LABELS, SOME], ids=["all", "some"])
def test_the_loss_takes_no_logits(way, reduction, labels):
    Head().same(lambda z: loss_of(ON_THE_WAY[way](z), labels, reduction=reduction), lazily=True)


def test_rows_are_chosen_without_logits():
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]) == 1
    for choose in (
        lambda z: (z[..., :-1, :].contiguous(), LABELS[..., 1:]),
        lambda z: (z[:, 1:].reshape(-1, VOCABULARY), LABELS[:, 1:]),
        lambda z: (z[mask], LABELS[mask]),
        lambda z: (z.reshape(-1, VOCABULARY)[torch.tensor([3, 1, 3])], LABELS.view(-1)[[3, 1, 3]]),
        lambda z: (z[0, None, ..., :], LABELS[0, None]),
    ):
        Head().same(lambda z, choose=choose: loss_of(*choose(z)), lazily=True)


def test_options_of_the_loss():
    Head().same(lambda z: loss_of(z, label_smoothing=0.2), lazily=True)
    Head().same(lambda z: loss_of(z, LABELS, ignore_index=int(LABELS[0, 0])), lazily=True)
    Head().same(lambda z: loss_of(z, weight=torch.arange(VOCABULARY) / 9), lazily=False)
    Head().same(lambda z: F.cross_entropy(z.transpose(1, 2), LABELS), lazily=False)
    Head().same(lambda z: F.cross_entropy(z.view(-1, VOCABULARY), torch.eye(VOCABULARY)[:10]), lazily=False)


READ = {
    "sum": lambda z: z.sum(),
    "softmax": lambda z: z.softmax(-1),
    "a column": lambda z: z[..., 3],
    "columns": lambda z: z[:, :, 2:5],
    "columns by a mask": lambda z: z[..., torch.arange(VOCABULARY) % 2 == 0],
    "gather": lambda z: z.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)),
    "another order": lambda z: z.transpose(1, 2).reshape(2, -1),
    "two": lambda z: z * z,
    "in place": lambda z: z.mul_(2).add_(1),
    "einsum": lambda z: torch.einsum("btv,btv->bt", z, z),
    "stack": lambda z: torch.stack([z, z]),
    "half and back": lambda z: z.to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("read", READ)
def test_all_else_gets_the_values(read):
    Head().same(READ[read], lazily=False)


def test_questions_compute_nothing():
    head = Head()
    z = head.lazy()
    assert isinstance(z, Tensor) and z.requires_grad and not z.is_leaf and z.grad_fn is not None
    assert (z.shape, z.size(-1), z.dim(), z.numel(), len(z)) == ((2, 5, VOCABULARY), VOCABULARY, 3, 330, 2)
    assert z.dtype == torch.float32 and z.device.type == "cpu" and z.is_floating_point() and not z.is_cuda
    z.view(-1, VOCABULARY).detach().clone()
    assert head.computed == 0


def test_values_are_computed_once_and_connected_wherever_they_were_read_first():
    head = Head()
    z = head.lazy()
    with torch.no_grad():
        assert torch.equal(z.argmax(-1), head.stock().argmax(-1))
    for a, b in zip(head.grads(z.exp().sum()), head.grads(head.stock().exp().sum()), strict=True):
        torch.testing.assert_close(a, b)
    assert head.computed == 1
    rows = head.lazy().view(-1, VOCABULARY)
    with torch.no_grad():
        rows.argmax(-1)
    for a, b in zip(head.grads(rows.exp().sum()), head.grads(head.stock().exp().sum()), strict=True):
        torch.testing.assert_close(a, b)
    with torch.inference_mode():
        z = head.lazy()
        assert torch.equal(z.argmax(-1), head.stock().argmax(-1))


def test_code_in_c_that_reads_first_takes_no_gradients_away():
    """It gets values without a graph; a later use must not get these."""
    head = Head()
    logits = head.lazy()
    with torch._C.DisableTorchFunctionSubclass():
        doubled = torch.mul(logits, 2.0)
    torch.testing.assert_close(doubled, 2 * head.stock())
    expected = torch.autograd.grad(head.stock().square().sum() + 2 * head.stock().sum(), head.leaves)
    found = torch.autograd.grad(logits.square().sum() + doubled.sum(), head.leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_views_share_memory():
    z = Head().lazy()
    rows, copied = z.view(-1, VOCABULARY), z.clone()
    z[0, 0, 0] = 5.0
    z.view(-1)[1] = 6.0
    assert rows[0, 0] == 5 and rows[0, 1] == 6 and copied[0, 0, 0] != 5
    loss = F.cross_entropy(rows, LABELS.view(-1))
    torch.testing.assert_close(loss, F.cross_entropy(z.view(-1, VOCABULARY).clone(), LABELS.view(-1)))


def test_copies_are_plain_tensors():
    head = Head()
    z = head.lazy().detach()
    for copied in (
        copy.deepcopy(z),
        pickle.loads(pickle.dumps(z)),  # noqa: S301
        torch.from_numpy(np.asarray(z)),
        torch.tensor(z.tolist()),
    ):
        assert type(copied) is Tensor
        torch.testing.assert_close(copied, head.stock().detach())
    assert repr(z).startswith("tensor(") and z.detach().requires_grad is False


def test_gradient_of_the_logits_themselves():
    head = Head()
    seen = []
    z = head.lazy()
    z.retain_grad()
    z.register_hook(lambda grad: seen.append(grad.shape))
    loss_of(z).backward()
    stock = head.stock()
    stock.retain_grad()
    loss_of(stock).backward()
    torch.testing.assert_close(z.grad, stock.grad)
    assert seen == [(2, 5, VOCABULARY)]


class _Sink(torch.autograd.Function):
    """As DDP puts one behind every output of a model."""

    passed = 0

    @staticmethod
    def forward(ctx, *outputs):
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx, *grads):
        _Sink.passed += 1
        return grads


def test_a_node_that_other_code_puts_behind_is_passed():
    head = Head()
    (z,) = _Sink.apply(head.lazy())
    before = _Sink.passed
    grads = head.grads(loss_of(z))
    assert _Sink.passed == before + 1
    for a, b in zip(grads, head.grads(loss_of(head.stock())), strict=True):
        torch.testing.assert_close(a, b)


def test_logits_without_gradients():
    head = Head()
    with torch.no_grad():
        z = head.lazy()
        torch.testing.assert_close(loss_of(z), loss_of(head.stock()))
        assert head.computed == 0 and not z.requires_grad
    assert not (z + 0).requires_grad
    np.testing.assert_allclose(z.numpy(), head.stock().detach(), rtol=1e-5)


@pytest.mark.parametrize("read", [loss_of, lambda z: z + 0, lambda z: loss_of(z, reduction="none").sum()])
def test_autocast_around_the_loss_alone_changes_nothing(read):
    """The logits were made outside it: stock's are fp32, and cross-entropy is fp32 under autocast."""
    head, other = Head(), Head()
    lazy = head.lazy()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = read(lazy)
    stock = read(other.stock())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, stock)
    for a, b in zip(head.grads(ours.sum()), other.grads(stock.sum()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bias", [True, False])
def test_padded_positions_have_logits_of_0(bias):
    real = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]) == 1
    with torch.no_grad():
        x = torch.randn(2, 5, 8) * real.unsqueeze(-1)
    head = Head(bias, real)
    head.x = x.requires_grad_()
    head.leaves[0] = head.x
    head.same(lambda z: loss_of(z, LABELS.masked_fill(~real, -100)), lazily=True)
    for reduction in ("mean", "sum", "none"):  # labels at padded positions, too
        head.same(lambda z, reduction=reduction: loss_of(z, LABELS, reduction=reduction), lazily=True)
    head.same(lambda z: z.exp(), lazily=False)


def test_weights_that_have_changed_are_noticed():
    head = Head()
    z = head.lazy()
    loss_of(z)
    with torch.no_grad():
        head.w += 1
    for read in (loss_of, torch.sum):
        with pytest.raises(RuntimeError, match=r"Read them before optimizer.step\(\), or set CPUTRAIN_LOGITS=computed"):
            read(z)


def test_nothing_but_ignored_labels_is_stocks():
    nothing = torch.full((2, 5), -100)
    assert loss_of(Head().lazy(), nothing).isnan()
    assert loss_of(Head().lazy(), nothing, reduction="sum") == 0


def test_a_label_outside_the_vocabulary_is_stocks_error():
    wrong = LABELS.clone()
    wrong[0, 1] = VOCABULARY
    with pytest.raises(IndexError, match=f"Target {VOCABULARY} is out of bounds"):
        loss_of(Head().lazy(), wrong)


def test_a_detached_leaf_gets_its_gradient():
    head = Head()
    z, stock = head.lazy().detach(), head.stock().detach()
    for leaf in (z, stock):
        assert not leaf.requires_grad
        leaf.requires_grad = True
        assert leaf.requires_grad and leaf.is_leaf
        loss_of(leaf).backward()
    torch.testing.assert_close(z.grad, stock.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_loss(reentrant):
    head = Head()
    for z in (head.lazy(), head.stock()):
        for leaf in head.leaves:
            leaf.grad = None
        checkpoint(loss_of, z, use_reentrant=reentrant).backward()
        if isinstance(z, LazyLogits):
            ours = [leaf.grad for leaf in head.leaves]
    for a, leaf in zip(ours, head.leaves, strict=True):
        torch.testing.assert_close(a, leaf.grad)
