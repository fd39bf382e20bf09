"""Deals the samples of a global batch to the ranks by length, so that no rank waits for another's longer samples.

Every rank gets as many samples as before. The ranks' mean of means is then the same mean over the same samples, and so
are the gradients, however samples were dealt. No rank loads more than before, and nothing is sent: each computes the
same deal.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SkipBatchSampler, get_sampler
from accelerate.state import PartialState
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

from cputrain.integrations import settings
from cputrain.log import mention_once

# The lengths of the samples with these indices.
Lengths = Callable[[Sequence[int]], list[int]]

_TOKENS = ("attention_mask", "input_ids")
_LABELS = ("label", "labels", "label_ids", "start_positions", "end_positions", "next_sentence_label")


class NotKnown(ValueError):
    """Why lengths aren't known, or why they don't help."""


def lengths_of(dataset: Any) -> Lengths:
    """From a column of a `datasets.Dataset`, from samples in a list, or from the data set's own `lengths`."""
    own: Any = getattr(dataset, "lengths", None)
    if hasattr(own, "__getitem__") and len(own) == len(dataset):
        return lambda indices: [int(own[index]) for index in indices]
    if isinstance(dataset, Subset):
        inner = lengths_of(dataset.dataset)
        return lambda indices: inner([dataset.indices[index] for index in indices])
    column = _column(dataset)
    if _is_table(dataset):
        rows = dataset.select_columns([column]).with_format(None)
        return lambda indices: [_tokens(row, column) for row in rows[list(indices)][column]]
    return lambda indices: [_tokens(dataset[index][column], column) for index in indices]


def has_a_label_each(dataset: Any) -> bool:
    """Whether every label is one value for the whole sample: the loss is then a mean over samples."""
    if isinstance(dataset, Subset):
        return has_a_label_each(dataset.dataset)
    if _is_table(dataset):
        labels = [kind for name, kind in dataset.features.items() if name in _LABELS]
        return bool(labels) and all(type(kind).__name__ in ("Value", "ClassLabel") for kind in labels)
    # Others' samples may be dear, or drawn at random: one is loaded only where the script told us lengths.
    sample = dataset[0] if (isinstance(dataset, (list, tuple)) and dataset) or hasattr(dataset, "lengths") else None
    found = [value for name, value in sample.items() if name in _LABELS] if isinstance(sample, Mapping) else []
    return bool(found) and not any(getattr(value, "ndim", 0) or isinstance(value, (list, tuple)) for value in found)


def _column(dataset: Any) -> str:
    """The column that tells a sample's length."""
    if _is_table(dataset):
        if dataset.format["type"] == "custom":
            raise NotKnown("the data set makes its samples when they are asked for (set_transform)")
        names: Iterable[str] = dataset.column_names
    elif isinstance(dataset, (list, tuple)) and dataset and isinstance(dataset[0], Mapping):
        names = dataset[0].keys()
    else:
        raise NotKnown(
            f"the lengths of {type(dataset).__name__}'s samples aren't known without loading them "
            "(an attribute `lengths`, one number for each sample, would tell)"
        )
    found = next((name for name in _TOKENS if name in names), None)
    if found is None:
        raise NotKnown("the samples have neither attention_mask nor input_ids before they are batched")
    return found


def _is_table(dataset: Any) -> bool:
    """A Dataset of the package `datasets`, which is imported if there is one."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(dataset, library.Dataset)


def _tokens(value: Any, column: str) -> int:
    """The sum of a mask, or the number of ids; nested where a sample has several sequences."""
    if hasattr(value, "ndim"):  # torch's or numpy's
        return int(value.sum()) if column == "attention_mask" else math.prod(value.shape)
    if len(value) and isinstance(value[0], (list, tuple)):
        return sum(_tokens(part, column) for part in value)
    return int(sum(value)) if column == "attention_mask" else len(value)


def is_shuffled(loader: DataLoader) -> bool:
    """Whether a loader that isn't prepared yet draws samples at random: then no code counts on their order."""
    return isinstance(get_sampler(loader), RandomSampler)


def balance(loader: Any, *, order_counts: bool, own_loss: bool) -> None:
    """Changes how a prepared loader deals samples, if that is known to change nothing else; says once why not.

    `own_loss`: the script computes a loss of its own, and how it weighs samples is unknown.
    """
    if not settings.balances() or settings.padding() == "keep":  # where padding is computed, samples cost the same
        return
    try:
        BalancedShard.take_over(_shard(loader, order_counts, own_loss), lengths_of(loader.dataset))
    except NotKnown as reason:
        _say(f"{_named(loader)} deals samples to the ranks as stock does, not by length: {reason}")
    else:
        _say(f"{_named(loader)} deals the samples of a global batch to the ranks by length (--balance off: as stock)")


