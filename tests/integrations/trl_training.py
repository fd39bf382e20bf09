"""SFT (packed; the assistant's words only) and DPO by TRL, on a tiny model, in full, with LoRA, with LoRA on 4 bits:
writes the losses, and who computed them.

cputrain run tests/integrations/trl_training.py losses.json
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
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
    """On 4 bits stock is right only if rows are whole blocks of 64."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
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


LORA = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0}
# On 4 bits TRL makes adapters bf16, in which stock computes: it differs less while they are small.
ADAPTERS = {"full": None, "lora": LoraConfig(**LORA, init_lora_weights=False), "qlora": LoraConfig(**LORA)}
FOUR_BITS = {
    "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "device_map": "cpu",
    "dtype": "float32",
}


def saved(folder: Path) -> str:
    llama().save_pretrained(folder / "model")
    return str(folder / "model")


def sft(folder: Path, how: str = "full", **options) -> SFTTrainer:
    rows = Dataset.from_list([{"messages": row["asked"] + row["good"]} for row in talks()])
    arguments = SFTConfig(**settings(folder), max_length=64, **options)
    model = llama()
    if how == "qlora":
        model = LlamaForCausalLM.from_pretrained(saved(folder), **FOUR_BITS)
    more = {"processing_class": tokenizer(), "peft_config": ADAPTERS[how]}
    return SFTTrainer(model, arguments, train_dataset=rows, **more)


def dpo(folder: Path, how: str = "full") -> DPOTrainer:
    """In full it loads the model twice; with LoRA a second adapter holds what is compared with."""
    rows = [{"prompt": row["asked"], "chosen": row["good"], "rejected": row["bad"]} for row in talks()]
    loading = FOUR_BITS if how == "qlora" else {"dtype": "float32"}
    arguments = DPOConfig(**settings(folder), model_init_kwargs=loading)
    more = {"processing_class": tokenizer(), "peft_config": ADAPTERS[how]}
    return DPOTrainer(saved(folder), args=arguments, train_dataset=Dataset.from_list(rows), **more)


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
        **{f"sft {how}": losses(sft(out.parent, how)) for how in ("lora", "qlora")},
        **{f"dpo {how}": losses(dpo(out.parent, how)) for how in ("lora", "qlora")},
    }
    found["rows_by_trl"] = sum(by_trl)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
