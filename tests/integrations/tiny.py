"""A tiny BERT and questions for it, small enough that a training takes a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertForQuestionAnswering, BertTokenizerFast

LENGTH = 24
NAMES = ("anna", "bob", "carla", "dan", "emma", "fred")
PLACES = ("paris", "rome", "oslo", "bern", "riga", "cairo")
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *NAMES,
    *PLACES,
    "where",
    "does",
    "live",
    "lives",
    "in",
    "?",
    ".",
]


def bert(vocabulary: int = len(WORDS), seed: int = 0) -> BertForQuestionAnswering:
    """Without dropout, so that stock and optimised can be compared step by step."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForQuestionAnswering(config)


def windows(count: int) -> list[dict[str, torch.Tensor]]:
    """Token windows padded to one length, most of them mostly padding."""
    generator = torch.Generator().manual_seed(1)
    return [_window(generator) for _ in range(count)]


def _window(generator: torch.Generator) -> dict[str, torch.Tensor]:
    real = int(torch.randint(6, LENGTH + 1, (1,), generator=generator))
    ids = torch.randint(5, len(WORDS), (LENGTH,), generator=generator)
    ids[real:] = 0
    start = torch.randint(0, real, (1,), generator=generator)[0]
    mask = (torch.arange(LENGTH) < real).long()
    return {"input_ids": ids, "attention_mask": mask, "start_positions": start, "end_positions": start}


def save_checkpoint(folder: Path) -> Path:
    """A real checkpoint folder: model, configuration and tokenizer."""
    vocabulary = folder / "vocab.txt"
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.write_text("\n".join(WORDS))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    bert().save_pretrained(folder)
    return folder


def save_squad(path: Path, questions: int) -> Path:
    """Facts such as "anna lives in rome ." and questions about them, in SQuAD's format."""
    paragraphs = []
    for number in range(questions):
        name = NAMES[number % len(NAMES)]
        sentences = [f"{who} lives in {PLACES[(number + i) % len(PLACES)]} . " for i, who in enumerate(NAMES)]
        context = "".join(sentences)
        place = PLACES[(number + NAMES.index(name)) % len(PLACES)]
        answer = {"text": place, "answer_start": context.index(place)}
        qa = {"id": str(number), "question": f"where does {name} live ?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [qa]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "people", "paragraphs": paragraphs}]}))
    return path
