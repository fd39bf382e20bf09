"""run_classification.py: the command of its docstring, on files, one column or two, words as labels."""

from __future__ import annotations

import ast
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.tiny import NAMES, PLACES, save_checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "text_classification" / "run_classification.py"
COMMAND = next(
    part for part in ast.get_docstring(ast.parse(SCRIPT.read_text())).split("\n\n") if "cputrain run" in part
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The class is the town's, so that it can be learned from one word."""
    place = tmp_path_factory.mktemp("classes")
    save_checkpoint(place / "model")
    chance = random.Random(0)
    for name, count in (("train", 120), ("held_back", 30)):
        towns = [chance.randrange(len(PLACES)) for _ in range(count)]
        kinds = ["north" if town < len(PLACES) // 2 else "south" for town in towns]
        lines = [
            f"{chance.choice(NAMES)} lives,in {PLACES[town]} .,{kind}" for town, kind in zip(towns, kinds, strict=True)
        ]
        (place / f"{name}.csv").write_text("\n".join(["sentence1,sentence2,label", *lines]))
    return place


def test_the_docstrings_command_learns(place: Path) -> None:
    words = shlex.split(COMMAND.replace("\\\n", " "))[3:]
    small = {
        "--model_name_or_path": place / "model",
        "--train_file": place / "train.csv",
        "--validation_file": place / "held_back.csv",
        "--output_dir": place / "out",
        "--per_device_train_batch_size": 8,
        "--learning_rate": 3e-3,
    }
    for option, value in small.items():
        words[words.index(option) + 1] = str(value)
    words += ["--max_seq_length", "24", "--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "True"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(place / "cache"),
    }
    command = [sys.executable, "-m", "cputrain", "run", str(SCRIPT), *words]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "BertForSequenceClassification is optimised" in answer.stderr
    results = json.loads((place / "out" / "all_results.json").read_text())
    assert results["eval_accuracy"] > 0.8
    config = json.loads((place / "out" / "config.json").read_text())
    assert config["label2id"] == {"north": 0, "south": 1}
