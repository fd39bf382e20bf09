"""Models of trials: configurations by name, folder or type, and models with random weights made of them."""

from __future__ import annotations

import difflib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto

from cputrain.trials.jobs import KNOWN, Job, depth, with_layers

_FIRST_TOKEN = 10  # ids below often mean something of their own
TASKS = {
    "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "question-answering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


def resolve(model: str, task: str | None) -> dict[str, Any]:
    """Configuration, architecture, layers and usual batch of what a user has named."""
    usual = (8, 128)
    if model in KNOWN:
        kind, fields, architecture, usual = KNOWN[model]
        config = transformers.CONFIG_MAPPING[kind](**fields)
    elif Path(model).is_dir():
        config, architecture = _of_folder(Path(model))
    elif model in transformers.CONFIG_MAPPING:
        config, architecture = transformers.CONFIG_MAPPING[model](), ""
    else:
        close = difflib.get_close_matches(model, [*KNOWN, *transformers.CONFIG_MAPPING], 3, 0.5)
        meant = f"did you mean {' or '.join(close)}?" if close else f"known names are {', '.join(KNOWN)}."
        raise ValueError(
            f"there is no model {model!r}, neither a name that plan knows, nor a model type of transformers, nor a "
            f"folder with config.json; {meant}"
        )
    if task or not (architecture and hasattr(transformers, architecture)):
        architecture = _architecture(config.model_type, task)
    fields = plain(config)
    longest = getattr(config, "max_position_embeddings", None)
    return {
        "config": fields,
        "architecture": architecture,
        "layers": layers_to_vary(fields, architecture),
        "parameters": _parameters(fields, architecture),
        "usual": usual,
        "longest": longest if isinstance(longest, int) else None,
    }


def plain(config: Any) -> dict[str, Any]:
    """As JSON; how its weights are stored on disk plays no part."""
    found = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in found.items() if name not in ("dtype", "torch_dtype", "quantization_config")}


def _of_folder(folder: Path) -> tuple[Any, str]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a model that save_pretrained has written.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} can't be used: {str(error).splitlines()[0]}") from None
    architectures = [name for name in getattr(config, "architectures", None) or [] if "For" in name or "LMHead" in name]
    return config, next(iter(architectures), "")


def _architecture(kind: str, task: str | None) -> str:
    """Of a task; without one: what a model of this type is usually trained for."""
    if task is None:
        is_decoder = kind in TASKS["causal-lm"] and kind not in TASKS["masked-lm"]
        order = ["seq2seq", "causal-lm"] if kind in TASKS["seq2seq"] else []
        order += ["causal-lm"] if is_decoder else ["question-answering", "classification", "masked-lm"]
        task = next((one for one in order if kind in TASKS[one]), None)
    name = TASKS[task].get(kind) if task else None
    name = name[0] if isinstance(name, (tuple, list)) else name
    if not name:
        asked = f"the task {task}" if task else "a task on text that plan knows"
        raise ValueError(f"transformers has no class of the model type {kind!r} for {asked}: give the script instead.")
    return name


def layers_to_vary(config: dict[str, Any], architecture: str) -> int:
    """How many layers the model has, if its parameters grow evenly with them; else 1: it is tried as a whole."""
    whole = depth(config)
    if whole < 3:
        return 1
    one, two, all_of_them = (_parameters(with_layers(config, k), architecture) for k in (1, 2, whole))
    return whole if one + (whole - 1) * (two - one) == all_of_them else 1


def _parameters(config: dict[str, Any], architecture: str) -> int:
    with torch.device("meta"):
        model = getattr(transformers, architecture)(_config(config))
    return sum(parameter.numel() for parameter in model.parameters())


def _config(fields: dict[str, Any]) -> Any:
    return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))


def load(job: Job) -> None:
    """Imports what a model needs, which is no part of its memory."""
    importlib.import_module("cputrain.api")
    getattr(transformers, job.architecture)
    if job.lora and importlib.util.find_spec("peft"):  # without it, `build` says so
        importlib.import_module("peft")


def build(job: Job, layers: int) -> nn.Module:
    """Random weights in fp32, of which those are trained that the job trains."""
    torch.manual_seed(0)
    fields = job.config if layers == job.layers else with_layers(job.config, layers)
    config = _config(fields)
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    model = getattr(transformers, job.architecture)(config).float().train()
    if job.quantised:
        _quantise(model)
    if job.lora:
        model = _with_adapters(model, job)
    if job.checkpointing:
        model.gradient_checkpointing_enable()
        if job.lora:
            model.enable_input_require_grads()
    return model


def _with_adapters(model: Any, job: Job) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise ValueError("LoRA needs peft: pip install peft.") from None
    usual = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = list(job.targets) if job.targets else usual.get(model.config.model_type, "all-linear")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=job.lora, lora_alpha=2 * (job.lora or 1), target_modules=targets)
    )


def _quantise(model: Any) -> None:
    """As transformers does when it loads a model with load_in_4bit: all linear layers but the head."""
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise ValueError('QLoRA needs bitsandbytes: pip install "cputrain[qlora]".') from None
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear and "head" not in name and part is not model.get_output_embeddings():
            made = bnb.nn.Linear4bit(
                part.in_features, part.out_features, part.bias is not None, torch.float32, quant_type="nf4"
            )
            made.weight = bnb.nn.Params4bit(part.weight.data, requires_grad=False, quant_type="nf4", module=made)
            made = made.to("cpu")
            if made.weight.quant_state is None:
                made.weight._quantize(torch.device("cpu"))
            model.set_submodule(name, made)


def batch(job: Job, model: Any, sequences: int) -> dict[str, Any]:
    """Tokens at random, or those of a real batch, repeated or cut to so many sequences."""
    if job.batch_file:
        from safetensors.torch import load_file

        return {name: _rows(tensor, sequences, job.sequences) for name, tensor in load_file(job.batch_file).items()}
    torch.manual_seed(sequences)
    config = model.config.get_text_config()
    ids = torch.randint(min(_FIRST_TOKEN, config.vocab_size - 1), config.vocab_size, (sequences, job.length))
    lengths = torch.full((sequences,), max(1, round(job.length * job.real)))
    mask = (torch.arange(job.length) < lengths[:, None]).long()
    found = {"input_ids": ids, "attention_mask": mask}
    if "QuestionAnswering" in job.architecture:
        return {**found, "start_positions": torch.zeros_like(lengths), "end_positions": lengths - 1}
    if "SequenceClassification" in job.architecture:
        return {**found, "labels": torch.zeros_like(lengths)}
    labels = ids.where(mask.bool(), -100)
    if "MaskedLM" in job.architecture:
        labels = labels.where(torch.rand(ids.shape) < 0.15, -100)
    return {**found, "labels": labels}


def _rows(tensor: torch.Tensor, sequences: int, whole: int) -> torch.Tensor:
    if tensor.ndim == 0 or tensor.shape[0] != whole:
        return tensor
    times = -(-sequences // whole)
    return torch.cat([tensor] * times)[:sequences].contiguous()
