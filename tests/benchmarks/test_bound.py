"""What a step takes at the least: every kernel has a minimum of work, and every recorded product can be replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bound
import kernel_work

from cputrain import native
from cputrain.formats import FORMATS
from cputrain.ops.linear import linear


def test_every_kernel_has_a_minimum_of_work() -> None:
    elsewhere = {"attention_forward", "attention_backward", "int16_product"}
    assert set(native.SIGNATURES) == {*kernel_work.MOVED, *elsewhere, *kernel_work.IGNORED}


@pytest.mark.parametrize("dtype", ["fp32", "int16"])
def test_recorded_products_are_replayed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "ROUNDS", 1)
    monkeypatch.setattr(bound, "PEAK_SIZE", 16)
    x, weight, bias = torch.randn(40, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(48)

    format = FORMATS[dtype]()

    def step(number: int) -> dict[str, float]:
        linear(x, weight, bias, format).sum().backward()
        return {"seconds": 1.0}

    step(0)  # whose products the guard of int16 multiplies once more

    with bound.recording() as calls:
        step(0)
    shapes = [work.product for work, _ in calls if work.group == "products"]
    assert len(shapes) == 3
    if dtype == "int16":
        assert sorted((p.rows, p.cols, p.depth) for p in shapes) == [(40, 48, 64), (40, 64, 48), (48, 64, 40)]
        assert [p.bias for p in shapes] == [True, False, False]
    found = bound.share_of_bound(step, [0])
    assert 0 < found["share_of_bound"] < 1
    assert found["products_share"] > 0
