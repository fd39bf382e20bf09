"""Runs a script up to `Trainer.train()`, and writes what it would have trained: model, batches, how often.

    python -m cputrain.plan.until_train FOLDER SCRIPT ARGUMENTS…

The process ends there, at once: no step is trained, no checkpoint written, no tracker told.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from cputrain import settings
from cputrain.integrations import hook

FOUND, BATCH = "found.json", "batch.safetensors"
_BATCHES = 8  # looked at, to see how long texts are


def main(folder: str, script: str, arguments: list[str]) -> None:
    hook.activate()
    from cputrain.integrations import trainer

    def train(self: Any, *_: Any, **__: Any) -> NoReturn:
        _end(self, Path(folder))

    trainer.Trainer.train = train  # type: ignore[method-assign, assignment]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _end(trainer: Any, folder: Path) -> NoReturn:
    try:
        answer = _found(trainer, folder)
    except ValueError as error:
        answer = {"error": str(error)}
    (folder / FOUND).write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _found(trainer: Any, folder: Path) -> dict[str, Any]:
    import transformers

    from cputrain import process_memory
    from cputrain.trials import models

    args, model = trainer.args, trainer.model
    adapters = getattr(model, "peft_config", None)
    base = model.get_base_model() if adapters else model
    architecture = type(base).__name__
    if getattr(transformers, architecture, None) is None:
        raise ValueError(f"plan tries models of transformers' own classes; this script trains a {architecture}.")
    config = models.plain(base.config)
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    resident = process_memory.resident() - stored
    job = {
        "name": str(getattr(base.config, "_name_or_path", "") or architecture),
        "config": config,
        "architecture": architecture,
        "layers": models.layers_to_vary(config, architecture),
        "dtype": settings.value_of(settings.DTYPE) or ("auto" if args.bf16 else "fp32"),
        "padding": settings.value_of(settings.PADDING) or "drop",
        "checkpointing": bool(args.gradient_checkpointing),
        "optimizer": "SGD" if str(getattr(args.optim, "value", args.optim)) == "sgd" else "AdamW",
        "quantised": bool(getattr(base, "is_loaded_in_4bit", False)),
        **(_adapters(adapters) if adapters else {}),
        **_batches(trainer, folder),
    }
    unevenness = job.pop("unevenness")
    return {
        "job": job,
        "parameters": sum(parameter.numel() for parameter in base.parameters()),
        "unevenness": unevenness,
        "base": resident,
        "samples": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        "accumulation": args.gradient_accumulation_steps,
    }


def _adapters(configured: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(configured.values()))
    targets = getattr(first, "target_modules", None)
    targets = sorted(targets) if isinstance(targets, (set, list, tuple)) else None
    return {"lora": int(getattr(first, "r", 0)) or None, "targets": targets}


def _batches(trainer: Any, folder: Path) -> dict[str, Any]:
    """The one whose number of real tokens is nearest to the mean is kept."""
    import torch
    from safetensors.torch import save_file

    seen = []
    for batch in itertools.islice(trainer.get_train_dataloader(), _BATCHES):
        tensors = {name: value.contiguous() for name, value in batch.items() if isinstance(value, torch.Tensor)}
        if tensors:
            seen.append((tensors, _tokens(tensors)))
    if not seen:
        raise ValueError("the script's loader gave no batch of tensors.")
    mean = sum(tokens for _, tokens in seen) / len(seen)
    tensors, tokens = min(seen, key=lambda one: abs(one[1] - mean))
    save_file({name: value.clone() for name, value in tensors.items()}, folder / BATCH)
    first = tensors.get("input_ids", next(iter(tensors.values())))
    sequences, length = first.shape[0], first.shape[1] if first.ndim > 1 else 1
    return {
        "sequences": sequences,
        "length": length,
        "real": tokens / (sequences * length) if "attention_mask" in tensors else 1.0,
        "batch_file": str(folder / BATCH),
        "unevenness": max(1.0, max(tokens for _, tokens in seen) / max(tokens, 1)),
    }


def _tokens(tensors: dict[str, Any]) -> int:
    mask = tensors.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    first = tensors.get("input_ids", next(iter(tensors.values())))
    return int(first.shape[0] * (first.shape[1] if first.ndim > 1 else 1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
