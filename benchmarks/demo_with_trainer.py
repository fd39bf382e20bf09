"""The demo's model and data on transformers' Trainer: what `tune_against_sweep.py` tunes.

cputrain run benchmarks/demo_with_trainer.py --output_dir /tmp/demo --per_device_train_batch_size 32 --max_steps 50
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "demo"))

from squad_data import collate, load_examples, make_feature
from tokenizers import Tokenizer
from training_side import DATA, PADDED_LENGTH, make_model
from transformers import HfArgumentParser, Trainer, TrainingArguments


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    arguments.remove_unused_columns = False
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    examples = load_examples(DATA / "train.json.gz")[:2048]
    features = [make_feature(tokenizer, example, PADDED_LENGTH) for example in examples]
    trainer = Trainer(
        make_model(tokenizer.get_vocab_size()),
        arguments,
        train_dataset=features,
        data_collator=partial(collate, padded_length=PADDED_LENGTH),
    )
    trainer.train()


if __name__ == "__main__":
    main()
