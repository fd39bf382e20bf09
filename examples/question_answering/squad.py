"""From SQuAD files, or a data set by name, to windows of tokens that a question-answering model can take."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

Window = dict[str, "np.ndarray | int"]


@dataclass(frozen=True)
class Example:
    """One question about a context; `answers` are (text, where it starts), none if it can't be answered."""

    id: str
    question: str
    context: str
    answers: list[tuple[str, int]]


@dataclass
class Windows:
    """What the model sees. A long context gives several windows, which overlap by `stride` tokens."""

    inputs: list[Window] = field(default_factory=list)
    example_of: list[int] = field(default_factory=list)  # the number of each window's example
    offsets: list[np.ndarray] = field(default_factory=list)  # tokens × 2: characters in the context, -1 elsewhere


def read_examples(path: str | Path) -> list[Example]:
    """A SQuAD JSON file, v1.1 or v2.0, gzipped or not."""
    content = Path(path).read_bytes()
    data = json.loads(gzip.decompress(content) if str(path).endswith(".gz") else content)
    if not isinstance(data, dict) or "data" not in data:
        raise ValueError(f"{path} is not a SQuAD file: it has no list 'data' of articles.")
    return [
        Example(str(qa["id"]), qa["question"], paragraph["context"], list(_distinct(qa["answers"])))
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]


def load_examples(name: str, configuration: str | None, split: str) -> list[Example]:
    """A data set with SQuAD's columns, by its name or by the path of a folder."""
    from datasets import load_dataset

    rows = load_dataset(name, configuration, split=split)
    return [
        Example(
            str(row["id"]),
            row["question"],
            row["context"],
            list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
        )
        for row in rows
    ]


def _distinct(answers: list[dict]) -> Iterator[tuple[str, int]]:
    yield from dict.fromkeys((answer["text"], answer["answer_start"]) for answer in answers)


def make_windows(
    examples: list[Example], tokenizer: PreTrainedTokenizerBase, length: int, stride: int, batch: int = 1000
) -> Windows:
    """Question and context of each example in windows of at most `length` tokens, unpadded."""
    windows = Windows()
    for first in range(0, len(examples), batch):
        some = examples[first : first + batch]
        encoded = tokenizer(
            [example.question.lstrip() for example in some],  # blanks in front would eat the window's length
            [example.context for example in some],
            truncation="only_second",
            max_length=length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for row, number in enumerate(encoded["overflow_to_sample_mapping"]):
            _add(windows, encoded, row, some[number], first + number, tokenizer.cls_token_id)
    return windows


def _add(windows: Windows, encoded, row: int, example: Example, number: int, cls_token: int | None) -> None:
    ids = np.asarray(encoded["input_ids"][row], dtype=np.int32)
    offsets = np.asarray(encoded["offset_mapping"][row], dtype=np.int32)
    offsets[[kind != 1 for kind in encoded.sequence_ids(row)]] = -1
    nothing = int(np.argmax(ids == cls_token)) if cls_token is not None else 0
    start, end = _span(offsets, example.answers[0], nothing) if example.answers else (nothing, nothing)
    window: Window = {"input_ids": ids, "start_positions": start, "end_positions": end}
    for name in ("token_type_ids", "attention_mask"):
        if name in encoded:
            window[name] = np.asarray(encoded[name][row], dtype=np.int8)
    windows.inputs.append(window)
    windows.example_of.append(number)
    windows.offsets.append(offsets)


def _span(offsets: np.ndarray, answer: tuple[str, int], nothing: int) -> tuple[int, int]:
    """First and last token of the answer, or the [CLS] token twice if this window doesn't hold all of it."""
    text, first = answer
    last = first + len(text)
    covers = (offsets[:, 1] > first) & (offsets[:, 0] < last) & (offsets[:, 0] >= 0)
    context = offsets[offsets[:, 0] >= 0]
    if not covers.any() or context[0, 0] > first or context[-1, 1] < last:
        return nothing, nothing
    tokens = np.flatnonzero(covers)
    return int(tokens[0]), int(tokens[-1])
