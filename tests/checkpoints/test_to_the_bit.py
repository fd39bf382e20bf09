"""A training that ended in the middle of an epoch goes on as if nothing had been: each loss, and each weight's bits."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForQuestionAnswering, TrainerCallback
from transformers.trainer_callback import EarlyStoppingCallback

import cputrain
from cputrain.checkpoints import manifest, own_loops
from tests.integrations.tiny import LENGTH, WORDS, windows

DATA = windows(32)
STEPS, EVERY = 13, 3  # eight steps are an epoch


class Ended(Exception):
    """As by a failure."""


class EndsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Ended


def model() -> BertForQuestionAnswering:
    torch.manual_seed(0)
    return BertForQuestionAnswering(
        BertConfig(
            vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        )
    )  # fmt: skip


def trainer(folder: Path, *callbacks: TrainerCallback, **options: Any) -> cputrain.Trainer:
    settings = {
        "max_steps": STEPS, "save_steps": EVERY, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_total_limit": 2,
    }  # fmt: skip
    arguments = cputrain.TrainingArguments(str(folder), **(settings | options))
    return cputrain.Trainer(model(), arguments, train_dataset=DATA, eval_dataset=DATA[:6], callbacks=list(callbacks))


def losses(of: Any) -> list[float]:
    return [line["loss"] for line in of.state.log_history if "loss" in line]


def draw_something() -> None:
    """What another process would have drawn before."""
    for seeded in (torch.manual_seed, numpy.random.seed, random.seed):
        seeded(987)


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("ends_after", [5, 10])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dtype", ["fp32", "int16", "bf16"])
def test_a_trainer_goes_on_in_the_middle_of_an_epoch(
    dtype: str, workers: int, ends_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUTRAIN_DTYPE", dtype)
    undisturbed = trainer(tmp_path / "whole", dataloader_num_workers=workers)
    undisturbed.train()
    with pytest.raises(Ended):
        trainer(tmp_path / "out", EndsAfter(ends_after), dataloader_num_workers=workers).train()
    draw_something()
    resumed = trainer(tmp_path / "out", dataloader_num_workers=workers)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(undisturbed) and len(losses(resumed)) == STEPS
    assert_same_weights(resumed.model, undisturbed.model)


def test_a_training_that_had_ended_takes_no_further_step(tmp_path: Path) -> None:
    """In the middle of an epoch, as where a launch is killed behind `train()` and started anew."""
    options = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": EVERY}
    ended = trainer(tmp_path / "out", **options)
    ended.train()
    again = trainer(tmp_path / "out", **options)
    output = again.train(resume_from_checkpoint=True)
    assert output.global_step == STEPS and losses(again) == losses(ended)
    first, second = (
        [(line["step"], line["eval_loss"]) for line in one.state.log_history if "eval_loss" in line]
        for one in (ended, again)
    )
    assert first == second
    assert_same_weights(again.model, ended.model)
    longer = trainer(tmp_path / "out", **options, max_steps=STEPS + 2)
    longer.train(resume_from_checkpoint=True)
    assert len(losses(longer)) == STEPS + 2


def test_early_stopping_goes_on_counting(tmp_path: Path) -> None:
    """Losses that only get worse: the third evaluation in a row ends it, wherever it was interrupted."""
    options = {
        "learning_rate": 0.5, "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": EVERY,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 60,
    }  # fmt: skip
    undisturbed = trainer(tmp_path / "whole", EarlyStoppingCallback(3), **options)
    undisturbed.train()
    ended = undisturbed.state.global_step
    assert 3 * EVERY < ended < 60
    with pytest.raises(Ended):
        trainer(tmp_path / "out", EarlyStoppingCallback(3), EndsAfter(ended - EVERY + 1), **options).train()
    resumed = trainer(tmp_path / "out", EarlyStoppingCallback(3), **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == ended


def loop(folder: Path, ends_after: int = 0) -> torch.nn.Module:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    loader = DataLoader(DATA, 4, shuffle=True)  # type: ignore[arg-type,var-annotated]
    checkpoints = cputrain.Checkpoints(folder, model=trained, optimizer=optimizer, every=EVERY)
    for _ in checkpoints.epochs(2):
        for batch in checkpoints.batches(loader):
            trained(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step()
            if checkpoints.steps == ends_after:
                raise Ended
    return trained


@pytest.mark.parametrize("ends_after", [5, 10])
def test_a_loop_of_ones_own_goes_on(ends_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = loop(tmp_path / "whole")
    with pytest.raises(Ended):
        loop(tmp_path / "out", ends_after)
    draw_something()
    monkeypatch.setenv("CPUTRAIN_RESUME", "auto")
    assert_same_weights(loop(tmp_path / "out"), undisturbed)


# --- While the disk takes its time -----------------------------------------------------------------------------------


class SlowDisk:
    """No checkpoint gets its name until `allow`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: OSError | None = None) -> None:
        self.allowed, stock = threading.Event(), manifest.flushed

        def flushed(*files: Any) -> Any:
            assert self.allowed.wait(60), "nothing allowed the disk to go on"
            if error is not None:
                raise error
            return stock(*files)

        monkeypatch.setattr(manifest, "flushed", flushed)


class Sees(TrainerCallback):
    """Which checkpoints are there after each step; after the one that follows a save the disk may go on."""

    def __init__(self, folder: Path, disk: SlowDisk) -> None:
        self.folder, self.disk, self.seen = folder, disk, []  # type: ignore[var-annotated]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(sorted(path.name for path in self.folder.glob("checkpoint-*")))
        if state.global_step == EVERY + 1:
            self.disk.allowed.set()


def test_training_goes_on_while_a_checkpoint_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    sees = Sees(tmp_path, disk)
    trainer(tmp_path, sees, max_steps=2 * EVERY + 1).train()
    assert sees.seen[EVERY] == []
    assert "checkpoint-3" in sees.seen[2 * EVERY], "the second save didn't wait for the first"
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-7"}


def test_a_callback_that_is_told_of_a_save_finds_the_checkpoint(tmp_path: Path) -> None:
    found = []

    class Uploads(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append((tmp_path / f"checkpoint-{state.global_step}" / manifest.NAME).exists())

    trainer(tmp_path, Uploads()).train()
    assert found and all(found)


def test_a_checkpoint_that_fails_on_its_way_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SlowDisk(monkeypatch, OSError(28, "No space left on device"))
    sees = Sees(tmp_path, disk)
    trainer(tmp_path, sees, max_steps=EVERY + 2, save_strategy="steps").train()
    assert len(sees.seen) == EVERY + 2
    lines = [line for line in caplog.messages if "was not saved, the training goes on: No space left" in line]
    assert [line.split()[0] for line in lines] == [str(tmp_path / f"checkpoint-{step}") for step in (3, 5)]
    assert not list(tmp_path.glob("checkpoint-*")) and not list(tmp_path.glob("_cputrain/staging/*"))


def test_a_loop_goes_on_while_a_checkpoint_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, seen = SlowDisk(monkeypatch), []
    stock = own_loops.Checkpoints.step

    def step(self: Any) -> None:
        seen.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        stock(self)
        if self.steps == EVERY + 1:
            disk.allowed.set()

    monkeypatch.setattr(own_loops.Checkpoints, "step", step)
    loop(tmp_path)
    assert seen[EVERY] == [] and "checkpoint-3" in seen[2 * EVERY]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
