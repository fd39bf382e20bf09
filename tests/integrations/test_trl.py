"""TRL's SFT (packed; the assistant's words only) and DPO under `cputrain run`, in full, with LoRA, with LoRA on 4 bits:
stock's losses, our operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL isn't installed")
SCRIPT = Path(__file__).with_name("trl_training.py")


def results(folder: Path, command: list[str], **environment: str) -> dict:
    folder.mkdir()
    given = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    environment = {**os.environ, **given, **environment}
    command = [sys.executable, *command, str(SCRIPT), str(folder / "losses.json")]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict:
    return results(tmp_path_factory.mktemp("trl") / "stock", [])


@pytest.mark.parametrize("dtype", ["fp32", "int16"])
def test_losses_are_stocks(dtype: str, stock: dict, tmp_path: Path) -> None:
    ours = results(tmp_path / "ours", ["-m", "cputrain", "run"], CPUTRAIN_DTYPE=dtype)
    assert stock["rows_by_trl"] > 0 and ours["rows_by_trl"] == 0
    trainings = sorted(stock.keys() - {"rows_by_trl"})
    assert trainings == ["assistant", "dpo", "dpo lora", "dpo qlora", "packed", "sft lora", "sft qlora"]
    for training in trainings:
        found, expected = ours[training], stock[training]
        for name in ("loss", "entropy", "mean_token_accuracy"):
            assert found[name] == pytest.approx(expected[name], abs=1e-3), (training, name)
        tolerance = 1e-3 if dtype == "fp32" and "qlora" not in training else 2e-2
        for name in expected.keys() - {"loss", "entropy", "mean_token_accuracy"}:
            assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), (training, name)
