"""Dropout: the mask of the plain twin, its statistics, and reproducibility."""

from __future__ import annotations

import pytest
import torch

from cputrain.ops import dropout as module
from cputrain.ops.dropout import draw_key, dropout, factors


@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (3, 65), (2, 5, 384), (0, 8), (64, 257), (33,)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.0, 1.0])
def test_equals_plain_twin(isa, threads, shape, p, monkeypatch):
    monkeypatch.setattr(module, "draw_key", lambda: 0x9ABCDEF012345678)
    x = torch.randn(shape, requires_grad=True)
    y = dropout(x, p)
    expected = module.plain(x.detach().double(), p, 0x9ABCDEF012345678)
    torch.testing.assert_close(y.detach().double(), expected, rtol=1e-6, atol=0)
    grad = torch.randn(shape)
    y.backward(grad)
    torch.testing.assert_close(x.grad.double(), module.plain(grad.double(), p, 0x9ABCDEF012345678), rtol=1e-6, atol=0)


def test_non_contiguous(isa):
    x = torch.randn(65, 33).t().requires_grad_()
    torch.manual_seed(1)
    y = dropout(x, 0.3)
    torch.manual_seed(1)
    assert torch.equal(y, dropout(x.detach().contiguous(), 0.3))


def test_same_mask_for_every_isa_and_thread_count(isa, threads):
    torch.manual_seed(3)
    y = dropout(torch.ones(200, 333), 0.25)
    torch.manual_seed(3)
    key = draw_key()
    assert torch.equal(y.double() != 0, factors(key, 0.25, 200, 333) != 0)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_rate_and_independence(p):
    dropped = torch.stack([(dropout(torch.ones(512, 1024), p) == 0).double() for _ in range(4)])
    n = dropped[0].numel()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean().item() - p) < 5 * sigma / (4 * n) ** 0.5 + 1 / 65536
    centred = (dropped - p) / sigma
    # Neighbours, the pairs that share a hash (16 apart), rows, and successive calls must not be correlated.
    for a, b in [
        (centred[:, :, 1:], centred[:, :, :-1]),
        (centred[:, :, 16:], centred[:, :, :-16]),
        (centred[:, :, 32:], centred[:, :, :-32]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
    ]:
        assert abs((a * b).mean().item()) < 5 / a.numel() ** 0.5
    # Row and column totals spread as a binomial's.
    for totals, size in ((dropped.sum(2), 1024), (dropped.sum(1), 512)):
        assert abs(totals.var().item() / (size * p * (1 - p)) - 1) < 0.15


def test_key_follows_the_generator():
    torch.manual_seed(7)
    first = draw_key()
    state = torch.get_rng_state()
    second = draw_key()
    torch.set_rng_state(state)
    assert draw_key() == second != first
    with torch.random.fork_rng():
        draw_key()
    third = draw_key()
    torch.set_rng_state(state)
    draw_key()
    assert draw_key() == third


def test_profiler_with_shapes():
    """It wants every argument of an operator as a signed 64-bit number: half of all 64-bit keys were not."""
    with torch.profiler.profile(record_shapes=True):
        for _ in range(20):
            dropout(torch.ones(2, 3), 0.5)
