"""run_qa.py: the guides' commands run with `python` → `cputrain run` as their only edit, and the scores are SQuAD's."""

from __future__ import annotations

import ast
import gzip
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integrations.tiny import save_checkpoint, save_squad

FOLDER = Path(__file__).parents[2] / "examples" / "question_answering"
SCRIPT = FOLDER / "run_qa.py"
sys.path.insert(0, str(FOLDER))

import answers  # noqa: E402
import squad  # noqa: E402

COMMAND = next(
    part for part in ast.get_docstring(ast.parse(SCRIPT.read_text())).split("\n\n") if "cputrain run" in part
)
# The flags that differ between the guides: of one CPU in Japanese and in Chinese, and of several CPUs.
GUIDES = {
    "train_cpu.ja": ["--use_ipex", "--bf16", "--no_cuda"],
    "train_cpu.zh": ["--use_ipex", "--bf16", "--use_cpu"],
    "train_cpu_many.zh, one process": ["--no_cuda", "--ddp_backend", "ccl", "--use_ipex"],
    "none": [],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model and data as a user has them: a checkpoint, a data set by name (here its folder), and files."""
    place = tmp_path_factory.mktemp("qa")
    save_checkpoint(place / "model")
    (place / "data").mkdir()
    for split, questions in (("train", 24), ("validation", 9)):
        path = save_squad(place / f"{split}.json", questions)
        with open(place / "data" / f"{split}.jsonl", "w") as file:
            for example in squad.read_examples(path):
                texts, starts = zip(*example.answers, strict=True)
                row = {"id": example.id, "question": example.question, "context": example.context}
                file.write(json.dumps({**row, "answers": {"text": texts, "answer_start": starts}}) + "\n")
    (place / "validation.json.gz").write_bytes(gzip.compress((place / "validation.json").read_bytes()))
    return place


def train(place: Path, name: str, flags: list[str], runner=("-m", "cputrain", "run")) -> tuple[dict, str]:
    """The docstring's command with a small model, short windows and few steps; (all results, what was said)."""
    words = shlex.split(COMMAND.replace("\\\n", " "))[3:]
    words = words[: words.index("--use_ipex")] + flags
    small = {
        "--model_name_or_path": place / "model",
        "--dataset_name": place / "data",
        "--output_dir": place / name,
        "--max_seq_length": 32,
        "--doc_stride": 8,
        "--num_train_epochs": 1,
    }
    for option, value in small.items():
        words[words.index(option) + 1] = str(value)
    words += ["--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "True"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(place / "cache"),
    }
    command = [sys.executable, *runner, str(SCRIPT), *words]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads((place / name / "all_results.json").read_text()), answer.stderr


@pytest.mark.parametrize("flags", GUIDES.values(), ids=GUIDES)
def test_the_guides_commands_run(flags: list[str], place: Path) -> None:
    results, said = train(place, "out", flags)
    assert "BertForQuestionAnswering is optimised" in said
    assert ("the script asks for bf16" in said) == ("--bf16" in flags)
    assert math.isfinite(results["train_loss"]) and math.isfinite(results["eval_loss"])
    assert results["eval_samples"] > 9, "long contexts give several windows"
    predictions = json.loads((place / "out" / "eval_predictions.json").read_text())
    assert predictions.keys() == {str(number) for number in range(9)}
    assert 0 <= results["eval_exact_match"] <= results["eval_f1"] <= 100
    assert (place / "out" / "model.safetensors").exists() and (place / "out" / "tokenizer.json").exists()


def test_it_trains_as_python_does(place: Path) -> None:
    """With padding kept, the loss is stock's; files, gzipped or not, are what the data set by name is."""
    ours, _ = train(
        place, "ours", ["--train_file", str(place / "train.json")], ("-m", "cputrain", "run", "--padding=keep")
    )
    files = ["--train_file", str(place / "train.json"), "--validation_file", str(place / "validation.json.gz")]
    stock, _ = train(place, "stock", [*files, "--use_cpu"], ())
    for name in ("train_loss", "eval_loss", "eval_f1"):
        assert ours[name] == pytest.approx(stock[name], rel=1e-4), name


def test_without_data_it_says_what_to_give(place: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model_name_or_path", str(place / "model"), "--do_train"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=place, check=False)
    assert answer.returncode == 1
    assert "there is nothing for train: give --dataset_name or --train_file." in answer.stderr


# --- Windows -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(place: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place / "model")


def test_every_answer_is_found_again_in_the_windows_that_hold_it(place: Path, tokenizer) -> None:
    examples = squad.read_examples(place / "train.json")
    windows = squad.make_windows(examples, tokenizer, length=20, stride=6)
    held = {number: 0 for number in range(len(examples))}
    for window, number, offsets in zip(windows.inputs, windows.example_of, windows.offsets, strict=True):
        assert len(window["input_ids"]) <= 20
        start, end = window["start_positions"], window["end_positions"]
        if (start, end) != (0, 0):
            example = examples[number]
            assert example.context[offsets[start, 0] : offsets[end, 1]] == example.answers[0][0]
            held[number] += 1
    assert min(held.values()) >= 1 and max(held.values()) >= 2


def test_windows_overlap_by_the_stride_and_cover_the_context(place: Path, tokenizer) -> None:
    example = squad.read_examples(place / "train.json")[:1]
    windows = squad.make_windows(example, tokenizer, length=20, stride=6)
    inside = [offsets[offsets[:, 0] >= 0] for offsets in windows.offsets]
    assert len(inside) > 2
    assert inside[0][0, 0] == 0 and inside[-1][-1, 1] == len(example[0].context.rstrip())
    for before, after in itertools.pairwise(inside):
        assert (before[-6:] == after[:6]).all()


def test_a_file_that_is_not_squads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json is not a SQuAD file"):
        squad.read_examples(tmp_path / "x.json")


# --- Answers -----------------------------------------------------------------------------------------------------

EXAMPLE = squad.Example("q", "?", "rome or oslo", [("oslo", 8)])
# [CLS] ? [SEP] rome or oslo [SEP]
OFFSETS = np.array([[-1, -1], [-1, -1], [-1, -1], [0, 4], [5, 7], [8, 12], [-1, -1]])


def n_best(start: list[float], end: list[float], **search) -> list[dict]:
    windows = squad.Windows([{}], [0], [OFFSETS])
    return answers.n_best_answers([EXAMPLE], windows, np.array([start]), np.array([end]), answers.Search(**search))["q"]


def test_the_best_span_lies_in_the_context_and_has_its_length() -> None:
    start, end = [9, 9, 9, 3, 0, 2, 9], [9, 9, 9, 0, 0, 4, 9]
    assert [answer["text"] for answer in n_best(start, end)][:2] == ["rome or oslo", "oslo"]
    assert n_best(start, end, longest=2)[0]["text"] == "oslo"
    assert sum(answer["probability"] for answer in n_best(start, end)) == pytest.approx(1)
    assert len(n_best(start, end, n_best=2)) == 2
    assert all(answer["text"] for answer in n_best(start, end))


def test_windows_of_one_question_compete() -> None:
    windows = squad.Windows([{}, {}], [0, 0], [OFFSETS, OFFSETS])
    start = np.array([[0, 0, 0, 5, 0, 0, 0], [0, 0, 0, 0, 0, 7, 0]], dtype=float)
    end = np.array([[0, 0, 0, 5, 0, 0, 0], [0, 0, 0, 0, 0, 7, 0]], dtype=float)
    found = answers.n_best_answers([EXAMPLE], windows, start, end, answers.Search())
    assert [answer["text"] for answer in found["q"][:2]] == ["oslo", "rome"]


@pytest.mark.parametrize(("threshold", "best"), [(0.0, ""), (5.0, "oslo")])
def test_no_answer_wins_by_more_than_the_threshold(threshold: float, best: str) -> None:
    start, end = [4, 0, 0, 0, 0, 3, 0], [4, 0, 0, 0, 0, 3, 0]
    assert n_best(start, end, may_be_unanswerable=True, null_threshold=threshold)[0]["text"] == best


@pytest.mark.parametrize(
    ("prediction", "truths", "exact", "f1"),
    [
        ("The Oslo!", ["oslo"], 100, 100),
        ("in Oslo", ["Oslo", "in  the oslo."], 100, 100),
        ("big Oslo town", ["Oslo"], 0, 50),
        ("Rome", ["Oslo"], 0, 0),
        ("", [], 100, 100),
        ("Rome", [], 0, 0),
        ("the", ["a"], 100, 100),
        ("oslo oslo", ["oslo"], 0, 100 * 2 / 3),
    ],
)
def test_scores_are_those_of_squads_script(prediction: str, truths: list[str], exact: float, f1: float) -> None:
    example = squad.Example("q", "?", "", [(truth, 0) for truth in truths])
    found = answers.score([example], {"q": prediction})
    assert found == {"exact_match": pytest.approx(exact), "f1": pytest.approx(f1)}
