"""Raw outputs kept as 16-bit integers: read again within half a step of each block's scale, whatever is in it."""

from __future__ import annotations

import pytest
import torch

from cputrain.formats import FORMATS
from cputrain.formats.int16_saving import as_float, rounded
from cputrain.ops.gated_feed_forward import gated_feed_forward, plain


def largest_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """For each value, the largest of the 64 of its block."""
    rows, cols = x.shape
    wide = torch.nn.functional.pad(x, (0, -cols % 64)).view(rows, (cols + 63) // 64, 64).abs()
    return wide.amax(-1, keepdim=True).expand_as(wide).flatten(1)[:, :cols]


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 64), (5, 65), (300, 200), (0, 8), (4, 130)])
def test_each_value_is_within_half_a_step(isa, threads, shape):
    x = torch.randn(shape) * torch.logspace(-8, 8, max(shape[0], 1))[: shape[0], None]
    read = as_float(rounded(x), shape[1], "test")
    assert ((read - x).abs() <= largest_of_blocks(x) * (0.505 / 32767)).all()


def test_half_the_memory(isa):
    x = torch.randn(64, 1536)
    assert rounded(x).nbytes < 0.52 * x.nbytes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_isnt_finite_spoils_its_block_and_no_other(isa, value):
    x = torch.randn(2, 192)
    x[1, 70] = value
    read = as_float(rounded(x), 192, "test")
    assert read[1, 64:128].isnan().all()
    read[1, 64:128] = x[1, 64:128] = 0
    torch.testing.assert_close(read, x, rtol=0, atol=1e-3)


def test_zeros_and_tiny_values(isa):
    x = torch.zeros(1, 128)
    x[0, 64:] = 1e-38
    assert (as_float(rounded(x), 128, "test") == 0).all()


def test_what_was_kept_in_floats_is_returned_as_it_is():
    x = torch.randn(3, 5)
    assert as_float(x, 5, "test") is x


def test_two_layers_keep_each_their_own(isa):
    """Both compute in the same workspace: the second's forward must not be what the first's backward reads."""
    torch.manual_seed(0)
    x = torch.randn(96, 64, requires_grad=True)
    weights = [torch.randn(shape) * 0.1 for shape in 2 * [(128, 64), (128, 64), (64, 128)]]
    weights = [weight.requires_grad_() for weight in weights]

    def run(layer, kind) -> torch.Tensor:
        first = layer(x, weights[0], None, weights[1], None, weights[2], None, *kind)
        return layer(first, weights[3], None, weights[4], None, weights[5], None, *kind)

    exact = torch.autograd.grad(run(plain, ("silu",)).sin().sum(), [x, *weights])
    ours = torch.autograd.grad(run(gated_feed_forward, ("silu", FORMATS["int16"]())).sin().sum(), [x, *weights])
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()
