"""run_clm.py: the command of its docstring, a model trained further, and one sentence for what is wrong."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "language_modeling" / "run_clm.py"
COMMAND = next(
    part for part in ast.get_docstring(ast.parse(SCRIPT.read_text())).split("\n\n") if "cputrain run" in part
)
SIZES = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
TEXT = "the cat sat on the mat, and the dog sat on the cat.\nwho sat on the dog? the mat did.\n"
QUIET = ["--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "True", "--use_cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    (place / "input.txt").write_text(TEXT * 150)
    (place / "other.txt").write_text(TEXT * 5)
    (place / "empty.txt").write_text("\n")
    (place / "latin.txt").write_bytes(b"caf\xe9")
    return place


def run(place: Path, command: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(place / "c")}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def trained(place: Path) -> subprocess.CompletedProcess:
    words = shlex.split(COMMAND.replace("\\\n", " "))[3:]
    small = {
        "--config_overrides": SIZES,
        "--vocab_size": 300,
        "--train_file": place / "input.txt",
        "--block_size": 32,
        "--learning_rate": 1e-2,
        "--max_steps": 40,
        "--output_dir": place / "out",
    }
    for option, value in small.items():
        words[words.index(option) + 1] = str(value)
    return run(place, ["-m", "cputrain", "run", str(SCRIPT), *words, *QUIET])


def test_the_docstrings_command_learns(trained, place: Path) -> None:
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert "LlamaForCausalLM is optimised" in trained.stderr
    results = json.loads((place / "out" / "all_results.json").read_text())
    assert results["eval_loss"] < 1 and results["perplexity"] < 3  # log 300 is 5.7
    assert json.loads((place / "out" / "config.json").read_text())["vocab_size"] <= 300


def test_python_goes_on_with_the_saved_model(trained, place: Path) -> None:
    """As stock, on several files, with a text to evaluate on."""
    texts = ["--train_file", str(place / "input.txt"), str(place / "other.txt"), "--validation_file"]
    words = ["--model_name_or_path", str(place / "out"), *texts, str(place / "other.txt"), "--block_size", "16"]
    words += ["--do_train", "--do_eval", "--max_steps", "3", "--output_dir", str(place / "further"), *QUIET]
    answer = run(place, [str(SCRIPT), *words])
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "cputrain" not in answer.stderr
    assert json.loads((place / "further" / "eval_results.json").read_text())["eval_loss"] < 1.5


@pytest.fixture
def call(monkeypatch, capsys, place):
    """Runs the script in this process; its exit code and what it says."""
    spec = importlib.util.spec_from_file_location("run_clm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_clm", module)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "c"))
    monkeypatch.chdir(place)
    spec.loader.exec_module(module)

    def run(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *shlex.split(words)])
        with pytest.raises(SystemExit) as exit:
            module.main()
        return exit.value.code, *capsys.readouterr()

    return run


TRAIN = "--do_train --output_dir nothing --use_cpu --report_to none"
WRONG = {
    f"--train_file input.txt {TRAIN}": "give either --model_name_or_path",
    f"--model_type lama --train_file input.txt {TRAIN}": "--model_type lama is no model type",
    "--model_type llama --train_file input.txt --output_dir nothing --use_cpu": "there is nothing to do",
    f"--model_type llama {TRAIN}": "there is no text: give --train_file",
    f"--model_type llama --train_file absent.txt {TRAIN}": "absent.txt can't be read: No such file or directory",
    f"--model_type llama --train_file empty.txt {TRAIN}": "empty.txt has no text",
    f"--model_type llama --train_file latin.txt {TRAIN}": "latin.txt is no text in UTF-8",
    f"--model_type llama --train_file input.txt --block_size 1 {TRAIN}": "--block_size must be at least 2, found 1",
    f"--model_name_or_path ./absent --train_file input.txt {TRAIN}": "./absent can't be loaded",
    f"--model_type llama --config_overrides hidden=3 --train_file input.txt {TRAIN}": "has 'hidden=3'",
    f"--model_type llama --config_overrides hidden_size=big --train_file input.txt {TRAIN}": "big is no int",
    f"--model_type llama --config_overrides {SIZES},max_position_embeddings=8 --vocab_size 300 --train_file input.txt "
    f"{TRAIN}": "--block_size is 256, but this model has 8 positions",
    f"--model_type llama --config_overrides {SIZES} --vocab_size 300 --block_size 512 --train_file other.txt {TRAIN}": (
        "other.txt: not one block of 512 tokens"
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_one_sentence_says_what_is_wrong(words: str, call, place: Path) -> None:
    code, _, said = call(words)
    assert code == 2
    assert said.strip().split("\n")[-1].startswith("run_clm.py: ") and WRONG[words] in said
    assert "Traceback" not in said and not (place / "nothing").exists()


def test_help(call) -> None:
    code, help, _ = call("--help")
    assert code == 0 and "--config_overrides" in help and "--block_size" in help
