"""Dropout whose mask is a function of a key and the element's place: nothing is stored for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.native.operands import address, require, rows_and_cols
from cputrain.ops.gradient import fp32_backward


def draw_key() -> int:
    """63 random bits from torch's default CPU generator: `manual_seed`, `fork_rng`, checkpointing reproduce them.

    Not 64: torch's profiler stops at an operator's argument that is no signed 64-bit number.
    """
    return int(torch.empty((), dtype=torch.int64).random_().item())


def dropout(x: Tensor, p: float) -> Tensor:
    """`torch.nn.functional.dropout(x, p)` in training; rows are those of the last dimension."""
    require("dropout", x.shape, x=x)
    return _Dropout.apply(x, p, draw_key())


def plain(x: Tensor, p: float, key: int) -> Tensor:
    """The same in PyTorch: what `dropout` computes once its key is drawn."""
    rows = x.numel() // max(x.shape[-1], 1)
    return x * factors(key, p, rows, x.shape[-1]).to(x.dtype).view(x.shape)


def factors(key: int, p: float, rows: int, cols: int) -> Tensor:
    """What each element is multiplied by, 0 or 1 / (1 - p), as float64; csrc/kernels/random.h says why it is so."""
    low, high = _row_keys(key, rows)
    column = torch.arange(cols)
    x = (column // 32 * 16 + column % 16 + low) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ high
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    number = torch.where(column % 32 < 16, x & 0xFFFF, x >> 16)
    threshold = round(p * 65536)
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return torch.where(number < threshold, 0.0, scale).double()


def _row_keys(key: int, rows: int) -> tuple[Tensor, Tensor]:
    """splitmix64 of the key and each row number, as two columns of 32 bits."""
    mixed = []
    for row in range(rows):
        z = (key + (row + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
        mixed.append((z & 0xFFFFFFFF, z >> 32))
    pairs = torch.tensor(mixed, dtype=torch.int64).view(-1, 2)
    return pairs[:, :1], pairs[:, 1:]


def _run(x: Tensor, p: float, key: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, cols = rows_and_cols(x)
    where = address("dropout: x", x, rows * cols), address("dropout: y", y, rows * cols)
    native.kernels().dropout(*where, rows, cols, p, key)
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float, key: int) -> Tensor:
        ctx.p, ctx.key = p, key
        return _run(x, p, key)

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _run(grad, ctx.p, ctx.key), None, None
