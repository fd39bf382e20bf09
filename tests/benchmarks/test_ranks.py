"""The benchmark of two ranks: its data, and that it goes from processes to rows."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import ranks
import real_data

from tests.integrations.tiny import save_squad


def test_long_contexts_are_squad_files_whose_answers_stand_where_they_say(tmp_path: Path) -> None:
    plain = save_squad(tmp_path / "plain.json", 8)
    train = tmp_path / real_data.TRAIN
    train.write_bytes(gzip.compress(plain.read_bytes()))
    made = json.loads(ranks.long_contexts(train, str(tmp_path)).read_text())
    (article,) = made["data"]
    (paragraph,) = article["paragraphs"]
    (question,) = paragraph["qas"]
    before = json.loads(plain.read_text())["data"][0]["paragraphs"]
    assert len(paragraph["context"]) > sum(len(part["context"]) for part in before)
    answer = question["answers"][0]
    assert paragraph["context"][answer["answer_start"] :].startswith(answer["text"])


def test_a_rank_that_waits_sleeps() -> None:
    (row,) = ranks.waiting_rows(seconds=0.5)
    assert row["what"] == "CPU time of a rank that waits 0.5 s" and "reached" in row["floor"]


def test_a_row_says_whether_its_floor_is_reached() -> None:
    assert ranks.row("a", "b", "≤ 1", True)["floor"] == "≤ 1 reached"
    assert ranks.row("a", "b", "≤ 1", False)["floor"] == "≤ 1 **missed**"
