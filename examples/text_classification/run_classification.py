"""Fine-tune a model to classify texts, or pairs of texts, with Trainer.

cputrain run examples/text_classification/run_classification.py \
  --model_name_or_path bert-base-uncased \
  --train_file train.csv --validation_file held_back.csv \
  --text_columns sentence1 sentence2 --label_column label \
  --do_train --do_eval \
  --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 \
  --output_dir /tmp/classification --bf16 --use_cpu

Files are CSV or JSON lines; --dataset_name glue --dataset_config_name mrpc takes a data set. Labels may be words.
Nothing here knows of cputrain: `python run_classification.py …` trains as stock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments:
    model_name_or_path: str = field(metadata={"help": "The model to fine-tune: a name or a folder."})
    dataset_name: str | None = field(default=None, metadata={"help": "A data set by name."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(default=None, metadata={"help": "A CSV or JSON-lines file to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "A CSV or JSON-lines file to evaluate on."})
    text_columns: list[str] = field(default_factory=lambda: ["text"], metadata={"help": "One column, or two."})
    label_column: str = field(default="label", metadata={"help": "The column of the classes."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut."})
    pad_to_max_length: bool = field(default=True, metadata={"help": "False: pad to the longest of each batch."})


def main() -> None:
    arguments, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    train = rows(arguments, "train") if training.do_train else None
    evaluation = rows(arguments, "validation") if training.do_eval else None
    classes = sorted({str(label) for part in (train, evaluation) if part for label in part[arguments.label_column]})

    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model_name_or_path,
        num_labels=len(classes),
        id2label=dict(enumerate(classes)),
        label2id={name: number for number, name in enumerate(classes)},
    )

    def encode(some: dict[str, list]) -> dict[str, list]:
        texts = [some[column] for column in arguments.text_columns]
        labels = [classes.index(str(label)) for label in some[arguments.label_column]]
        return {**tokenizer(*texts, truncation=True, max_length=arguments.max_seq_length), "labels": labels}

    def encoded(part: Dataset | None) -> Dataset | None:
        return part and part.map(encode, batched=True, remove_columns=part.column_names)

    padding = "max_length" if arguments.pad_to_max_length else True
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encoded(train),
        eval_dataset=encoded(evaluation),
        data_collator=DataCollatorWithPadding(tokenizer, padding=padding, max_length=arguments.max_seq_length),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    if training.do_train:
        metrics = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    if training.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def rows(arguments: Arguments, split: str) -> Dataset:
    path = arguments.train_file if split == "train" else arguments.validation_file
    if path:
        return load_dataset("csv" if path.endswith(".csv") else "json", data_files=path, split="train")
    if arguments.dataset_name:
        return load_dataset(arguments.dataset_name, arguments.dataset_config_name, split=split)
    raise ValueError(f"there is nothing for {split}: give --dataset_name or --{split}_file.")


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


if __name__ == "__main__":
    main()
