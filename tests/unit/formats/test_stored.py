"""Weights as they are stored: a product with one is the product with its floats, over all layouts, in every format."""

from __future__ import annotations

import pytest
import torch

from cputrain.formats import FORMATS, Dense, Packed, Weight, stored
from cputrain.formats.stored import Nested

SHAPES = [(96, 128), (33, 77), (1, 31), (140, 1030)]


def four_bits(rows: int, cols: int, block: int, nested: bool) -> tuple[Weight, torch.Tensor]:
    """A random 4-bit weight, and the matrix that it stands for, in float64."""
    count = rows * cols
    numbers = torch.randint(16, (count + count % 2,), dtype=torch.uint8)
    code, blocks = torch.randn(16), -(-count // block)
    scales, more = torch.rand(blocks), None
    exact = scales.double()
    if nested:
        more = Nested(torch.randn(256), torch.rand(-(-blocks // 5)), 5, 0.5)
        scales = torch.randint(256, (blocks,), dtype=torch.uint8)
        exact = more.code.double()[scales.int()] * more.scales.double().repeat_interleave(5)[:blocks] + 0.5
    values = code.double()[numbers.int()][:count] * exact.repeat_interleave(block)[:count]
    packed = numbers[::2] << 4 | numbers[1::2]
    return Packed(stored.four_bits(packed, (rows, cols), code, scales, block, more)), values.view(rows, cols)


def eight_bits(rows: int, cols: int) -> tuple[Weight, torch.Tensor]:
    numbers, scales = torch.randint(-127, 128, (rows, cols), dtype=torch.int8), torch.rand(rows) / 127
    return Packed(stored.eight_bits(numbers, scales)), numbers.double() * scales.double()[:, None]


def half(rows: int, cols: int, dtype: torch.dtype) -> tuple[Weight, torch.Tensor]:
    w = torch.randn(rows, cols).to(dtype)
    return Dense(w), w.double()


KINDS = {
    "bf16": lambda *shape: half(*shape, torch.bfloat16),
    "fp16": lambda *shape: half(*shape, torch.float16),
    "8 bits": eight_bits,
    **{f"4 bits {b} {n}": lambda *shape, b=b, n=n: four_bits(*shape, b, n) for b in (32, 64, 4096) for n in (0, 1)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", ["fp32", "int16", "bf16_saved"])
def test_product_is_that_of_its_floats(isa, format, shape, kind):
    weight, exact = KINDS[kind](*shape)
    torch.testing.assert_close(weight.dense().double(), exact, rtol=1e-6, atol=1e-6)
    dense = Dense(weight.dense().clone())
    x, dy, bias = torch.randn(50, shape[1]), torch.randn(50, shape[0]), torch.randn(shape[0])
    plus = torch.randn(50, 5), torch.randn(shape[0], 5)
    found, expected = [], []
    for side, of_side in ((weight, found), (dense, expected)):
        call = FORMATS[format]().start()
        of_side += [call.forward(x, side, bias, save=False, plus=plus)[0].clone()]
        of_side += [call.output_grad(dy, weight=False).input(side)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["fp32", "int16", "bf16", "bf16_saved"])
def test_what_is_added_is_added(format):
    x, w, plus = torch.randn(40, 96), torch.randn(70, 96), (torch.randn(40, 9), torch.randn(70, 9))
    exact = x.double() @ w.double().t() + plus[0].double() @ plus[1].double().t()
    found = FORMATS[format]().start().forward(x, Dense(w), None, save=False, plus=plus)[0]
    assert ((found - exact).norm() / exact.norm()).item() < {"fp32": 1e-6, "int16": 3e-4}.get(format, 1e-2)


def test_a_part_of_the_rows(isa):
    weight, exact = four_bits(40, 77, 64, True)
    part = weight.panels().part(slice(13, 29)).part(slice(2, 9))
    torch.testing.assert_close(part.unpacked().double(), exact[15:22], rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused():
    weight, _ = four_bits(40, 77, 64, True)
    matrix = weight.panels()
    for wrong in (
        {"values": matrix.values[:-1]},
        {"scales": matrix.scales[:-1]},
        {"code": matrix.code[:15]},
        {"values": matrix.values.short()},
        {"first_row": 1},
    ):
        with pytest.raises(ValueError, match=r"weight"):
            stored.replace(matrix, **wrong).unpacked()
