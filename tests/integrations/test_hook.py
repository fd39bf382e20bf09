"""Under `cputrain run` scripts get our classes under stock's names, and only of what they import."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = [sys.executable, "-m", "cputrain", "run"]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, "-c", code, *arguments], capture_output=True, text=True, check=False)


def holds(code: str) -> None:
    answer = run(code)
    assert answer.returncode == 0, answer.stderr


def test_accelerate_alone_does_not_bring_transformers() -> None:
    holds(
        "import sys, accelerate, cputrain\n"
        "assert accelerate.Accelerator is cputrain.Accelerator is sys.modules['accelerate.accelerator'].Accelerator\n"
        "assert 'transformers' not in sys.modules and 'cputrain.blocks' not in sys.modules\n"
    )


def test_every_class_of_transformers_descends_from_ours() -> None:
    holds(
        "import pickle, transformers, cputrain\n"
        "from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments\n"
        "assert TrainingArguments is cputrain.TrainingArguments and Trainer is cputrain.Trainer\n"
        "assert issubclass(Seq2SeqTrainingArguments, TrainingArguments) and issubclass(Seq2SeqTrainer, Trainer)\n"
        "assert TrainingArguments.__module__ == 'transformers.training_args'\n"
        "parse = transformers.HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses\n"
        "found, = parse(['--output_dir', '/tmp', '--use_ipex', '--no_cuda', '--ddp_backend', 'ccl'])\n"
        "assert found.use_ipex and found.use_cpu and type(found) is Seq2SeqTrainingArguments\n"
        "assert type(pickle.loads(pickle.dumps(found))) is Seq2SeqTrainingArguments\n"
    )


@pytest.mark.parametrize("kind", ["", "Seq2Seq"])
def test_a_script_with_the_guides_arguments_trains(kind: str, tmp_path) -> None:
    """As the guide writes them into a script: bf16=True, use_ipex=True, use_cpu=True, **kwargs."""
    holds(
        f"from transformers import {kind}Trainer as Trainer, {kind}TrainingArguments as TrainingArguments\n"
        "from tests.integrations.tiny import bert, windows\n"
        "kwargs = {'max_steps': 2, 'report_to': 'none', 'save_strategy': 'no'}\n"
        f"folder = {str(tmp_path)!r}\n"
        "arguments = TrainingArguments(output_dir=folder, bf16=True, use_ipex=True, use_cpu=True, **kwargs)\n"
        "trainer = Trainer(bert(), arguments, train_dataset=windows(16))\n"
        "trainer.train()\n"
        "from cputrain import api\n"
        "assert api.is_optimized(trainer.model) and trainer.state.global_step == 2\n"
    )


@pytest.mark.parametrize("first", ["import cputrain; cputrain.Trainer", "from cputrain import Trainer, Accelerator"])
def test_ours_may_be_imported_first(first: str) -> None:
    holds(
        f"{first}\nimport accelerate, cputrain, transformers\n"
        "assert transformers.Trainer is cputrain.Trainer\n"
        "assert transformers.TrainingArguments is cputrain.TrainingArguments\n"
        "assert accelerate.Accelerator is cputrain.Accelerator\n"
        "assert transformers.trainer.Accelerator is cputrain.Accelerator\n"
    )


def test_without_run_nothing_of_stocks_is_replaced() -> None:
    code = (
        "import accelerate, transformers, cputrain\nfrom cputrain import Accelerator, Trainer, TrainingArguments\n"
        "assert transformers.Trainer is not Trainer and issubclass(Trainer, transformers.Trainer)\n"
        "assert transformers.TrainingArguments is not TrainingArguments\n"
        "assert accelerate.Accelerator is not Accelerator\n"
        "assert transformers.trainer.Accelerator is accelerate.Accelerator\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_a_modules_loader_is_its_own_again() -> None:
    holds(
        "import inspect, accelerate.accelerator as m\n"
        "assert type(m.__loader__).__name__ == type(m.__spec__.loader).__name__ == 'SourceFileLoader'\n"
        "assert 'class Accelerator' in inspect.getsource(m)\n"
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("from transformers import TrainingArguments as T; T('/tmp', fp16=True)", "--fp16 doesn't train on CPUs"),
        ("from accelerate import Accelerator as A; A(mixed_precision='fp16', cpu=True)", "fp16 doesn't train on CPUs"),
    ],
)
def test_what_is_refused_is_one_sentence_and_exit_2(code: str, said: str) -> None:
    answer = run(code)
    assert answer.returncode == 2
    lines = [line for line in answer.stderr.splitlines() if "kernels-community" not in line]  # bitsandbytes' own
    assert len(lines) == 1 and lines[0].startswith(f"cputrain: {said}")


def test_a_script_may_catch_what_is_refused() -> None:
    holds(
        "from transformers import TrainingArguments\n"
        "try:\n    TrainingArguments('/tmp', fp16=True)\nexcept ValueError:\n    pass\n"
    )
