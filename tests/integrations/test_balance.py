"""Samples dealt to the ranks by length: the same samples in every step, the same number for each rank."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from cputrain.integrations import balance
from cputrain.integrations.balance import BalancedShard, deal
from cputrain.integrations.balance import balance as balance_loader
from tests.integrations.tiny import windows

SAMPLES = windows(47)
LENGTHS = [int(sample["attention_mask"].sum()) for sample in SAMPLES]


def shards(ranks: int, balanced: bool, **options) -> list[list[list[int]]]:
    """Every rank's batches of one epoch."""
    found = []
    for rank in range(ranks):
        sampler = RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(3))
        batches = BatchSampler(sampler, options.get("batch", 4), options.get("drop_last", False))
        split, even = options.get("split", False), options.get("even", True)
        shard = BatchSamplerShard(batches, ranks, rank, split, even)
        if balanced:
            BalancedShard.take_over(shard, balance.lengths_of(SAMPLES))
        found.append(list(shard))
    return found


def spread(steps) -> int:
    """Tokens that the ranks with fewer wait for, over all steps."""
    totals = [[sum(LENGTHS[sample] for sample in share) for share in step] for step in steps]
    return sum(max(step) - min(step) for step in totals)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"drop_last": True}, {"even": False}, {"split": True, "batch": 6}, {"split": True, "batch": 6, "even": False}],
    ids=str,
)
def test_every_step_has_the_same_samples(ranks: int, options: dict) -> None:
    stock, ours = shards(ranks, False, **options), shards(ranks, True, **options)
    assert [len(rank) for rank in ours] == [len(rank) for rank in stock]
    expected, found = (list(itertools.zip_longest(*steps, fillvalue=[])) for steps in (stock, ours))
    for before, after in zip(expected, found, strict=True):
        assert [len(share) for share in after] == [len(share) for share in before]
        assert Counter(itertools.chain(*after)) == Counter(itertools.chain(*before))
    assert spread(found[:-1]) < spread(expected[:-1]) / 2
    if not options.get("drop_last"):
        assert found[-1] == expected[-1], "the last step may hold samples twice, at places that Accelerate knows"


def test_the_deal_is_even_in_number_and_nearly_in_tokens() -> None:
    lengths = [384, 40, 41, 42, 200, 190, 180, 170]
    shares = deal(lengths, 2)
    assert sorted(itertools.chain(*shares)) == list(range(8)) and [len(share) for share in shares] == [4, 4]
    assert abs(sum(lengths[i] for i in shares[0]) - sum(lengths[i] for i in shares[1])) < 100
    assert deal([7, 7], 2) == [[0], [1]]


# --- Loaders -----------------------------------------------------------------------------------------------------


def loader(data=SAMPLES, rank: int = 0, ranks: int = 2, **options):
    torch.manual_seed(5)
    plain = DataLoader(data, batch_size=4, collate_fn=list, **({"shuffle": True} | options))
    return prepare_data_loader(plain, num_processes=ranks, process_index=rank, use_seedable_sampler=True, data_seed=1)


def is_balanced(made, **options) -> bool:
    balance_loader(made, **({"order_counts": False, "own_loss": False} | options))
    return isinstance(made.batch_sampler, BalancedShard)


def test_resuming_in_the_middle_of_an_epoch_continues_where_it_was() -> None:
    whole, resumed = loader(), loader()
    assert is_balanced(whole) and is_balanced(resumed)
    batches = list(whole)
    rest = list(skip_first_batches(resumed, 3))
    assert len(batches) == 6 and len(rest) == 3
    for a, b in zip(batches[3:], rest, strict=True):
        assert [id(sample) for sample in a] == [id(sample) for sample in b]


class Million(Dataset):
    """Samples that are counted when they are loaded."""

    loaded = 0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return index


def test_resuming_in_the_middle_of_a_million_samples_reads_no_skipped_ones() -> None:
    data, asked = Million(), []

    def lengths(indices: Sequence[int]) -> list[int]:
        asked.extend(indices)
        return [index % 7 for index in indices]

    sampler = SeedableRandomSampler(data, data_seed=1)
    made = DataLoaderShard(data, batch_sampler=BatchSamplerShard(BatchSampler(sampler, 8, False), 2, 0))
    BalancedShard.take_over(made.batch_sampler, lengths)
    began = time.thread_time()
    batch = next(iter(skip_first_batches(made, 31_250)))
    assert time.thread_time() - began < 1  # of CPU time: the machine may be busy
    assert data.loaded == 16 and len(asked) == 32, "one batch more is read ahead"
    assert set(batch.tolist()) <= set(asked[:16])


