"""Train a causal language model on text files, packed into blocks without padding: from scratch, or further.

cputrain run examples/language_modeling/run_clm.py \
  --model_type llama \
  --config_overrides hidden_size=256,intermediate_size=704,num_hidden_layers=4,num_attention_heads=4 \
  --vocab_size 4096 \
  --train_file input.txt \
  --block_size 256 \
  --do_train --do_eval \
  --per_device_train_batch_size 8 --learning_rate 1e-3 --max_steps 300 \
  --output_dir /tmp/language_model --use_cpu

With a model that exists: --model_name_or_path FOLDER in place of the first three. --validation_file takes a text to
evaluate on; without it, the last blocks of --train_file are held back. Several files may be named, one after the other.
Nothing here knows of cputrain: `python run_clm.py …` trains as stock.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset, load_dataset
from tokenizers.implementations import ByteLevelBPETokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

END = "<|endoftext|>"


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "The model to train further: a folder."})
    model_type: str | None = field(default=None, metadata={"help": "A model from scratch: llama, gpt2, qwen3 …"})
    config_overrides: str = field(default="", metadata={"help": "Its sizes: hidden_size=256,num_hidden_layers=4 …"})
    tokenizer_name: str | None = field(default=None, metadata={"help": "The tokenizer, if it isn't the model's."})
    vocab_size: int = field(
        default=4096, metadata={"help": "Tokens of one learned from --train_file, if none is given."}
    )


@dataclass
class DataArguments:
    train_file: list[str] = field(default_factory=list, metadata={"help": "Text files to train on."})
    validation_file: list[str] = field(default_factory=list, metadata={"help": "Text files to evaluate on."})
    validation_percentage: int = field(default=5, metadata={"help": "Held back of --train_file, without one of these."})
    block_size: int = field(default=256, metadata={"help": "Tokens of one sequence."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    names, data, training = parser.parse_args_into_dataclasses()
    check(names, data, training)
    set_seed(training.seed)
    tokenizer = tokenizer_of(names, data)
    model = model_of(names, tokenizer)
    longest = getattr(model.config, "max_position_embeddings", None) or data.block_size
    if data.block_size > longest:
        refuse(f"--block_size is {data.block_size}, but this model has {longest} positions: choose at most {longest}.")

    train, evaluation = blocks_of(data, tokenizer, training)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    if training.do_train:
        metrics = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def check(names: ModelArguments, data: DataArguments, training: TrainingArguments) -> None:
    if bool(names.model_name_or_path) == bool(names.model_type):
        refuse("give either --model_name_or_path, a model to train further, or --model_type, one from scratch.")
    if names.model_type and names.model_type not in CONFIG_MAPPING:
        refuse(f"--model_type {names.model_type} is no model type of transformers: llama, gpt2, qwen3 are some.")
    if not (training.do_train or training.do_eval):
        refuse("there is nothing to do: add --do_train, --do_eval or both.")
    if not data.train_file and (training.do_train or not data.validation_file):
        refuse("there is no text: give --train_file a.txt b.txt …")
    if data.block_size < 2:
        refuse(f"--block_size must be at least 2, found {data.block_size}: each token is predicted from those before.")
    if not 0 < data.validation_percentage < 100:
        refuse(f"--validation_percentage must be between 1 and 99, found {data.validation_percentage}.")
    for file in (*data.train_file, *data.validation_file):
        check_text(Path(file))


def check_text(file: Path) -> None:
    try:
        with file.open(encoding="utf-8") as text:
            is_empty = not text.read(1 << 20).strip()
    except OSError as error:
        refuse(f"{file} can't be read: {error.strerror}.")
    except UnicodeDecodeError:
        refuse(f"{file} is no text in UTF-8: convert it, with iconv for example.")
    if is_empty:
        refuse(f"{file} has no text.")


def refuse(what: str) -> NoReturn:
    print(f"run_clm.py: {what}", file=sys.stderr)
    sys.exit(2)


def tokenizer_of(names: ModelArguments, data: DataArguments) -> PreTrainedTokenizerBase:
    name = names.tokenizer_name or names.model_name_or_path
    if name:
        return loaded(AutoTokenizer, name)
    if not data.train_file:
        refuse("a tokenizer is learned from --train_file: give one, or --tokenizer_name.")
    learned = ByteLevelBPETokenizer()
    learned.train(data.train_file, vocab_size=names.vocab_size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, bos_token=END, eos_token=END)


def model_of(names: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if names.model_name_or_path:
        model = loaded(AutoModelForCausalLM, names.model_name_or_path)
        if len(tokenizer) > model.config.vocab_size:
            refuse(f"the tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}: they don't match.")
        return model
    defaults = CONFIG_MAPPING[names.model_type]()
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    given = {"vocab_size": len(tokenizer), **tokens, **overrides(names.config_overrides, defaults)}
    try:
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[names.model_type](**given))
    except (ValueError, TypeError, AssertionError) as error:
        refuse(
            f"there is no {names.model_type} model of {names.config_overrides or 'these sizes'}: {first_line(error)}"
        )


def loaded(kind: Any, name: str) -> Any:
    try:
        return kind.from_pretrained(name)
    except (OSError, ValueError) as error:
        refuse(f"{name} can't be loaded: {first_line(error)}")


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def overrides(text: str, defaults: Any) -> dict[str, Any]:
    """`hidden_size=256,tie_word_embeddings=true` as values of the types that the configuration has."""
    found = {}
    for entry in filter(None, text.split(",")):
        name, _, value = entry.partition("=")
        if not hasattr(defaults, name) or not value:
            refuse(f"--config_overrides has {entry!r}: write name=value, with a name of {type(defaults).__name__}.")
        found[name] = converted(entry, value, getattr(defaults, name))
    return found


def converted(entry: str, value: str, default: Any) -> Any:
    if isinstance(default, bool):
        return value.lower() in ("true", "1", "yes")
    kinds = [type(default)] if isinstance(default, (int, float, str)) else [int, float, str]
    for kind in kinds:
        try:
            return kind(value)
        except ValueError:
            pass
    refuse(f"--config_overrides has {entry!r}: {value} is no {kinds[0].__name__}.")


def blocks_of(
    data: DataArguments, tokenizer: PreTrainedTokenizerBase, training: TrainingArguments
) -> tuple[Dataset | None, Dataset | None]:
    train = packed(data.train_file, tokenizer, data.block_size, training) if data.train_file else None
    if data.validation_file:
        return train, packed(data.validation_file, tokenizer, data.block_size, training)
    if not training.do_eval:
        return train, None
    held_back = max(len(train) * data.validation_percentage // 100, 1)
    if held_back == len(train):
        refuse(f"one block of {data.block_size} tokens is all there is: choose a smaller --block_size.")
    kept = len(train) - held_back
    return train.select(range(kept)), train.select(range(kept, len(train)))


def packed(files: list[str], tokenizer: PreTrainedTokenizerBase, size: int, training: TrainingArguments) -> Dataset:
    """All tokens of the files, one behind the other, cut into blocks; what 10,000 lines leave over is dropped."""

    def cut(lines: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens = list(itertools.chain.from_iterable(tokenizer(lines["text"], add_special_tokens=False)["input_ids"]))
        whole = [tokens[begin : begin + size] for begin in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": whole, "labels": whole}

    with training.main_process_first(desc="packing"):
        lines = load_dataset("text", data_files=files, split="train", keep_linebreaks=True)
        blocks = lines.map(cut, batched=True, batch_size=10_000, remove_columns=lines.column_names)
    if not len(blocks):
        refuse(f"{', '.join(files)}: not one block of {size} tokens; choose a smaller --block_size, or more text.")
    return blocks


if __name__ == "__main__":
    main()
