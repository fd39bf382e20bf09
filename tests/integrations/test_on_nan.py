"""A loss that isn't a number is named, ends the training, or leaves its step out; weights stay numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import cputrain
from cputrain.integrations.notices import Refused
from tests.checkpoints.kills import Model

NAN = float("nan")


def data(bad: list[int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = [{name: torch.randn(8, generator=generator) for name in ("x", "labels")} for _ in range(32)]
    for number in bad:
        found[number]["x"][3] = NAN
    return found


def trained(folder: Path, on_nan: str, monkeypatch: pytest.MonkeyPatch, bad: list[int], **more) -> cputrain.Trainer:
    monkeypatch.setenv("CPUTRAIN_ON_NAN", on_nan)
    monkeypatch.setenv("CPUTRAIN_RECORD", "off")
    torch.manual_seed(2)
    arguments = cputrain.TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=2, save_steps=2, learning_rate=1e-2,
        report_to="none", use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip
    trainer = cputrain.Trainer(Model(), arguments, train_dataset=data(bad))
    trainer.train()
    return trainer


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_it_is_named_and_else_all_is_stocks(tmp_path: Path, monkeypatch, caplog) -> None:
    trainer = trained(tmp_path, "", monkeypatch, [9])
    assert weights(trainer.model).isnan().any()
    named = [line for line in caplog.messages if "isn't a number" in line]
    assert len(named) == 3 and "of epoch 1, in the order they are drawn)" in named[0] and "aren't named" in named[2]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_is_left_out_at_once_or_after_going_back(tmp_path: Path, monkeypatch, caplog, accumulation: int) -> None:
    skipped = trained(tmp_path / "skip", "skip", monkeypatch, [9], gradient_accumulation_steps=accumulation)
    assert weights(skipped.model).isfinite().all() and "goes back" not in caplog.text
    assert skipped.state.global_step == 16 // accumulation
    back = trained(tmp_path / "back", "back", monkeypatch, [9], gradient_accumulation_steps=accumulation)
    assert "goes back to" in caplog.text
    assert torch.equal(weights(back.model), weights(skipped.model))


def test_the_training_ends_with_a_sentence(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(Refused, match=r"loss of step \d+ isn't a number \(samples .* the training ends"):
        trained(tmp_path, "stop", monkeypatch, [9])


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(Refused, match="there is no checkpoint yet to go back to"):
        trained(tmp_path, "back", monkeypatch, list(range(32)))
