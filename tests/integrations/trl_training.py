"""SFT (packed; the assistant's words only) and DPO by TRL, on a tiny model: writes the losses, and who computed them.

cputrain run tests/integrations/trl_training.py losses.json
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.kernels import ChunkedLogProbFunction

PEOPLE, PLACES = ["anna", "bob", "carla", "dan"], ["rome", "oslo", "bern", "riga"]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", "where", "does", "live", "lives", "in", "?", "."]
TEMPLATE = """
{%- for m in messages %}{{ m.role + ' : ' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + ' </s> ' }}{% endgeneration %}
{%- else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*WORDS, *PEOPLE, *PLACES, *(f"w{i}" for i in range(42))]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=TEMPLATE, **names)


def llama(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options)
    return LlamaForCausalLM(config)


def talks(count: int = 24) -> list[dict]:
    rows = []
    for i in range(count):
        who, place, other = PEOPLE[i % 4], PLACES[i // 4 % 4], PLACES[(i // 4 + 1) % 4]
        asked = {"role": "user", "content": f"where does {who} live ?" + " w7" * (i % 5)}
        good, bad = ({"role": "assistant", "content": f"{who} lives in {town} ."} for town in (place, other))
        rows.append({"asked": [asked], "good": [good], "bad": [bad]})
    return rows


def settings(folder: Path) -> dict:
    common = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1}
    common |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    return common | {"output_dir": str(folder)}


def sft(folder: Path, **options) -> SFTTrainer:
    rows = Dataset.from_list([{"messages": row["asked"] + row["good"]} for row in talks()])
    arguments = SFTConfig(**settings(folder), max_length=64, **options)
    return SFTTrainer(llama(), arguments, train_dataset=rows, processing_class=tokenizer())


def dpo(folder: Path) -> DPOTrainer:
    rows = [{"prompt": row["asked"], "chosen": row["good"], "rejected": row["bad"]} for row in talks()]
    llama().save_pretrained(folder / "model")  # DPO loads it twice
    arguments = DPOConfig(**settings(folder), model_init_kwargs={"dtype": "float32"})
    data = Dataset.from_list(rows)
    return DPOTrainer(str(folder / "model"), args=arguments, train_dataset=data, processing_class=tokenizer())


def count_calls() -> list[int]:
    """How many rows TRL's own function scores in each call."""
    rows, forward = [], ChunkedLogProbFunction.forward

    @functools.wraps(forward)
    def counted(ctx, hidden, *rest):
        rows.append(len(hidden))
        return forward(ctx, hidden, *rest)

    ChunkedLogProbFunction.forward = staticmethod(counted)
    return rows


def losses(trainer) -> dict:
    trainer.train()
    names = ("loss", "entropy", "mean_token_accuracy", "rewards/margins", "logps/chosen", "logits/chosen", "grad_norm")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {name: [line[name] for line in lines] for name in names if name in lines[0]}


def main() -> None:
    out, by_trl = Path(sys.argv[1]), count_calls()
    found = {
        "packed": losses(sft(out.parent, packing=True)),
        "assistant": losses(sft(out.parent, assistant_only_loss=True)),
        "dpo": losses(dpo(out.parent)),
    }
    found["rows_by_trl"] = sum(by_trl)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
