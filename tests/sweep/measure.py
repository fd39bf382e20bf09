"""Outputs and gradients of a model, and how far two of them are apart."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.sweep.inputs import Inputs

LARGE = 1e6  # values beyond it are fillings of masked places, not numbers


@dataclass
class Result:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # transformers draw from it


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from tensors_in(part, f"{name}[{number}]")


def weighed(outputs: dict[str, Tensor], inputs: Inputs, seed: int) -> Tensor:
    """A loss: every output at its real positions times random factors, each output of the same weight."""
    total = torch.zeros(())
    for number, (_, value) in enumerate(sorted(outputs.items())):
        if not value.is_floating_point() or not value.requires_grad:
            continue
        factors = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed + number)).to(value.dtype)
        real = inputs.real_positions(value.shape)
        counts = value.detach().isfinite() & (value.detach().abs() < LARGE)
        counts = counts if real is None else counts & real
        total = total + (torch.where(counts, value, 0) * factors).sum() / max(1, value.numel()) ** 0.5
    return total


def run(model: nn.Module, inputs: Inputs, *, training: bool, seed: int, draws: int | None = None) -> Result:
    """`draws` seeds what the model itself draws, if that isn't `seed`."""
    model.train(training)
    for module in model.modules():  # of three values a batch's statistics are chaos
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    model.zero_grad(set_to_none=True)
    seed_everything(seed if draws is None else draws)
    arguments = copy.deepcopy(inputs.arguments)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    arguments = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    outputs = dict(tensors_in(model(**arguments)))
    loss = weighed(outputs, inputs, seed)
    if loss.requires_grad:
        loss.backward()
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    return Result({name: value.detach().clone() for name, value in outputs.items()}, gradients)


@dataclass
class Difference:
    where: str
    error: float  # relative to the size of what is compared
    text: str


def differences(ours: Result, stock: Result, inputs: Inputs, *, all_positions: bool, norm: bool) -> list[Difference]:
    """All pairs, the worst first. `norm` measures by the norm of a tensor, else by its largest element."""
    found = list(_of_outputs(ours.outputs, stock.outputs, inputs, all_positions, norm))
    found += _of_gradients(ours.gradients, stock.gradients, norm)
    return sorted(found, key=lambda difference: -difference.error)


def _of_outputs(
    ours: dict[str, Tensor], stock: dict[str, Tensor], inputs: Inputs, all_positions: bool, norm: bool
) -> Iterator[Difference]:
    if ours.keys() != stock.keys():
        lost, added = sorted(stock.keys() - ours.keys()), sorted(ours.keys() - stock.keys())
        yield Difference("outputs", np.inf, f"ours lacks {lost}, and has {added} that stock lacks")
        return
    for name, theirs in stock.items():
        mine = ours[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found = f"{mine.dtype} {tuple(mine.shape)}, stock's {theirs.dtype} {tuple(theirs.shape)}"
            yield Difference(f"output {name}", np.inf, found)
            continue
        real = None if all_positions else inputs.real_positions(theirs.shape)
        if real is not None:
            mine, theirs = (torch.where(real, x, torch.zeros((), dtype=x.dtype)) for x in (mine, theirs))
        yield _difference(f"output {name}", mine, theirs, 0.0, norm)


def _of_gradients(ours: dict[str, Tensor | None], stock: dict[str, Tensor | None], norm: bool) -> list[Difference]:
    """Gradients that are tiny beside the others (zero in exact arithmetic) count by the others' size."""
    if ours.keys() != stock.keys():
        return [Difference("parameters", np.inf, "other parameter names than stock's")]
    sizes = [_size(g, norm) for g in stock.values() if g is not None and g.numel()]
    least = 1e-2 * float(np.median(sizes)) if sizes else 0.0
    found = []
    for name, theirs in stock.items():
        mine = ours[name]
        if mine is None or theirs is None:
            if (mine is None) != (theirs is None):
                who = "ours is None, stock's not" if mine is None else "stock's is None, ours not"
                found.append(Difference(f"gradient of {name}", np.inf, who))
        else:
            found.append(_difference(f"gradient of {name}", mine, theirs, least, norm))
    return found


def _size(x: Tensor, norm: bool) -> float:
    if x.numel() == 0:
        return 0.0
    x = x.double() if not x.is_complex() else torch.view_as_real(x).double()
    return float(x.norm() if norm else x.abs().max())


def _difference(where: str, mine: Tensor, theirs: Tensor, least: float, norm: bool) -> Difference:
    if not theirs.is_floating_point() and not theirs.is_complex():
        unequal = float((mine != theirs).double().mean()) if mine.numel() else 0.0
        return Difference(where, unequal, f"{unequal:.1%} of the elements differ")
    if mine.layout is not torch.strided:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    finite = theirs.isfinite() & (theirs.abs() < LARGE)
    if not torch.equal(mine.isfinite() & (mine.abs() < LARGE), finite):
        return Difference(where, np.inf, "finite at other places than stock's")
    mine, theirs = (torch.where(finite, x, torch.zeros((), dtype=x.dtype)) for x in (mine, theirs))
    size = max(_size(theirs, norm), least, 1e-12)
    error = _size(mine.double() - theirs.double(), norm) / size
    return Difference(where, error, f"off by {error:.2g} of its size {size:.2g}")