def test_each_epoch_is_drawn_anew() -> None:
    made = loader()
    is_balanced(made)
    first, second = ([id(sample) for batch in made for sample in batch] for _ in range(2))
    assert first != second


class Own(Dataset):
    """A data set of a script, of which only it knows what a sample costs to load."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int):
        return SAMPLES[index]


class OwnWithLengths(Own):
    lengths = LENGTHS


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


def test_data_sets_whose_lengths_are_known() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{name: value.tolist() for name, value in sample.items()} for sample in SAMPLES]
    table = datasets.Dataset.from_list(rows)
    for data in (SAMPLES, rows, table, table.with_format("torch"), Subset(SAMPLES, range(47)), OwnWithLengths()):
        assert balance.lengths_of(data)([5, 46, 0]) == [LENGTHS[5], LENGTHS[46], LENGTHS[0]]
        assert is_balanced(loader(data))
    assert balance.lengths_of(table.shuffle(seed=1).select([3, 2]))([1]) == [
        sum(table.shuffle(seed=1)[2]["attention_mask"])
    ]
    ids = [{"input_ids": [1] * (2 + number), "label": 0} for number in range(4)]
    assert balance.lengths_of(ids)([0, 3]) == [2, 5]
    choices = [{"attention_mask": [[1, 1, 0], [1, 0, 0]], "label": 0}]
    assert balance.lengths_of(choices)([0]) == [3]


def labelled_by_token():
    return [{"input_ids": sample["input_ids"], "labels": sample["input_ids"]} for sample in SAMPLES]


def made_when_asked_for():
    datasets = pytest.importorskip("datasets")
    rows = [{"attention_mask": [1, 1], "label": 1}] * 8
    table = datasets.Dataset.from_list(rows)
    table.set_transform(lambda batch: batch)
    return table


def test_two_loaders_do_not_contradict_each_other(caplog) -> None:
    caplog.set_level("INFO", "cputrain")
    assert is_balanced(loader()) and not is_balanced(loader(SAMPLES[:10], shuffle=False), order_counts=True)
    assert caplog.messages == [
        "the data loader of 47 samples deals the samples of a global batch to the ranks by length "
        "(--balance off: as stock)",
        "the data loader of 10 samples deals samples to the ranks as stock does, not by length: "
        "it doesn't shuffle, and may be one for evaluation, whose order counts",
    ]


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: loader(), {"order_counts": True}, "doesn't shuffle"),
        (lambda: loader(), {"own_loss": True}, "computes its own loss"),
        (lambda: loader(labelled_by_token()), {}, "a mean over tokens"),
        (lambda: loader([{"input_ids": [1]}] * 8), {}, "a mean over tokens"),
        (lambda: loader([{"text": "a", "label": 1}] * 8), {}, "neither attention_mask nor input_ids"),
        (lambda: loader(Own()), {}, "no label of one value each"),
        (lambda: loader(made_when_asked_for()), {}, "set_transform"),
        (lambda: loader(Stream(), shuffle=False), {}, "iterable"),
        (lambda: loader(ranks=1), {}, "deals the batches"),
    ],
)
def test_where_it_is_not_known_to_be_harmless_stock_deals_and_the_reason_is_said(make, options, reason, caplog) -> None:
    caplog.set_level("INFO", "cputrain")
    made = make()
    before = made.batch_sampler
    assert not is_balanced(made, **options) and made.batch_sampler is before
    assert [reason in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("setting", [("CPUTRAIN_BALANCE", "off"), ("CPUTRAIN_PADDING", "keep")])
def test_it_can_be_switched_off(setting, monkeypatch, caplog) -> None:
    monkeypatch.setenv(*setting)
    assert not is_balanced(loader()) and not caplog.messages


def test_only_a_loader_that_shuffles_may_be_for_training() -> None:
    assert balance.is_shuffled(DataLoader(SAMPLES, shuffle=True))
    assert not balance.is_shuffled(DataLoader(SAMPLES))
    batches = BatchSampler(SequentialSampler(SAMPLES), 4, False)
    assert not balance.is_shuffled(DataLoader(SAMPLES, batch_sampler=batches))
