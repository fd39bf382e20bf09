"""Every kernel's benchmark runs: ours and its twin, once each, at a small size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kernels


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_every_case_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SIZES", [(24, 16), (24, 32), (33, 32)])
    monkeypatch.setattr(kernels, "MODELS", {"tiny": (1, 32)})
    monkeypatch.setattr(kernels, "TEXT", [12, 5, 1])
    cases = list(kernels.KERNELS[name]())
    assert cases
    for case in cases:
        with torch.set_grad_enabled(True):
            case.ours()
            case.twin()
        assert case.bytes_moved > 0 or case.operations > 0, case.name
