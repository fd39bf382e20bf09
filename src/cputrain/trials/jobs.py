"""What is trained in a trial: a configuration, how many layers of it, and how; and models that are known by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

# Public configurations: model type, its fields, architecture, sequences × tokens of a usual step.
_LLAMA = {"num_key_value_heads": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
KNOWN: dict[str, tuple[str, dict[str, Any], str, tuple[int, int]]] = {
    "minilm": (
        "bert",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
        "BertForQuestionAnswering",
        (12, 384),
    ),
    "bert-base": ("bert", {}, "BertForQuestionAnswering", (12, 384)),
    "bert-large": (
        "bert",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        "BertForQuestionAnswering",
        (8, 384),
    ),
    "roberta-base": (
        "roberta",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
        "RobertaForSequenceClassification",
        (16, 128),
    ),
    "gpt2": ("gpt2", {}, "GPT2LMHeadModel", (4, 256)),
    "llama-135m": (
        "llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        "LlamaForCausalLM",
        (4, 256),
    ),
    "gemma3-270m": (
        "gemma3_text",
        {"vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 256}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512},
        "Gemma3ForCausalLM",
        (2, 256),
    ),
    "qwen3-0.6b": (
        "qwen3",
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
        "Qwen3ForCausalLM",
        (2, 256),
    ),
    "llama-1b": (
        "llama",
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "tie_word_embeddings": True, "head_dim": 64, **_LLAMA},
        "LlamaForCausalLM",
        (1, 512),
    ),
    "llama-8b": (
        "llama",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, **_LLAMA},
        "LlamaForCausalLM",
        (1, 512),
    ),
}
# How configurations call the number of their layers.
_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
)


@dataclass(frozen=True)
class Job:
    """A training: what a worker needs to take real steps of it. `layers`: of the whole model."""

    name: str
    config: dict[str, Any]
    architecture: str
    layers: int
    sequences: int
    length: int
    dtype: str = "auto"  # of optimize, or "stock"
    padding: str = "drop"
    real: float = 1.0  # share of tokens that are no padding
    lora: int | None = None  # rank
    targets: tuple[str, ...] | None = None
    quantised: bool = False
    checkpointing: bool = False
    optimizer: str = "AdamW"
    batch_file: str | None = None  # tensors of a real batch

    def but(self, **changes: Any) -> Job:
        return dataclasses.replace(self, **changes)

    @property
    def recipe(self) -> str:
        """How it is trained, in words."""
        how = "QLoRA" if self.quantised else "LoRA" if self.lora else "full"
        words = [f"{how}, rank {self.lora}" if self.lora else "all weights", self.dtype]
        return ", ".join([*words, *(["gradient checkpointing"] if self.checkpointing else [])])


def from_answer(answer: dict[str, Any]) -> Job:
    """What came as JSON."""
    targets = answer.get("targets")
    return Job(**{**answer, "targets": tuple(targets) if targets else None})


def depth(config: dict[str, Any]) -> int:
    """How many layers a configuration has; 1 if it doesn't say, so that the model is tried as a whole."""
    found = [config[name] for name in _DEPTHS if isinstance(config.get(name), int) and config[name] > 0]
    return max(found, default=1)


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same with so many layers; lists that have an entry for each layer are cut."""
    whole = depth(config)
    cut = {name: min(config[name], layers) for name in _DEPTHS if isinstance(config.get(name), int)}
    lists = {
        name: value[:layers]
        for name, value in config.items()
        if isinstance(value, (list, tuple)) and len(value) == whole and "layer" in name
    }
    windows = {name: min(config[name], layers) for name in ("max_window_layers",) if isinstance(config.get(name), int)}
    return {**config, **cut, **lists, **windows}
