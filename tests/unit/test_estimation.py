"""What `estimate` expects is near what happens, and asking leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cputrain
from cputrain import estimation

ROOT = Path(__file__).parents[2]


class Wide(nn.Module):
    """Each token leaves 16 rows of 4,096 numbers for the backward: 256 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4096)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.table(input_ids)
        for _ in range(16):
            x = x.sin()
        return SimpleNamespace(loss=self.dropout(x).mean() + labels.sum() * 0.0)


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % 100
    return {"input_ids": ids, "labels": ids}


TRY = """
import torch, cputrain
from cputrain import estimation, process_memory
from tests.unit.test_estimation import Wide, batch

model = Wide()
optimizer = torch.optim.AdamW(model.parameters())
start, whole = process_memory.peak(), batch({rows}, {length})
found = cputrain.estimate(model, whole, optimizer)
assert found.fits and found.tokens_per_second > 0
model(**whole).loss.backward()
optimizer.step()
print(found.peak - start, process_memory.peak() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of memory is read from /proc")
@pytest.mark.parametrize(("rows", "length"), [(4, 512), (1, 2048)])
def test_the_peak_of_a_larger_batch_is_foretold(rows: int, length: int) -> None:
    code = TRY.format(rows=rows, length=length)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    expected, real = map(int, answer.stdout.split())
    assert real > 2048 * (256 << 10)
    assert 0.7 * real < expected < 1.4 * real


def test_it_leaves_nothing_behind() -> None:
    model = Wide().eval()
    model.table.weight.grad = before = torch.ones_like(model.table.weight)
    state = torch.get_rng_state()
    cputrain.estimate(model, batch(2, 8), torch.optim.SGD(model.parameters(), lr=1.0))
    model.forward = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        cputrain.estimate(model, batch(2, 8))
    assert model.table.weight.grad is before and bool((before == 1).all())
    assert torch.equal(torch.get_rng_state(), state) and not model.training


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.SGD(p, lr=1.0), 0),
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), 1),
    ],
)
def test_moments_are_counted_until_they_exist(make, copies: int) -> None:
    weights = [nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(50), requires_grad=False)]
    optimizer = make(weights)
    assert estimation._state_to_come(optimizer) == copies * 1200
    weights[0].sum().backward()
    optimizer.step()
    assert copies == 0 or estimation._state_to_come(optimizer) == 0


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 5, 300, 5000])
def test_two_parts_of_a_batch_are_tried(rows: int, length: int) -> None:
    whole = batch(rows, length) | {"use_cache": False}
    small, large = estimation._sizes(rows, length)
    parts = [estimation._part(whole, *size)["input_ids"] for size in (small, large)]
    assert [tuple(part.shape) for part in parts] == [small, large]
    assert 2 * parts[0].numel() <= parts[1].numel() + length or parts[1].numel() == 1
    assert parts[1].numel() <= max(512, 1) and torch.equal(parts[1], whole["input_ids"][: large[0], -large[1] :])


def test_a_batch_without_labels_is_refused() -> None:
    for wrong in ({"input_ids": torch.ones(2, 3)}, {}, batch(1, 3) | {"input_ids": torch.ones(3)}):
        with pytest.raises(ValueError, match=r"with labels and with input_ids of rows × tokens, found"):
            cputrain.estimate(Wide(), wrong)


def test_a_line_says_whether_it_fits() -> None:
    text = "expected: 1,234 tokens a second, at most 5.0 GB of memory with batches of 2 × 512 tokens, which"
    assert str(estimation.Estimate(2, 512, 1234.5, 5 * 10**9, 6 * 10**9)).startswith(f"{text} fits into the 6.0 GB")
    too_much = estimation.Estimate(2, 512, 1234.5, 5 * 10**9, 4 * 10**9)
    assert not too_much.fits and str(too_much).startswith(f"{text} does not fit into the 4.0 GB")
