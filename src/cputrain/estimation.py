"""What a training will need, told before it starts: tokens a second, peak memory, and whether that fits.

A short batch goes forward and backward, then a longer one, and the process's peak memory grows: so much for each token.
What an optimizer will allocate at its first step is counted. Nothing stays: no gradient, no random number is used up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cputrain import memory, process_memory

# Tokens of the longer batch: enough for products to be as fast as in a whole one.
_MOST_TOKENS = 512
# Adam reads weight, gradient and both moments, and writes three of them; scaling a gradient is one read and one write.
_OPTIMIZER_PASSES = 3.5


@dataclass(frozen=True)
class Estimate:
    rows: int
    length: int
    tokens_per_second: float
    peak: int  # bytes, as the kernel counts what is resident
    usable: int  # bytes

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    def __str__(self) -> str:
        expected = (
            f"expected: {self.tokens_per_second:,.0f} tokens a second, at most {self.peak / 1e9:.1f} GB of memory with "
            f"batches of {self.rows} × {self.length} tokens"
        )
        if self.fits:
            return f"{expected}, which fits into the {self.usable / 1e9:.1f} GB that this process can have."
        return (
            f"{expected}, which does not fit into the {self.usable / 1e9:.1f} GB that this process can have: take "
            "shorter or smaller batches, gradient checkpointing, LoRA, or a model in bf16 or 4 bits."
        )


def estimate(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: Any = None,
    *,
    accumulated: int = 1,
) -> Estimate:
    """What training this language model needs; call it when model and optimizer are ready, before the first step.

    >>> model, optimizer = cputrain.optimize(model, optimizer)
    >>> print(cputrain.estimate(model, batch, optimizer))

    `batch` is what the model is called with, the largest that will come, without padding if possible; `accumulated` is
    the number of batches for each step of the optimizer.
    """
    rows, length = _shape(batch)
    small, large = _sizes(rows, length)
    with _undone(model):
        memory.give_back()  # loading may have needed more than training will
        process_memory.forget_peak()
        _train_on(model, _part(batch, *small))
        low = process_memory.peak()
        _train_on(model, _part(batch, *large))
        high = process_memory.peak()
        began = time.perf_counter()
        _train_on(model, _part(batch, *large))
        seconds = time.perf_counter() - began
        update = 0.0 if optimizer is None else _OPTIMIZER_PASSES * _seconds_of_a_pass(model)
    tokens, known, fewer = rows * length, large[0] * large[1], small[0] * small[1]
    per_token = (high - low) / (known - fewer) if known > fewer else 0.0
    usable = process_memory.resident() + process_memory.available()
    state = 0 if optimizer is None else _state_to_come(optimizer)
    whole = seconds * tokens / known + update / accumulated
    return Estimate(rows, length, tokens / whole, int(high + per_token * (tokens - known)) + state, usable)


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or "labels" not in batch:
        raise ValueError(
            "estimate needs a batch of a language model, with labels and with input_ids of rows × tokens, "
            f"found {', '.join(batch) or 'nothing'}."
        )
    return ids.shape[0], ids.shape[1]


def _sizes(rows: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and tokens of two batches of which one is twice as large, if there is enough for that."""
    length = min(length, _MOST_TOKENS)
    rows = min(rows, max(_MOST_TOKENS // length, 1))
    return ((rows // 2, length) if rows > 1 else (1, max(length // 2, 1))), (rows, length)


def _part(batch: Mapping[str, Any], rows: int, length: int) -> dict[str, Any]:
    """The last tokens of the first rows: in chats, the answers stand at the end."""
    whole = batch["input_ids"].shape
    return {
        name: value[:rows, -length:] if isinstance(value, Tensor) and value.shape == whole else value
        for name, value in batch.items()
    }


def _train_on(model: nn.Module, batch: dict[str, Any]) -> None:
    # Not `loss.backward()`, at which a record of the run counts tokens.
    torch.autograd.backward(model(**batch).loss)


@contextmanager
def _undone(model: nn.Module):
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    training = model.training
    with torch.random.fork_rng(devices=[]):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield model.train()
        finally:
            model.train(training)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _seconds_of_a_pass(model: nn.Module) -> float:
    """Over all gradients, reading and writing."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    began = time.perf_counter()
    for gradient in gradients:
        gradient.mul_(1.0)
    return time.perf_counter() - began


def _state_to_come(optimizer: Any) -> int:
    """Bytes of the moments that the first step will allocate: two for each number, or SGD's momentum."""
    return sum(
        _moments(group) * _bytes(p for p in group["params"] if not optimizer.state.get(p))
        for group in optimizer.param_groups
    )


def _moments(group: Mapping[str, Any]) -> int:
    return int(group["momentum"] != 0) if "momentum" in group and "betas" not in group else 2


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
