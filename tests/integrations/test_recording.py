"""What runs leave behind: Trainer's, Accelerate's and those of a script's own loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.record.read import Run, read
from tests.integrations import tiny

TRAINER = """
import sys
from transformers import Trainer, TrainingArguments
from tests.integrations import tiny
from torch.utils.data import DataLoader

arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, report_to=[], save_steps=3,
    hub_token="hf_abcdefghijklmnopqrstuvwx", eval_strategy="steps", eval_steps=3, logging_steps=1, use_cpu=True)
trainer = Trainer(tiny.bert(), arguments, train_dataset=tiny.windows(64), eval_dataset=tiny.windows(8))
result = trainer.train()
print([one["loss"] for one in trainer.state.log_history if "loss" in one])
"""
ACCELERATE = """
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tests.integrations import tiny

accelerator = Accelerator(cpu=True, project_dir="out")
model = tiny.bert()
loader, held_back = DataLoader(tiny.windows(24), 4), DataLoader(tiny.windows(16), 4)
model, optimizer, loader, held_back = accelerator.prepare(model, AdamW(model.parameters()), loader, held_back)
losses = []
for batch in held_back:  # with gradients, and yet no training
    model(**batch)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
"""


def run(folder: Path, script: str, *options: str, command: str = "run") -> tuple[str, str]:
    (folder / "script.py").write_text(script)
    words = [sys.executable, "-m", "cputrain", command, *options, "script.py"]
    environ = {"PYTHONPATH": str(Path(tiny.__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    environ |= {"HOME": str(folder)}
    answer = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout, answer.stderr


def real_tokens(count: int, times: int = 1) -> int:
    return times * sum(int(window["attention_mask"].sum()) for window in tiny.windows(count))


def mean_loss(found: Run) -> float:
    lines = found.first.steps
    return sum(one["loss"] * one["n"] for one in lines) / sum(one["n"] for one in lines)


def test_a_trainers_run_is_recorded_without_its_secrets(tmp_path: Path) -> None:
    told, _ = run(tmp_path, TRAINER)
    found = read(tmp_path / "out")
    [rank] = found.ranks
    assert rank.steps[-1]["step"] == 6 and rank.end["how"] == "ended" and rank.broken == 0
    losses = json.loads(told.splitlines()[-1])
    assert mean_loss(found) == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert sum(one["padded"] for one in rank.steps) == 48 * tiny.LENGTH
    assert 0 < sum(one["real"] for one in rank.steps) < 48 * tiny.LENGTH
    phases = {name for one in rank.steps for name in one["phases"]}
    assert phases == {"data", "forward", "backward", "optimizer", "checkpoint"}
    assert all(sum(one["phases"].values()) <= one["s"] * 1.05 for one in rank.steps)
    assert [set(one["values"]) >= {"eval_loss"} for one in rank.metrics] == [True, True]
    head = rank.head
    assert head["arguments"]["hub_token"] != "hf_abcdefghijklmnopqrstuvwx" and head["total"] == 6
    assert "hf_abcd" not in (tmp_path / "out" / "_cputrain" / "run-0.jsonl").read_text()
    assert head["command"] == ["cputrain", "run", "script.py"] and head["dtype"] == "fp32"
    assert head["model"]["class"] == "BertForQuestionAnswering" and head["peak_gflops"] > 0
    assert any("is optimised" in str(event) for event in rank.events) or head["explain"]["modules"]


def test_an_accelerate_loop_is_recorded_and_only_its_training(tmp_path: Path) -> None:
    told, _ = run(tmp_path, ACCELERATE, "--progress", "lines")
    found = read(tmp_path / "out")
    losses = json.loads(told)
    assert mean_loss(found) == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert found.first.steps[-1]["step"] == 6
    assert sum(one["real"] for one in found.first.steps) == real_tokens(24)


def test_record_off_leaves_nothing_and_a_folder_holds_it(tmp_path: Path) -> None:
    run(tmp_path, ACCELERATE, "--record", "off")
    assert not (tmp_path / "out").exists()
    run(tmp_path, ACCELERATE, "--record", "elsewhere")
    assert read(tmp_path / "elsewhere").first.steps


def test_each_rank_has_a_record_and_knows_what_it_communicated(tmp_path: Path) -> None:
    run(tmp_path, ACCELERATE, "-n", "2", command="launch")
    found = read(tmp_path / "out")
    assert [rank.rank for rank in found.ranks] == [0, 1] and found.first.head["size"] == 2
    assert sum(one["phases"].get("communication", 0) for one in found.first.steps) > 0
