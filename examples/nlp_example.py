"""Fine-tune a model on sentence pairs with Accelerate: do the two sentences mean the same?

cputrain launch --config_file examples/nlp_example.yaml examples/nlp_example.py
cputrain run examples/nlp_example.py --cpu --mixed_precision bf16
cputrain run examples/nlp_example.py --cpu --train_file pairs.json --validation_file held_back.json

Files have MRPC's columns, one JSON object a line: {"sentence1": …, "sentence2": …, "label": 0 or 1}. Without files
--dataset_name is loaded (glue mrpc). Nothing here knows of cputrain: `python nlp_example.py` trains as stock.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from datasets import Dataset, load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
    set_seed,
)

MOST_TOKENS = 128


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision)
    set_seed(arguments.seed)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    train = loader(rows(arguments, "train"), tokenizer, arguments.batch_size, shuffle=True)
    evaluation = loader(rows(arguments, "validation"), tokenizer, 2 * arguments.batch_size, shuffle=False)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model_name_or_path, num_labels=2)
    optimizer = AdamW(model.parameters(), lr=arguments.learning_rate)
    steps = len(train) * arguments.num_epochs
    schedule = get_linear_schedule_with_warmup(optimizer, min(100, steps // 10), steps)

    model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)

    for epoch in range(arguments.num_epochs):
        model.train()
        total = 0.0
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.item()
        accuracy, f1 = scores(accelerator, model, evaluation)
        accelerator.print(f"epoch {epoch}: loss {total / len(train):.4f}, accuracy {accuracy:.3f}, F1 {f1:.3f}")

    if arguments.output_dir:
        accelerator.unwrap_model(model).save_pretrained(arguments.output_dir)
        tokenizer.save_pretrained(arguments.output_dir)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even beside a GPU")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="as Accelerate's configuration")
    parser.add_argument("--model_name_or_path", default="bert-base-cased")
    parser.add_argument("--dataset_name", nargs="+", default=["glue", "mrpc"], help="a data set, and its configuration")
    parser.add_argument("--train_file", help="JSON lines or CSV with MRPC's columns")
    parser.add_argument("--validation_file", help="JSON lines or CSV with MRPC's columns")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", help="where the model goes")
    return parser.parse_args()


def rows(arguments: argparse.Namespace, split: str) -> Dataset:
    path = arguments.train_file if split == "train" else arguments.validation_file
    if path is None:
        return load_dataset(*arguments.dataset_name, split=split)
    kind = "csv" if path.endswith(".csv") else "json"
    return load_dataset(kind, data_files=path, split="train")


def loader(pairs: Dataset, tokenizer: PreTrainedTokenizerBase, batch_size: int, shuffle: bool) -> DataLoader:
    """Batches padded to their longest pair."""

    def collate(some: list[dict]) -> dict[str, torch.Tensor]:
        first, second = ([row[name] for row in some] for name in ("sentence1", "sentence2"))
        batch = tokenizer(first, second, truncation=True, max_length=MOST_TOKENS, padding=True, return_tensors="pt")
        return {**batch, "labels": torch.tensor([row["label"] for row in some])}

    return DataLoader(pairs, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)


@torch.no_grad()
def scores(accelerator: Accelerator, model: torch.nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Accuracy, and F1 of the pairs that mean the same, over all processes."""
    model.eval()
    right = total = both = predicted = actual = 0
    for batch in batches:
        guesses = model(**batch).logits.argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right += int((guesses == labels).sum())
        total += len(labels)
        both += int((guesses & labels).sum())
        predicted, actual = predicted + int(guesses.sum()), actual + int(labels.sum())
    return right / total, 2 * both / max(1, predicted + actual)


if __name__ == "__main__":
    main()
