"""What all these examples train on: does a sentence have more words from the upper half of the vocabulary?"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

WORDS, LENGTH = 200, 48


class Sentences(Dataset):
    """Sentences of 8 to 48 random words, padded to 48."""

    def __init__(self, count: int = 512) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
        lengths = torch.randint(8, LENGTH + 1, (count, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.words *= self.mask
        upper = ((self.words > WORDS // 2) * self.mask).sum(1)
        self.labels = (2 * upper > lengths[:, 0]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[row], "attention_mask": self.mask[row], "labels": self.labels[row]}


def make_batches() -> DataLoader:
    return DataLoader(Sentences(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))


def make_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return BertForSequenceClassification(config)
