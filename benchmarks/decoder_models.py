"""Language models of public shapes with random weights, as `decoders.py` trains them: in full, with LoRA, on 4 bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

# Configuration class, its fields, sequences × tokens.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "llama-135m": (
        "Llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        (4, 256),
    ),
    "gemma3-270m": (
        "Gemma3Text",
        {"vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 256}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512},
        (2, 256),
    ),
    "gpt2": ("GPT2", {}, (4, 256)),
    "qwen3-0.6b": (
        "Qwen3",
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
        (1, 512),
    ),
    "llama-3.1-8b": (
        "Llama",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8},
        (1, 512),
    ),
    "bert-mlm": ("Bert", {}, (8, 128)),
}
RANK, DROPOUT = 16, 0.05
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def made(model: str, train: str, load: str, checkpointing: bool) -> nn.Module:
    import transformers

    kind, fields, _ = MODELS[model]
    auto = transformers.AutoModelForMaskedLM if kind == "Bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    if train == "qlora":
        built = of_four_bits(auto, config, DTYPES[load])
    else:
        built = auto.from_config(config, dtype=DTYPES[load])
    if checkpointing:
        built.gradient_checkpointing_enable()
        built.enable_input_require_grads()
    return (built if train == "full" else with_adapters(built)).train()


def with_adapters(model: nn.Module) -> nn.Module:
    import peft

    settings = {"r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": DROPOUT, "target_modules": "all-linear"}
    return peft.get_peft_model(model, peft.LoraConfig(**settings, task_type="CAUSAL_LM"))


def of_four_bits(auto: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Built layer by layer, so that no more than one matrix ever exists in floats. Layers of one shape hold copies of
    the same numbers: quantising takes long, and what they are doesn't matter here."""
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype)
    kept, quantised = model.get_output_embeddings(), {}
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear and part is not kept:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, linear_of_four_bits(part, quantised))
    for part in model.modules():
        fill(part)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.is_quantized = model.is_loaded_in_4bit = True  # as from_pretrained says it to peft
    return model


def linear_of_four_bits(of: nn.Linear, known: dict[tuple[int, int], Any]) -> nn.Module:
    """NF4 with nested scales, as BitsAndBytesConfig makes it."""
    import bitsandbytes

    shape = (of.out_features, of.in_features)
    made = bitsandbytes.nn.Linear4bit(shape[1], shape[0], bias=False, compute_dtype=torch.float32, device="meta")
    if shape not in known:
        options = {"quant_type": "nf4", "compress_statistics": True, "requires_grad": False}
        known[shape] = bitsandbytes.nn.Params4bit(torch.randn(shape) * 0.02, **options)._quantize("cpu")
    made.weight = copy.deepcopy(known[shape])
    made.weight.module = made
    return made


def fill(part: nn.Module) -> None:
    """What is on the meta device becomes random numbers, or ones in a norm."""
    for name, parameter in part._parameters.items():
        if parameter is not None and parameter.is_meta:
            numbers = torch.empty(parameter.shape, dtype=parameter.dtype)
            part._parameters[name] = nn.Parameter(numbers.normal_(0, 0.02) if numbers.dim() > 1 else numbers.fill_(1))


def batch_of(vocabulary: int, sequences: int, length: int, lengths: str, masked: bool) -> dict[str, Any]:
    """Random tokens; chat: lengths around 45%, half of the real tokens trained. Masked models: 15% of the tokens."""
    ids = torch.randint(1000, vocabulary, (sequences, length))
    real = torch.full((sequences,), length)
    if lengths == "chat":
        real = (torch.linspace(0.2, 0.7, sequences) * length).long()
    mask = (torch.arange(length) < real[:, None]).long()
    trained = mask.bool()
    if masked:
        trained = trained & (torch.rand(ids.shape) < 0.15)
    elif lengths == "chat":
        trained = trained & (torch.arange(length) >= real[:, None] // 2)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~trained, -100)}