def _named(loader: Any) -> str:
    """A script may have several, of which one is dealt otherwise than another."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return f"the data loader of {type(loader.dataset).__name__}"
    return f"the data loader of {len(loader.dataset)} samples"


def _say(line: str) -> None:
    """Once, and by one rank: all have the same reason."""
    if PartialState().is_main_process:
        mention_once(line)


def _shard(loader: Any, order_counts: bool, own_loss: bool) -> BatchSamplerShard:
    """What deals a loader's batches to the ranks, if another deal is as good."""
    if order_counts:
        raise NotKnown("it doesn't shuffle, and may be one for evaluation, whose order counts")
    if own_loss:
        raise NotKnown("the script computes its own loss, which may be another mean than one over samples")
    if isinstance(loader.dataset, IterableDataset):
        raise NotKnown("the data set is iterable: samples are known only when they come")
    if not isinstance(loader, DataLoaderShard):
        raise NotKnown("rank 0 loads all batches (dispatch_batches)")
    shard = loader.sampler if isinstance(loader.sampler, BatchSamplerShard) else loader.batch_sampler
    if type(shard) is not BatchSamplerShard:
        raise NotKnown(f"{type(shard).__name__} deals the batches")
    if shard.num_processes == 1:  # Trainer makes it so for its `batch_rebalance`
        raise NotKnown("the sampler deals to ranks itself")
    if not hasattr(shard.batch_sampler, "__len__"):
        raise NotKnown("the number of batches is unknown")
    if not has_a_label_each(loader.dataset):
        raise NotKnown("the samples have no label of one value each, so that the loss may be a mean over tokens")
    return shard


class BalancedShard(BatchSamplerShard):
    """Stock's batches of every rank, put together and dealt anew. Last steps of an epoch may hold samples twice, in
    places that `gather_for_metrics` knows: those stay as stock deals them.
    """

    lengths: Lengths

    @classmethod
    def take_over(cls, shard: BatchSamplerShard, lengths: Lengths) -> None:
        """In place: a loader doesn't take another sampler once it is made."""
        shard.__class__ = cls
        shard.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        return self.after(0)

    def after(self, skip: int) -> Iterator[list[int]]:
        """Without the first `skip` batches, of which no lengths are read."""
        whole = self._whole_steps()
        for step, shares in itertools.islice(enumerate(itertools.zip_longest(*self._of_every_rank())), skip, None):
            own = shares[self.process_index]
            if step < whole and len({len(share) for share in shares}) == 1:
                samples = list(itertools.chain(*shares))
                own = [samples[place] for place in deal(self.lengths(samples), self.num_processes)[self.process_index]]
            if own is not None:
                yield own

    def _whole_steps(self) -> int:
        """How many steps have a full batch for every rank, whatever the last batch is."""
        full = len(self.batch_sampler) - (0 if self.drop_last else 1)
        return full if self.split_batches else full // self.num_processes

    def _of_every_rank(self) -> list[Iterator[list[int]]]:
        """Stock's shard of each rank, all over one pass through the sampler: a second would draw other numbers."""
        passes = itertools.tee(self.batch_sampler, self.num_processes)
        return [
            iter(
                BatchSamplerShard(
                    _OnePass(self, batches), self.num_processes, rank, self.split_batches, self.even_batches
                )
            )
            for rank, batches in enumerate(passes)
        ]


def _skip_dealing() -> None:
    """Accelerate reads all that it skips when a training goes on within an epoch."""
    stock = SkipBatchSampler.__iter__

    @functools.wraps(stock)
    def batches(self: Any) -> Iterator[list[int]]:
        inner = self.batch_sampler
        return inner.after(self.skip_batches) if isinstance(inner, BalancedShard) else stock(self)

    SkipBatchSampler.__iter__ = batches


class _OnePass:
    """A batch sampler that can be gone through once; shards change the lists that they get, so each gets its own."""

    def __init__(self, shard: BatchSamplerShard, batches: Iterator[list[int]]) -> None:
        self.batch_size, self.drop_last, self._batches = shard.batch_size, shard.drop_last, batches

    def __iter__(self) -> Iterator[list[int]]:
        return map(copy.copy, self._batches)


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Places of samples for each rank, as many each: the longest first, always to the rank with the fewest tokens."""
    each = len(lengths) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        rank = min((rank for rank in range(ranks) if len(shares[rank]) < each), key=lambda rank: tokens[rank])
        shares[rank].append(place)
        tokens[rank] += lengths[place]
    return [sorted(share) for share in shares]


_skip_dealing()
