"""nlp_example.py: the guide's launch with the guide's configuration, on sentence pairs from files."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.tiny import NAMES, PLACES, save_checkpoint

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "nlp_example.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    save_checkpoint(place / "model")
    chance = random.Random(0)
    for name, count in (("train", 160), ("held_back", 40)):
        with open(place / f"{name}.json", "w") as file:
            for _ in range(count):
                who, town, same = chance.choice(NAMES), chance.choice(PLACES), chance.random() < 0.5
                other = who if same else chance.choice([name for name in NAMES if name != who])
                pair = {"sentence1": f"{who} lives in {town} .", "sentence2": f"in {town} lives {other} ."}
                file.write(json.dumps({**pair, "label": int(same)}) + "\n")
    return place


def train(place: Path, runner: list[str], *flags: str) -> tuple[list[float], str]:
    """Losses of the epochs, and what was said."""
    environment = {**os.environ, "HOME": str(place), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["HF_DATASETS_CACHE"] = str(place / "cache")
    files = ["--train_file", str(place / "train.json"), "--validation_file", str(place / "held_back.json")]
    small = ["--model_name_or_path", str(place / "model"), "--learning_rate", "1e-3", "--num_epochs", "2"]
    command = [sys.executable, *runner, str(SCRIPT), *files, *small, *flags]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr
    found = re.findall(r"epoch \d: loss (\S+), accuracy (\S+), F1 (\S+)\n", answer.stdout)
    assert len(found) == 2
    assert all(0 <= float(score) <= 1 for _, accuracy, f1 in found for score in (accuracy, f1))
    return [float(loss) for loss, _, _ in found], answer.stderr


def test_the_guides_launch(place: Path) -> None:
    launch = ["-m", "cputrain", "launch", "--config_file", str(ROOT / "examples" / "nlp_example.yaml")]
    losses, said = train(place, launch, "--output_dir", str(place / "out"))
    assert "BertForSequenceClassification is optimised" in said
    assert "the script asks for bf16" in said
    assert losses[1] < losses[0]
    assert (place / "out" / "model.safetensors").exists()


def test_it_trains_as_python_does(place: Path) -> None:
    ours, said = train(place, ["-m", "cputrain", "run"], "--cpu", "--mixed_precision", "no")
    assert "BertForSequenceClassification is optimised" in said
    stock, _ = train(place, [], "--cpu", "--mixed_precision", "no")
    assert ours == pytest.approx(stock, abs=2e-3)


def test_ipex_off_in_the_configuration_is_stock(place: Path) -> None:
    (place / "off.yaml").write_text("ipex_config:\n  ipex: false\n")
    _, said = train(place, ["-m", "cputrain", "launch", "--config_file", str(place / "off.yaml")])
    assert "cputrain stays out: IPEX is off" in said and "optimised" not in said
