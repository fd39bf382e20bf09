"""Runs an operator and its twin, in float32 and float64, on the same inputs, and compares results and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.accuracy import assert_as_accurate


def _run(function: Callable[..., Tensor], inputs: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def assert_equals_twin(ours: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor | None]) -> None:
    grad = torch.randn(twin(*inputs).shape)
    names = ["output", *(f"gradient {i}" for i in range(len(inputs)))]
    exact = _run(twin, [None if x is None else x.double() for x in inputs], grad)
    assert_as_accurate(_run(ours, inputs, grad), _run(twin, inputs, grad), exact, names, floor=5e-7)
