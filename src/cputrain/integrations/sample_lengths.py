"""How many real tokens a sample of a data set has, where that is known without loading the sample.

And whether the loss of such samples is a mean over samples, so that it doesn't matter which rank gets which.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import Subset

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
