"""`save_state` and `load_state`: whole or not there, verified, and nothing is executed."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from cputrain.checkpoints import manifest
from cputrain.integrations.accelerate import Accelerator


class Numbers:
    """What a script registers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def prepared(kind: type = Accelerator, limit: int | None = None, folder: Path | None = None) -> tuple[Any, Any]:
    accelerate.state.AcceleratorState._reset_state(True)
    named = accelerate.utils.ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = kind(cpu=True, project_config=named if folder else None)
    torch.manual_seed(3)
    model = torch.nn.Linear(40, 40)
    return accelerator, accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]


def test_either_side_loads_the_others(tmp_path: Path) -> None:
    for writer, reader in ((Accelerator, accelerate.Accelerator), (accelerate.Accelerator, Accelerator)):
        accelerator, model = prepared(writer)
        with torch.no_grad():
            model.weight.add_(1)
        expected, place = model.weight.clone(), str(tmp_path / writer.__module__)
        accelerator.save_state(place)
        drawn = torch.randn(3)
        accelerator, model = prepared(reader)
        accelerator.load_state(place)
        assert torch.equal(model.weight, expected) and torch.equal(torch.randn(3), drawn)


def test_a_bad_one_is_refused_by_name_and_the_newest_whole_one_taken(tmp_path: Path) -> None:
    accelerator, model = prepared(folder=tmp_path)
    for value in (1.0, 2.0):
        torch.nn.init.constant_(model.weight, value)
        accelerator.save_state()
    newest = tmp_path / "checkpoints/checkpoint_1"
    data = bytearray((newest / "optimizer.bin").read_bytes())
    data[-20] ^= 1
    (newest / "optimizer.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"checkpoint_1 can't be loaded: optimizer.bin isn't what was written"):
        accelerator.load_state(str(newest))
    accelerator.load_state()
    assert model.weight.unique() == 1.0 and not newest.exists()  # it was set aside


def test_a_full_disk_leaves_the_training_running_and_the_older_checkpoints_there(tmp_path: Path, caplog) -> None:
    accelerator, _ = prepared(limit=2, folder=tmp_path)
    for _ in range(3):
        accelerator.save_state()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        accelerator.save_state()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "checkpoint_3 was not saved, the training goes on" in caplog.text
    left = sorted((tmp_path / "checkpoints").glob("checkpoint_*"))
    assert [path.name for path in left] == ["checkpoint_1", "checkpoint_2"]
    assert all(manifest.verify(path) for path in left)
    accelerator.save_state()


def test_what_else_is_in_the_folder_stays(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    for _ in range(2):
        accelerator.save_state(str(tmp_path / "out"))
        assert (tmp_path / "out/notes.txt").read_text() == "mine" and manifest.verify(tmp_path / "out")
    accelerator.load_state(str(tmp_path / "out"))


def test_what_a_script_registers_is_read_as_plain_values(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    numbers = Numbers({"seen": [1, 2]})
    accelerator.register_for_checkpointing(numbers)
    accelerator.save_state(str(tmp_path / "plain"))
    numbers.value = None
    accelerator.load_state(str(tmp_path / "plain"))
    assert numbers.value == {"seen": [1, 2]}
    numbers.value = Evil(tmp_path / "executed")
    accelerator.save_state(str(tmp_path / "evil"))
    with pytest.raises(ValueError, match=r"has more than tensors and plain values \(.*mkdir\)"):
        accelerator.load_state(str(tmp_path / "evil"))
    assert not (tmp_path / "executed").exists()
