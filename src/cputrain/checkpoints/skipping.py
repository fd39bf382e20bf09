"""A data loader that goes on within an epoch: its sampler passes over what was read, and no sample is loaded for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset


def batches(loader: Any, skip: int) -> Iterator[Any]:
    """Of one pass, without the first `skip`. An iterable data set has to read what it skips."""
    real = _real(loader)
    if not skip:
        return iter(loader)
    if not isinstance(real, DataLoader) or isinstance(real.dataset, IterableDataset):
        return itertools.islice(iter(loader), skip, None)
    name = "batch_sampler" if real.batch_sampler is not None else "sampler"
    stock = getattr(real, name)
    real.__dict__[name] = _Skipping(stock, skip)
    return _with_sampler(loader, real, name, stock)


def _with_sampler(loader: Any, real: DataLoader, name: str, stock: Any) -> Iterator[Any]:
    """The sampler is asked for when the first batch is."""
    found = iter(loader)
    try:
        first = list(itertools.islice(found, 1))
    finally:
        real.__dict__[name] = stock
    yield from first
    yield from found


class _Skipping:
    """Of one pass: workers that stay for the next one (persistent_workers) keep it, and then it skips nothing."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler, self._skip = sampler, skip

    def __iter__(self) -> Iterator[Any]:
        """Torch asks for an iterator twice, and uses one: that one skips."""
        skip, self._skip = self._skip, 0
        after = getattr(self._sampler, "after", None)
        yield from after(skip) if after is not None else itertools.islice(self._sampler, skip, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def generators(loader: Any) -> list[Generator]:
    """That the loader and its samplers draw from, each once."""
    real = _real(loader)
    inner = getattr(getattr(real, "batch_sampler", None), "sampler", None)
    holders = (real, getattr(real, "sampler", None), inner)
    found = [getattr(holder, "generator", None) for holder in holders] + [
        getattr(loader, "synchronized_generator", None)
    ]
    return list({id(one): one for one in found if isinstance(one, Generator)}.values())


def _real(loader: Any) -> Any:
    """torch's, which accelerate's loaders have inside."""
    return loader.__dict__.get("base_dataloader", loader) if hasattr(loader, "__dict__") else loader
