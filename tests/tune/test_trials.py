"""Trials of real scripts: they end after their steps, leave nothing behind, and share a batch among their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.launch import config_file
from cputrain.record.read import Run, read
from tests.integrations import tiny

TRAINER = """
from transformers import Trainer, TrainingArguments
from tests.integrations import tiny

arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=1, report_to="tensorboard", push_to_hub=True,
    save_strategy="steps", save_steps=1, eval_strategy="epoch", eval_on_start=True, load_best_model_at_end=False,
    use_cpu=True)
trainer = Trainer(tiny.bert(), arguments, train_dataset=tiny.windows(16), eval_dataset=[{"a": "no batch"}])
trainer.train(resume_from_checkpoint="no such folder")
open("written", "w")
trainer.push_to_hub()
"""
OWN_LOOP = """
import sys, torch, cputrain
from torch.utils.data import DataLoader
from tests.integrations import tiny

model = tiny.bert()
model, optimizer = cputrain.optimize(model, torch.optim.AdamW(model.parameters()))
open("begun", "w")
for batch in DataLoader(tiny.windows(64), int(sys.argv[-1])):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
open("written", "w")
"""
STEPS = 5


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    return tmp_path


def cputrain(place: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {"PYTHONPATH": str(Path(tiny.__file__).parents[2]), "PATH": os.defpath, "HOME": str(place)}
    known |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", **environ}
    command = [sys.executable, "-m", "cputrain", *words]
    return subprocess.run(command, cwd=place, env=known, capture_output=True, text=True, check=False, timeout=300)


def trial(place: Path, *words: str, **environ: str) -> Run:
    given = ["launch", "--record", str(place / "record"), *words]
    answer = cputrain(place, *given, CPUTRAIN_TRIAL_STEPS=str(STEPS), OMP_NUM_THREADS="1", **environ)
    assert answer.returncode == 0, answer.stderr
    assert not (place / "written").exists()
    return read(place / "record")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_ends_after_its_steps_and_leaves_nothing(place: Path, ranks: int) -> None:
    """Five steps of an epoch of two: the training goes on, and each step takes the same global batch."""
    found = trial(place, "-n", str(ranks), "train.py")
    assert len(found.ranks) == ranks
    for rank in found.ranks:
        assert [line["step"] for line in rank.steps] == [1, 2, 3, 4, 5] and rank.end["how"] == "ended"
        assert rank.head["arguments"]["per_device_train_batch_size"] == 8 // ranks
        assert [line["padded"] for line in rank.steps] == [8 // ranks * tiny.LENGTH] * STEPS
    assert sorted(path.name for path in place.iterdir() if path.name[0] != ".") == ["loop.py", "record", "train.py"]
    assert not list((place / "record").glob("checkpoint-*")) and not list((place / "record").glob("runs"))


def test_an_own_loop_is_stopped_only_if_that_is_allowed(place: Path) -> None:
    answer = cputrain(
        place, "launch", "--record", "record", "loop.py", "4", CPUTRAIN_TRIAL_STEPS="5", OMP_NUM_THREADS="1"
    )
    assert answer.returncode == 2 and "loop of its own" in answer.stderr and "--it-may-write" in answer.stderr
    assert "Traceback" not in answer.stderr
    found = trial(place, "loop.py", "4", CPUTRAIN_TRIAL_OWN_LOOPS="true")
    assert found.first.steps[-1]["step"] == STEPS


def test_tune_writes_what_launch_reads_and_goes_on_where_it_was(place: Path) -> None:
    tune = ["tune", "--budget", "20s", "--steps", "4", "--dtypes", "fp32,int16", "--config_file", "best.yaml"]
    script = ["train.py"]
    limit = [str(min(os.sched_getaffinity(0)))]
    command = ["taskset", "-c", *limit, sys.executable, "-m", "cputrain", *tune, *script]
    known = {"PYTHONPATH": str(Path(tiny.__file__).parents[2]), "PATH": os.defpath, "HOME": str(place)}
    known |= {"HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(command, cwd=place, env=known, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    text = (place / "best.yaml").read_text()
    assert "2 of 2 candidates, a batch of 8, 4 steps a trial" in answer.stdout
    assert answer.stdout.splitlines()[-1].strip() == "cputrain launch --config_file best.yaml train.py"
    config = config_file.read(place / "best.yaml")
    assert config.num_processes == 1 and "OMP_NUM_THREADS=1" in config.env
    winner = next(line for line in text.splitlines() if "the winner" in line)
    assert f"CPUTRAIN_DTYPE={winner.split(',')[1].split()[0]}" in config.env
    tried = [json.loads(line) for line in (place / "best.tried.jsonl").read_text().splitlines()]
    trials = [line for line in tried if line["kind"] == "trial"]
    assert trials and all(line["seconds"] > 0 for line in trials)
    assert not (place / "written").exists() and not (place / "out").exists()
    again = subprocess.run(command, cwd=place, env=known, capture_output=True, text=True, check=False, timeout=300)
    assert again.returncode == 0 and "best.tried.jsonl has measurements of this training" in again.stdout
    after = (place / "best.tried.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in after][: len(tried)] == tried


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "-5min", "train.py"], "must be a time like 90s, 10min or 2h, at least 10s, found '-5min'."),
        (["--budget", "1s", "train.py"], "at least 10s, found '1s'"),
        (["--dtypes", "fp32,fp8", "train.py"], "takes auto, fp32, bf16, int16 with commas between them, found 'fp8'"),
        (["--steps", "2", "train.py"], "--steps must be at least 4, found 2"),
        (["nowhere.py"], "nowhere.py can't be read: No such file or directory."),
        (["loop.py", "4"], "loop.py has no Trainer: it trains in a loop of its own"),
        (["--it-may-write", "--batch-option", "--batch", "loop.py", "4"], "the script's arguments have no --batch:"),
        (["--config_file", "two.yaml", "train.py"], "tune measures one machine, and the configuration has several"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(place: Path, words: list[str], said: str) -> None:
    (place / "two.yaml").write_text("hostfile: hosts\nnum_processes: 2\ndistributed_type: MULTI_CPU\n")
    before = sorted(place.iterdir())
    answer = cputrain(place, "tune", *words)
    assert answer.returncode == 2 and said in answer.stderr and "Traceback" not in answer.stderr, answer.stderr
    assert sorted(place.iterdir()) == before


def test_a_script_that_fails_is_shown_and_nothing_is_written(place: Path) -> None:
    (place / "train.py").write_text("import transformers  # Trainer\nraise ValueError('no data here')\n")
    answer = cputrain(place, "tune", "train.py")
    assert answer.returncode == 2 and "the training can't be tuned: exit code 1" in answer.stderr
    assert "ValueError: no data here" in answer.stderr and not list(place.glob("cputrain-tuned*"))


def test_a_training_that_waits_for_ever_is_ended(place: Path) -> None:
    (place / "train.py").write_text("import time\ntime.sleep(1000)\n")
    code = "from cputrain.tune.trial import Config, Training, run\n"
    code += "print(run(Training(('train.py',)), Config(), 5, most=3.0))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=True, timeout=100
    )
    assert "seconds=None" in done.stdout and "it didn't end within 3 s, after 0 steps" in done.stdout


def test_a_rank_of_a_launcher_is_refused(place: Path) -> None:
    answer = cputrain(place, "tune", "train.py", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert answer.returncode == 2 and "tune starts ranks itself" in answer.stderr


def test_a_dry_run_starts_nothing(place: Path) -> None:
    before = sorted(place.iterdir())
    answer = cputrain(place, "tune", "--dry-run", "--dtypes", "int16", "train.py")
    assert answer.returncode == 0 and "1 rank × " in answer.stdout and ", int16" in answer.stdout
    assert sorted(place.iterdir()) == before
