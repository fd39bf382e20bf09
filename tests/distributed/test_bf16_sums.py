"""bf16 is reduced by words of two numbers: as torch would in fp32, rounded once, for every special value."""

from __future__ import annotations

import ctypes

import pytest
import torch

from cputrain import native
from cputrain.distributed import native_calls

SUM, MEAN, PRODUCT, MIN, MAX = range(5)
STEPS = {SUM: torch.add, MEAN: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum}


def inputs(count: int, ranks: int) -> list[torch.Tensor]:
    """Of all magnitudes, a fifth of them infinite or NaN, signalling ones and ones with every bit set among them."""
    specials = torch.tensor([0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF], dtype=torch.int32).to(torch.int16)
    tensors = []
    for _ in range(ranks):
        x = (torch.randn(count) * torch.randn(count).mul(20).exp()).bfloat16()
        places = torch.randint(count, (count // 5,)) if count else []
        x.view(torch.int16)[places] = specials[torch.randint(5, (len(places),))]
        tensors.append(x)
    return tensors


@pytest.mark.parametrize("reduction", list(STEPS))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_reductions_of_bf16(isa, ranks, reduction):
    for count in (0, 1, 2, 7, 63, 65, 4097, 5001):
        tensors, out, known = inputs(count, ranks), torch.empty(count, dtype=torch.bfloat16), ctypes.c_int64()
        addresses = (ctypes.c_void_p * ranks)(*(x.data_ptr() for x in tensors))
        dtype = native_calls.dtype_number(torch.bfloat16, reduction)
        where = out.data_ptr(), ctypes.addressof(addresses)
        native.kernels().ccl_reduce(dtype, reduction, *where, ranks, count, ranks, ctypes.addressof(known))
        expected = tensors[0].float()
        for x in tensors[1:]:
            expected = STEPS[reduction](expected, x.float())
        expected = (expected / ranks if reduction == MEAN else expected).bfloat16()
        assert known.value
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(0), expected.nan_to_num(0))
