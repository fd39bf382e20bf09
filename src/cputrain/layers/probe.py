"""Asks a module what it computes, so that it is recognised by what it does and not by what it is called.

A candidate is run once, on a few random rows, through its own forward and through the formula that a fused operator
would compute. Dropout layers stand in as a fixed pattern of factors, so that their place in the formula counts too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cputrain.ops.arithmetic import probing


def pattern(x: Tensor) -> Tensor:
    """What stands in for dropout while probing: factors that don't commute with a product."""
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


# What a module raises that wants other inputs than its structure suggests: not what we took it for.
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def quietly(module: nn.Module, training: bool = False) -> Iterator[None]:
    """Within it `module` can be run without a trace: no gradients, users' hooks asleep, random numbers put back."""
    token = probing.set(True)
    before = [(part, part.training, {name: getattr(part, name) for name in _HOOKS}) for part in module.modules()]
    try:
        for part, _, hooks in before:
            part.training = training
            part.__dict__.update({name: OrderedDict() for name in hooks})
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            yield
    finally:
        probing.reset(token)
        for part, mode, hooks in before:
            part.training = mode
            part.__dict__.update(hooks)


def random_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(20240229), dtype=torch.float32, device="cpu")


def agrees(module: nn.Module, stock: Callable[..., object], formula: Callable[..., Tensor], *widths: int) -> bool:
    """Whether `stock` and `formula` give the same for inputs of these last dimensions, on a batch of 2 × 3 rows."""
    with quietly(module):
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.register_forward_hook(lambda dropout, _, y: pattern(y))
        inputs = random_rows(len(widths), 2, 3, max(widths)).unbind()
        inputs = [x[..., :width] for x, width in zip(inputs, widths, strict=True)]
        try:
            ours = formula(*inputs)
            theirs = stock(*inputs)
        except REFUSALS:
            return False
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        return (
            isinstance(theirs, Tensor)
            and theirs.shape == ours.shape
            and torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4)
        )
