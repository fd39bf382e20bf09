"""Fine-tune a chat model on conversations with LoRA, QLoRA or in full, up to a merged model that llama.cpp converts.

cputrain run examples/language_modeling/run_sft.py \
  --model Qwen/Qwen3-0.6B \
  --train_file chats.jsonl \
  --batch_size 2 --max_length 512 --epochs 1 \
  --output_dir /tmp/assistant

Each line of the file is one conversation: {"messages": [{"role": "user", "content": "…"}, {"role": "assistant",
"content": "…"}]}. What the assistant says is learned. --qlora keeps the frozen weights in 4 bits, --full trains all of
them; --checkpointing computes activations twice instead of keeping them. If TRL is installed, its SFTTrainer trains,
else transformers' Trainer, with the same losses. `python run_sft.py …` trains as stock.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import cputrain

ROLES = ("system", "user", "assistant", "tool")
OLDEST_BITSANDBYTES = (0, 46)  # the first that trains on a CPU
LEARNING_RATE = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}


def main() -> None:
    arguments = parse_arguments()
    check(arguments)
    chats = [chat for file in arguments.train_file for chat in conversations(file)]
    held_out = [chat for file in arguments.eval_file for chat in conversations(file)]
    set_seed(arguments.seed)
    tokenizer = tokenizer_of(arguments.model)
    train = tokenized(chats, tokenizer, arguments.max_length)
    evaluation = tokenized(held_out, tokenizer, arguments.max_length) if held_out else None

    trainer = trainer_of(arguments, model_of(arguments), tokenizer, train, evaluation)
    result = trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    is_first = trainer.is_world_process_zero()
    del trainer
    gc.collect()  # merging loads the model anew
    if is_first and not arguments.no_merge:
        print(conversion(arguments.output_dir if arguments.method == "full" else merged(arguments, tokenizer)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model: a folder, or its name on the hub")
    parser.add_argument("--train_file", nargs="+", type=Path, required=True, help="conversations, as JSON lines")
    parser.add_argument("--eval_file", nargs="+", type=Path, default=[], help="others, to evaluate on after each epoch")
    parser.add_argument("--output_dir", type=Path, required=True, help="where checkpoints and results go")
    method = parser.add_mutually_exclusive_group()
    for name, what in (("full", "train all weights"), ("qlora", "LoRA on frozen weights of 4 bits (NF4)")):
        method.add_argument(f"--{name}", dest="method", action="store_const", const=name, default="lora", help=what)
    parser.add_argument("--rank", type=positive, default=16, help="of the adapters (default 16)")
    parser.add_argument("--dropout", type=float, default=0.05, help="of the adapters' inputs (default 0.05)")
    parser.add_argument("--max_length", type=positive, default=512, help="tokens of a conversation (default 512)")
    parser.add_argument("--batch_size", type=positive, default=2, help="conversations at a time (default 2)")
    parser.add_argument("--accumulate", type=positive, default=1, help="batches for each step (default 1)")
    parser.add_argument("--epochs", type=float, default=1.0, help="default 1")
    parser.add_argument("--max_steps", type=int, default=-1, help="in place of --epochs")
    parser.add_argument("--learning_rate", type=float, help="default 2e-4; with --full 2e-5")
    parser.add_argument("--checkpointing", action="store_true", help="needs less memory and a third more time")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--resume", action="store_true", default=None, help="go on from the last checkpoint")
    parser.add_argument("--no_trl", action="store_true", help="transformers' Trainer, even if TRL is installed")
    parser.add_argument("--no_merge", action="store_true", help="leave the adapter as it is")
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text}")
    return int(text)


def check(arguments: argparse.Namespace) -> None:
    if arguments.max_length < 2:
        refuse(f"--max_length must be at least 2, found {arguments.max_length}.")
    if not 0 <= arguments.dropout < 1:
        refuse(f"--dropout must be at least 0 and less than 1, found {arguments.dropout}.")
    if arguments.method != "full" and not importlib.util.find_spec("peft"):
        refuse("LoRA needs peft: pip install 'cputrain[qlora]', or train all weights with --full.")
    if arguments.method == "qlora":
        check_bitsandbytes()


def check_bitsandbytes() -> None:
    remedy = f"--qlora needs {'.'.join(map(str, OLDEST_BITSANDBYTES))} or later: pip install 'cputrain[qlora]'."
    try:
        found = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        refuse(f"bitsandbytes isn't installed, and {remedy}")
    if tuple(map(int, found.split(".")[:2])) < OLDEST_BITSANDBYTES:
        refuse(f"bitsandbytes is {found}, and {remedy}")


def refuse(what: str) -> NoReturn:
    print(f"run_sft.py: {what}", file=sys.stderr)
    sys.exit(2)


# ---- conversations -------------------------------------------------------------------------------------------------


def conversations(file: Path) -> Iterator[list[dict[str, str]]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        refuse(f"{file} can't be read: {error.strerror}.")
    except UnicodeDecodeError:
        refuse(f"{file} is no text in UTF-8: convert it, with iconv for example.")
    if not any(line.strip() for line in lines):
        refuse(f"{file} has no conversation.")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield messages_of(line, f"{file}, line {number}")


def messages_of(line: str, place: str) -> list[dict[str, str]]:
    try:
        messages = json.loads(line)["messages"]
        said = [(message["role"], message["content"]) for message in messages]
    except (ValueError, TypeError, KeyError):
        refuse(f'{place}: expected {{"messages": [{{"role": …, "content": …}}, …]}}, found {line[:60]!r}.')
    for role, content in said:
        if role not in ROLES or not isinstance(content, str):
            refuse(f"{place}: a message needs a role of {', '.join(ROLES)} and a text, found {role!r}: {content!r}.")
    if not any(role == "assistant" for role, _ in said):
        refuse(f"{place}: the assistant says nothing, so there is nothing to learn.")
    return messages


def tokenized(chats: list[list[dict]], tokenizer: PreTrainedTokenizerBase, longest: int) -> Dataset:
    """Tokens of each conversation, with labels where the assistant speaks."""
    rows = [labelled(chat, tokenizer) for chat in chats]
    too_long = sum(len(row["input_ids"]) > longest for row in rows)
    rows = [{name: values[:longest] for name, values in row.items()} for row in rows]
    rows = [row for row in rows if any(label != -100 for label in row["labels"])]
    if too_long:
        print(f"{too_long} of {len(chats)} conversations are cut at {longest} tokens (--max_length)", file=sys.stderr)
    if len(rows) < len(chats):
        print(f"{len(chats) - len(rows)} of {len(chats)} are left out: no answer is left in them", file=sys.stderr)
    if not rows:
        refuse("no conversation has an answer within --max_length: choose a larger one.")
    return Dataset.from_list(rows)


def labelled(chat: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """An answer is what the template writes after all that was said before. Some templates write an earlier answer
    differently (without its thoughts) once the conversation goes on; that one gets no labels."""

    def tokens(count: int, **options: bool) -> list[int]:
        return tokenizer.apply_chat_template(chat[:count], return_dict=True, **options)["input_ids"]

    ids = tokens(len(chat))
    labels = [-100] * len(ids)
    for number, message in enumerate(chat):
        if message["role"] == "assistant" and number:
            before, after = tokens(number, add_generation_prompt=True), tokens(number + 1)
            if ids[: len(before)] == before and ids[: len(after)] == after:
                labels[len(before) : len(after)] = ids[len(before) : len(after)]
    return {"input_ids": ids, "labels": labels}


# ---- model ---------------------------------------------------------------------------------------------------------


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    tokenizer = loaded(AutoTokenizer, name)
    if not tokenizer.chat_template:
        refuse(f"the tokenizer of {name} has no chat template: choose a model that was made for conversations.")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def model_of(arguments: argparse.Namespace) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": "auto"}
    if arguments.method == "qlora":
        settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **settings)
        options |= {"quantization_config": four_bits, "device_map": "cpu"}
    model = loaded(AutoModelForCausalLM, arguments.model, **options)
    if arguments.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        lora_dropout=arguments.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapters)


def loaded(kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        refuse(f"{name} can't be loaded: {str(error).strip().splitlines()[0]}")


# ---- training ------------------------------------------------------------------------------------------------------


def trainer_of(
    arguments: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    evaluation: Dataset | None,
) -> Trainer:
    kind, settings, more = Trainer, TrainingArguments, {}
    if importlib.util.find_spec("trl") and not arguments.no_trl:
        from trl import SFTConfig, SFTTrainer

        kind, settings, more = SFTTrainer, SFTConfig, {"max_length": arguments.max_length}
    if arguments.checkpointing:
        model.enable_input_require_grads()
    collator = DataCollatorForSeq2Seq(tokenizer)
    return kind(
        model=model,
        args=settings(
            output_dir=str(arguments.output_dir),
            per_device_train_batch_size=arguments.batch_size,
            per_device_eval_batch_size=arguments.batch_size,
            gradient_accumulation_steps=arguments.accumulate,
            num_train_epochs=arguments.epochs,
            max_steps=arguments.max_steps,
            learning_rate=arguments.learning_rate or LEARNING_RATE[arguments.method],
            gradient_checkpointing=arguments.checkpointing,
            eval_strategy="no" if evaluation is None else "epoch",
            prediction_loss_only=True,
            logging_steps=5,
            save_total_limit=2,
            seed=arguments.seed,
            use_cpu=True,
            bf16=False,
            report_to="none",
            **more,
        ),
        data_collator=collator,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        callbacks=[Expectation(largest(train, collator, arguments.batch_size), arguments.accumulate)],
    )


def largest(train: Dataset, collator: DataCollatorForSeq2Seq, size: int) -> dict[str, Any]:
    longest = sorted(range(len(train)), key=lambda row: -len(train[row]["input_ids"]))[:size]
    return collator([train[row] for row in longest])


class Expectation(TrainerCallback):
    """Says before the first step how fast the training will be, and whether its memory suffices."""

    def __init__(self, batch: dict[str, Any], accumulated: int) -> None:
        self.batch, self.accumulated = batch, accumulated

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        expected = cputrain.estimate(model, self.batch, optimizer, accumulated=self.accumulated)
        if state.is_world_process_zero:
            print(expected, file=sys.stderr, flush=True)


def merged(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The adapter added to the model as it is on disk, not to its 4 bits."""
    from peft import PeftModel

    base = loaded(AutoModelForCausalLM, arguments.model, dtype="auto")
    folder = arguments.output_dir / "merged"
    PeftModel.from_pretrained(base, arguments.output_dir).merge_and_unload().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversion(folder: Path) -> str:
    words = ["python", "llama.cpp/convert_hf_to_gguf.py", str(folder), "--outfile", f"{folder}.gguf"]
    return f"The trained model is in {folder}. For llama.cpp:\n  {shlex.join([*words, '--outtype', 'auto'])}"


if __name__ == "__main__":
    main()
