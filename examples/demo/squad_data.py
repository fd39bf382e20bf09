"""From SQuAD v1.1 files to padded batches, and from logits back to answers and their F1."""

from __future__ import annotations

import collections
import gzip
import json
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]  # [PAD] is 0, as BertConfig expects
LONGEST_ANSWER = 12  # tokens


@dataclass(frozen=True)
class Example:
    question: str
    context: str
    answer: str
    answer_start: int


@dataclass(frozen=True)
class Feature:
    """One question with its context, in tokens."""

    ids: list[int]
    types: list[int]  # 0 for the question, 1 for the context
    offsets: list[tuple[int, int]]  # where in its text each token stands
    start: int
    end: int


def load_examples(path: Path) -> list[Example]:
    with gzip.open(path) as file:
        dataset = json.load(file)
    return [
        Example(qa["question"], paragraph["context"], qa["answers"][0]["text"], qa["answers"][0]["answer_start"])
        for article in dataset["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """BERT's uncased WordPiece scheme; its vocabulary is every word of the texts, and characters for all others."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    normalised = (tokenizer.normalizer.normalize_str(text) for text in texts)
    known = {word for text in normalised for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    known |= {piece for character in string.ascii_lowercase + string.digits for piece in (character, f"##{character}")}
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS + sorted(known))}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def make_feature(tokenizer: Tokenizer, example: Example, padded_length: int) -> Feature:
    encoding = tokenizer.encode(example.question, example.context)
    if len(encoding) > padded_length:
        raise ValueError(f"{len(encoding)} tokens do not fit into {padded_length}; raise the padded length")
    last = example.answer_start + len(example.answer) - 1
    start, end = encoding.char_to_token(example.answer_start, 1), encoding.char_to_token(last, 1)
    return Feature(encoding.ids, encoding.type_ids, encoding.offsets, start, end)


def collate(features: list[Feature], padded_length: int) -> dict[str, Tensor]:
    """Padded to one length whatever the batch holds, as run_qa.py does by default."""
    ids = torch.zeros(len(features), padded_length, dtype=torch.long)
    types, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, feature in enumerate(features):
        length = len(feature.ids)
        ids[row, :length] = torch.tensor(feature.ids)
        types[row, :length] = torch.tensor(feature.types)
        mask[row, :length] = 1
    return {
        "input_ids": ids,
        "token_type_ids": types,
        "attention_mask": mask,
        "start_positions": torch.tensor([feature.start for feature in features]),
        "end_positions": torch.tensor([feature.end for feature in features]),
    }


def best_spans(start_logits: Tensor, end_logits: Tensor, context: Tensor) -> list[tuple[int, int]]:
    """For each row the span inside the context, at most `LONGEST_ANSWER` tokens, with the highest sum of logits."""
    length = start_logits.shape[1]
    scores = start_logits[:, :, None] + end_logits[:, None, :]
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    allowed = (distance >= 0) & (distance < LONGEST_ANSWER) & (context[:, :, None] & context[:, None, :])
    best = scores.masked_fill(~allowed, -torch.inf).flatten(1).argmax(1)
    return [(index // length, index % length) for index in best.tolist()]


def span_text(example: Example, feature: Feature, span: tuple[int, int]) -> str:
    return example.context[feature.offsets[span[0]][0] : feature.offsets[span[1]][1]]


def words(text: str) -> list[str]:
    """Normalised as the SQuAD evaluation does: no case, punctuation or articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1_score(prediction: str, truth: str) -> float:
    predicted, expected = words(prediction), words(truth)
    common = sum((collections.Counter(predicted) & collections.Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0
