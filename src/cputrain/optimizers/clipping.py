"""`torch.nn.utils.clip_grad_norm_` with one pass for the norm of all gradients and one, if needed, to scale them.

Trainer and Accelerate look the function up in `torch.nn.utils` each time they clip, so that is where it is replaced.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable
from types import GeneratorType

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from cputrain import native
from cputrain.optimizers.tensors import address, is_dense, is_plain, pointers, sizes

_stock = clip_grad.clip_grad_norm_
_HOMES = (torch.nn.utils, clip_grad)
_installed = 0


@functools.wraps(_stock)
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    if isinstance(parameters, GeneratorType):
        parameters = list(parameters) or (_ for _ in ())  # stock warns of an empty generator
    elif not isinstance(parameters, Tensor):
        parameters = list(parameters)
    grads = _grads(parameters) if norm_type == 2 and not torch.compiler.is_compiling() else []
    norm = _norm(grads) if grads else None
    if norm is None or (error_if_nonfinite and not math.isfinite(norm)):
        return _stock(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    total_norm = torch.tensor(norm, dtype=torch.float32)
    # As stock, in float32; a NaN stays one, and a factor of 1 would change nothing.
    factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0).item()
    if factor != 1.0:
        _scale(grads, factor)
    return total_norm


def install() -> None:
    """Put ours in stock's place. Each call needs one `uninstall`: several models may share it."""
    global _installed
    _installed += 1
    for home in _HOMES:
        home.clip_grad_norm_ = clip_grad_norm_


def uninstall() -> None:
    """Undo one `install`; the last puts stock's back, unless other code has put yet another there."""
    global _installed
    _installed = max(_installed - 1, 0)
    for home in _HOMES:
        if not _installed and home.clip_grad_norm_ is clip_grad_norm_:
            home.clip_grad_norm_ = _stock


def _grads(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The gradients, or none at all if one of them isn't for the kernels."""
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel() > 0]
    served = all(is_plain(grad) and is_dense(grad) for grad in grads)
    distinct = len({grad.data_ptr() for grad in grads}) == len(grads) if served else False
    return grads if distinct else []


def _norm(grads: list[Tensor]) -> float:
    result = ctypes.c_double()
    counts = sizes(grads)
    arrays = counts, pointers(grads, counts)
    native.kernels().sum_of_squares(len(grads), *map(address, arrays), ctypes.addressof(result))
    return math.sqrt(result.value)


def _scale(grads: list[Tensor], factor: float) -> None:
    counts = sizes(grads)
    arrays = counts, pointers(grads, counts)
    native.kernels().scale(len(grads), *map(address, arrays), factor)
    torch.autograd.graph.increment_version(grads)
