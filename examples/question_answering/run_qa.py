"""Fine-tune a model on question answering, as the guides for CPUs do.

cputrain run examples/question_answering/run_qa.py \
  --model_name_or_path bert-base-uncased \
  --dataset_name squad \
  --do_train \
  --do_eval \
  --per_device_train_batch_size 12 \
  --learning_rate 3e-5 \
  --num_train_epochs 2 \
  --max_seq_length 384 \
  --doc_stride 128 \
  --output_dir /tmp/debug_squad/ \
  --use_ipex \
  --bf16 \
  --use_cpu

With files of one's own: --train_file train-v1.1.json.gz --validation_file dev-v1.1.json.gz in place of --dataset_name.
Nothing here knows of cputrain: `python run_qa.py …` trains as stock, without --use_ipex.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from answers import Search, n_best_answers, score
from squad import Example, Windows, load_examples, make_windows, read_examples
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "The model to fine-tune: a name or a folder."})
    config_name: str | None = field(default=None, metadata={"help": "The configuration, if it isn't the model's."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "The tokenizer, if it isn't the model's."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "A data set with SQuAD's columns."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The data set's configuration."})
    train_file: str | None = field(default=None, metadata={"help": "A SQuAD file (.json, .json.gz) to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "A SQuAD file to evaluate on."})
    max_seq_length: int = field(default=384, metadata={"help": "Tokens of a window: question and context."})
    doc_stride: int = field(default=128, metadata={"help": "Tokens that two windows of one context share."})
    pad_to_max_length: bool = field(default=True, metadata={"help": "False: pad to the longest of each batch."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many questions."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many questions."})
    version_2_with_negative: bool = field(default=False, metadata={"help": "Some questions have no answer."})
    null_score_diff_threshold: float = field(default=0.0, metadata={"help": "By how much 'no answer' must win."})
    n_best_size: int = field(default=20, metadata={"help": "Answers that are written for each question."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of the longest answer."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_arguments, data, training = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    set_seed(training.seed)

    cache = {"cache_dir": model_arguments.cache_dir}
    name = model_arguments.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(model_arguments.tokenizer_name or name, use_fast=True, **cache)
    model = AutoModelForQuestionAnswering.from_pretrained(name, config=model_arguments.config_name, **cache)

    train_examples = examples_of(data, "train") if training.do_train else []
    eval_examples = examples_of(data, "validation") if training.do_eval else []
    train = make_windows(train_examples, tokenizer, data.max_seq_length, data.doc_stride)
    evaluation = make_windows(eval_examples, tokenizer, data.max_seq_length, data.doc_stride)

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train.inputs or None,
        eval_dataset=evaluation.inputs or None,
        data_collator=collator(tokenizer, data),
        processing_class=tokenizer,
        compute_metrics=metrics(eval_examples, evaluation, data, Path(training.output_dir)),
    )
    if training.do_train:
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        report(trainer, "train", {**result.metrics, "train_samples": len(train.inputs)})
    if training.do_eval:
        report(trainer, "eval", {**trainer.evaluate(), "eval_samples": len(evaluation.inputs)})


def examples_of(data: DataArguments, split: str) -> list[Example]:
    path, most = {
        "train": (data.train_file, data.max_train_samples),
        "validation": (data.validation_file, data.max_eval_samples),
    }[split]
    if path:
        return read_examples(path)[:most]
    if data.dataset_name:
        return load_examples(data.dataset_name, data.dataset_config_name, split)[:most]
    raise ValueError(f"there is nothing for {split}: give --dataset_name or --{split}_file.")


def collator(tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> DataCollatorWithPadding:
    if data.pad_to_max_length:
        return DataCollatorWithPadding(tokenizer, padding="max_length", max_length=data.max_seq_length)
    return DataCollatorWithPadding(tokenizer)


def metrics(
    examples: list[Example], windows: Windows, data: DataArguments, folder: Path
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Scores the logits of all windows; the answers themselves go into the output folder."""
    search = Search(
        data.n_best_size, data.max_answer_length, data.version_2_with_negative, data.null_score_diff_threshold
    )

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        start_logits, end_logits = prediction.predictions[:2]
        n_best = n_best_answers(examples, windows, start_logits, end_logits, search)
        best = {identity: answers[0]["text"] for identity, answers in n_best.items()}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "eval_predictions.json").write_text(json.dumps(best, indent=2, ensure_ascii=False))
        (folder / "eval_nbest_predictions.json").write_text(json.dumps(n_best, indent=2, ensure_ascii=False))
        return score(examples, best)

    return compute


def report(trainer: Trainer, split: str, values: dict[str, float]) -> None:
    trainer.log_metrics(split, values)
    trainer.save_metrics(split, values)


if __name__ == "__main__":
    main()
