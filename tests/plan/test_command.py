"""`cputrain plan` and `cputrain bench` as they are typed: answers, sentences, and pages that fit."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from cputrain.plan import answer, measure, nodes, script, text
from cputrain.plan.answer import Question
from cputrain.plan.measure import NoMemoryError
from cputrain.trials import comparison, turns
from cputrain.trials.comparison import Result
from tests.cluster.command_line import cputrain
from tests.integrations import tiny
from tests.plan.made import MB, job, measured

ROOT = Path(__file__).parents[2]
TRAINER = """
import sys
from transformers import Trainer, TrainingArguments
from tests.integrations import tiny

arguments = TrainingArguments(
    sys.argv[2], per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, report_to=[], use_cpu=True)
trainer = Trainer(tiny.bert(), arguments, train_dataset=tiny.windows(64))
print("prepared")
trainer.train()
print("trained")
"""


def typed(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "cputrain", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)


def test_a_folder_is_planned(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 90}
    transformers.BertConfig(num_hidden_layers=4, **sizes).save_pretrained(tmp_path)
    given = ["--batch", "4", "--seq", "32", "--no-alternatives", "--nodes", "1,4", "--price", "2", "--json"]
    done = typed("plan", ".", *given, "--memory", "1G", "--save-profile", "here.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parameters = sum(p.numel() for p in _model(sizes).parameters())
    assert found["model"]["parameters"] == parameters
    assert found["memory"]["gradients"] == 4 * parameters and found["memory"]["moments"] == 8 * parameters
    assert found["memory"]["weights"] >= 4 * parameters
    assert found["fits"] and found["limit"] == 1e9 and found["largest_batch"] > 4
    assert found["step"]["seconds"] > 0 and [point["nodes"] for point in found["nodes"]] == [1, 4]
    assert found["nodes"][1]["cost"] == pytest.approx(found["nodes"][1]["epoch_hours"] * 4 * 2)
    assert (tmp_path / "here.json").is_file()


def _model(sizes: dict) -> torch.nn.Module:
    return transformers.BertForQuestionAnswering(transformers.BertConfig(num_hidden_layers=4, **sizes))


def test_a_script_runs_up_to_train_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINER)
    done = typed("plan", "--no-alternatives", "--json", "script.py", "--output_dir", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prepared" in done.stderr and "trained" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["script.py"]
    found = json.loads(done.stdout)
    job = found["job"]
    assert (job["sequences"], job["length"], job["dtype"], found["accumulation"]) == (4, tiny.LENGTH, "fp32", 2)
    assert 0 < job["real"] < 1 and found["samples"] == 64
    assert found["model"]["architecture"] == "BertForQuestionAnswering"
    assert found["model"]["parameters"] == sum(p.numel() for p in tiny.bert().parameters())


@pytest.mark.parametrize(("code", "said"), [(0, "ended before it"), (7, "ended with code 7 before it")])
def test_a_script_that_never_trains_gets_a_sentence(
    code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, code))
    with pytest.raises(ValueError, match=rf"script.py {said} reached Trainer.train\(\)"):
        script.found_by(Path("script.py"), [], tmp_path)


def test_nothing_of_a_script_goes_into_its_folder_or_to_the_hub(tmp_path: Path) -> None:
    given = [
        "--do_train",
        "--output_dir",
        "out",
        "--push_to_hub",
        "--lr",
        "1",
        "--push_to_hub",
        "True",
        "--logging_dir=x",
    ]
    other = str(tmp_path / "out")
    expected = ["--do_train", "--output_dir", other, "--lr", "1", "--logging_dir", other]
    assert script.without_outputs(given, tmp_path) == expected
    assert script.output_of(given) == Path("out") and script.output_of(["--output_dir=a"]) == Path("a")
    assert script.output_of(["--output_dir"]) is None and script.output_of([]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "minilm", "--batch", "-3"], "--batch is -3; give a whole number of at least 1."),
        (["plan", "minilm", "--seq", "0"], "--seq is 0; give a whole number"),
        (["plan", "minilm", "--price", "-1"], "--price is -1; give what a machine costs"),
        (["plan", "minilm", "--price", "nan"], "--price is nan; give what"),
        (["plan", "minilm", "--real", "1.5"], "--real is 1.5; give a share"),
        (["plan", "minilm", "--nodes", "1,x"], "--nodes is '1,x'; give whole numbers"),
        (["plan", "minilm", "--nodes", "0"], "--nodes is '0'; give whole numbers"),
        (["plan", "minilm", "--network", "fast"], "--network is 'fast'; give a number with a unit"),
        (["plan", "minilm", "--memory", "0G"], "--memory is '0G'; give a number"),
        (["plan", "minilm", "--dtype", "fp8"], "--dtype is 'fp8'; choose one of auto, fp32"),
        (["plan", "minilm", "--task", "x"], "--task is 'x'; choose one of question-answering"),
        (["plan", "minilm", "gpt2"], "plan takes one model, found minilm gpt2"),
        (["plan", "no_such.py"], "there is no script no_such.py."),
        (["plan", "--batch", "3", __file__], "--batch is for a MODEL: a script says itself how it trains."),
        (["plan", "minilm", "--profile", "a", "--save-profile", "b"], "--profile reads what --save-profile writes"),
        (["bench", "--budget", "-3"], "--budget is -3; give the seconds"),
        (["bench", "--job", "x"], "--job is 'x'; choose one of minilm, llama-135m."),
        (["bench", "--dtype", "x"], "--dtype is 'x'; choose one of auto"),
    ],
)
def test_bad_input_gets_a_sentence(words: list[str], said: str) -> None:
    done = cputrain(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"cputrain: {said}") and len(done.stderr.splitlines()) == 1


def test_an_unknown_model_gets_a_sentence() -> None:
    done = cputrain("plan", "bert-bas")
    assert done.returncode == 2 and "did you mean bert-base" in done.stderr and len(done.stderr.splitlines()) == 1


# --- A whole plan, with measurements that are made up ------------------------------------------------------------


NOBODY: list = []  # stands where processes would be started


def made(monkeypatch: pytest.MonkeyPatch, no_room: tuple[str, ...] = (), **changes: object) -> answer.Plan:
    def found(_: object, asked: object, budget: float, say: object) -> object:
        if any(name in asked.recipe for name in no_room):
            raise NoMemoryError
        return measured(job=asked)

    monkeypatch.setattr(measure, "measure", found)
    fields = {"memory": 4e9, "nodes": [1, 2, 1024], "price": 1.5, "samples": 88_524}
    question = Question(job(), 15_000_000, **{**fields, **changes})
    return answer.make(question, NOBODY, lambda line: None)


def page(plan: answer.Plan, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in text.shown(plan):
        console.print(part)
    return console.file.getvalue()


def test_a_page_fits_a_terminal_and_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(monkeypatch)
    shown = page(plan)
    assert max(map(len, shown.splitlines())) <= 80
    for words in (
        "largest batch that fits",
        "88,524 sequences",
        "gradient checkpointing",
        "1,024",
        "of ideal",
        "Assumed",
    ):
        assert words in shown
    json.dumps(text.to_json(plan))


def test_what_has_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(monkeypatch, no_room=("all weights",), memory=100 * MB)
    assert plan.parts is not None and plan.parts.peak == 16 * 15e6 and not plan.asked.fits and not plan.curve
    shown = page(plan)
    assert "at least 0.24 GB" in shown and "doesn't fit in 0.10 GB" in shown and "no trial had room" in shown
    assert text.to_json(plan)["step"] is None


def test_ranks_share_memory_and_copy_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, two = made(monkeypatch), made(monkeypatch, ranks=2)
    assert two.limit == alone.limit / 2
    assert two.curve[0].seconds == pytest.approx(alone.curve[0].seconds + 60 * MB * 5.5 / 1e10)
    assert two.curve[0].sequences_per_second > 1.9 * alone.curve[0].sequences_per_second


def test_names_from_others_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure", lambda _, asked, *__: measured(job=asked))
    plan = answer.make(Question(job(name="[red]x[/red]"), 1, memory=4e9, alternatives=False), NOBODY, lambda line: None)
    assert "[red]x[/red]" in page(plan)


def test_a_profile_answers_without_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    first = made(monkeypatch, save_profile=path)
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured again"))
    question = Question(job(sequences=8), 15_000_000, profile=path, memory=4e9)
    plan = answer.make(question, NOBODY, lambda line: None)
    assert plan.notes == [] and plan.step is not None and first.step is not None
    assert plan.step.seconds == pytest.approx(2 * first.step.seconds - first.step.optimizer)
    assert [one.name for one in plan.alternatives] == [one.name for one in first.alternatives]


def test_local_ranks_are_a_machine_of_the_curve() -> None:
    assert nodes.last_that_pays([]) == 1


# --- bench -------------------------------------------------------------------------------------------------------


class Side:
    """Answers as a worker would; the control's steps are a tenth slower."""

    asked: list[str]

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.asked = name, []

    def ask(self, request: str, **arguments: object) -> dict:
        self.asked.append(request)
        seconds = {"stock": 0.3, "control": 0.33, "cputrain": 0.1}[self.name]
        known = {"config": {}, "architecture": "A", "layers": 2, "usual": [12, 384]}
        answers = {"resolve": known, "step": {"seconds": seconds}, "chosen": {"dtype": "int16"}}
        return answers.get(request, {"peak": 1e9 * seconds})

    def close(self) -> None: ...


def test_bench_compares_with_stock_and_with_its_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "Side", Side)
    monkeypatch.setattr(turns, "PAUSE_BETWEEN_TURNS", 0)
    [found] = comparison.compare(["minilm"], "auto", 60.0, lambda line: None)
    assert (found.times_faster, found.control) == pytest.approx((3.0, 0.3 / 0.33))
    assert (found.sequences, found.rounds, found.dtype) == (12, 15, "int16")
    assert (found.stock_memory, found.memory) == pytest.approx((0.3e9, 0.1e9))
    [short] = comparison.compare(["minilm"], "auto", 9.5, lambda line: None)
    assert short.sequences == 2  # so that three rounds have time


def test_the_line_that_is_shared() -> None:
    from cputrain.cli.bench import line

    results = [Result("minilm", 12, 384, "int16", 5, 4.9, 1.9, 2.6, 1.01, 9e8, 4e8)]
    assert "minilm 12×384 2.6 times the speed of stock PyTorch" in line(results) and "within 1%" in line(results)
