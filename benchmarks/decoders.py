"""Language models, one training step at a time: stock PyTorch against cputrain, in turns.

    python benchmarks/decoders.py --model llama-135m --report
    python benchmarks/decoders.py --model llama-135m --lengths chat --isa avx2
    python benchmarks/decoders.py --model head-frozen head-half head-trained

The shapes are those of public configurations, the weights random. `head-…` are a vocabulary head and its loss alone:
1,024 tokens × 1,024 → 151,936, frozen, frozen with half of the labels ignored, and trained. Memory is a process's peak
(VmHWM) after its steps; for a head, what the steps add to operands and gradients that were there before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import interleaved
import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

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
    "bert-mlm": ("Bert", {}, (8, 128)),
}
HEADS = ("head-frozen", "head-half", "head-trained")
TOKENS, FEATURES, VOCABULARY = 1024, 1024, 151936


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-135m"], choices=[*MODELS, *HEADS])
    parser.add_argument("--lengths", choices=["full", "chat"], default="full", help="chat: 45%% of the tokens are real")
    parser.add_argument("--dtype", default="auto", help="of cputrain")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=interleaved.usable_cores())
    parser.add_argument("--isa", choices=["native", "avx2"], default="native")
    parser.add_argument("--report", action="store_true", help="write benchmarks/results/decoders_….md")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- a side's process ----------------------------------------------------------------------------------------------


def model_step(settings: dict[str, Any], ours: bool) -> Callable[[int], None]:
    import torch
    import transformers

    kind, fields, (sequences, length) = MODELS[settings["model"]]
    auto = transformers.AutoModelForMaskedLM if kind == "Bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = auto.from_config(config).train()
    if settings["checkpointing"]:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if ours:
        import cputrain

        model, optimizer = cputrain.optimize(model, optimizer, dtype=settings["dtype"])

    def step(number: int) -> None:
        torch.manual_seed(number)
        batch = batch_of(config.vocab_size, sequences, length, settings["lengths"], kind == "Bert")
        model(**batch, **({} if kind == "Bert" else {"use_cache": False})).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def batch_of(vocabulary: int, sequences: int, length: int, lengths: str, masked: bool) -> dict[str, Any]:
    """Random tokens; chat: lengths around 45%, half of the real tokens trained. Masked models: 15% of the tokens."""
    import torch

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


def head_step(settings: dict[str, Any], ours: bool) -> Callable[[int], None]:
    import torch
    from torch.nn import functional as F

    name = settings["model"]
    x = torch.randn(TOKENS, FEATURES, requires_grad=True)
    w = torch.randn(VOCABULARY, FEATURES).mul_(0.02).requires_grad_(name == "head-trained")
    labels = torch.randint(VOCABULARY, (TOKENS,))
    if name == "head-half":
        labels[::2] = -100
    x.grad = torch.zeros_like(x)
    if ours:
        from cputrain import memory
        from cputrain.blocks.lazy_logits import LazyLogits, Source
        from cputrain.formats import FORMATS, choose

        memory.keep_freed_memory()
        format = FORMATS[choose.choose(settings["dtype"]).format]()

    def step(number: int) -> None:
        x.grad = w.grad = None
        logits = LazyLogits.of(Source(x, w, None, None, format)) if ours else F.linear(x, w)
        F.cross_entropy(logits, labels).backward()

    return step


def side(name: str, settings: dict[str, Any]) -> None:
    make = head_step if settings["model"] in HEADS else model_step
    take_step = make(settings, name == "ours")

    before = interleaved.peak_memory_mb() if settings["model"] in HEADS else 0.0

    def step(number: int) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        take_step(number)
        return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}

    interleaved.serve({"step": step, "memory": lambda: {"mb": interleaved.peak_memory_mb() - before}})


# ---- the comparison ------------------------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace, model: str) -> dict[str, str]:
    settings = {name: getattr(arguments, name) for name in ("lengths", "dtype", "checkpointing")} | {"model": model}
    sides = [
        interleaved.Side(
            name, __file__, settings, interleaved.environment(arguments.isa, arguments.threads, ours=name == "ours")
        )
        for name in ("stock", "ours")
    ]
    with closing(sides[0]), closing(sides[1]):
        list(interleaved.in_turns(sides, 1))  # what is allocated once
        answers = list(interleaved.in_turns(sides, arguments.steps))
        memory = [one.ask("memory")["mb"] for one in sides]
    stock, ours = ([answer[i]["seconds"] for answer in answers] for i in (0, 1))
    cpu = interleaved.median_ratio(*([answer[i]["cpu"] for answer in answers] for i in (0, 1)))
    return {
        "model": model,
        "tokens": "–" if model in HEADS else f"{MODELS[model][2][0]}×{MODELS[model][2][1]} {arguments.lengths}",
        "stock s": f"{statistics.median(stock):.2f}",
        "cputrain s": f"{statistics.median(ours):.2f}",
        "times faster": f"**{interleaved.median_ratio(stock, ours):.2f}**",
        "by CPU time": f"{cpu:.2f}",
        "stock MB": f"{memory[0]:.0f}",
        "cputrain MB": f"{memory[1]:.0f}",
        "memory": f"{memory[1] / memory[0]:.2f}",
    }


def main() -> None:
    arguments = parse_arguments()
    if arguments.side:
        side(arguments.side, json.loads(arguments.settings))
        return
    rows = []
    for model in arguments.model:
        rows.append(compare(arguments, model))
        print(machine.table(rows[-1:]), flush=True)
    if arguments.report:
        what = "heads" if set(arguments.model) <= set(HEADS) else arguments.lengths
        told = ["decoders", what, *(["avx2"] if arguments.isa == "avx2" else [])]
        path = machine.report_path("_".join(told))
        command = f"    python benchmarks/decoders.py {' '.join(sys.argv[1:])}\n"
        title = "# Language models: stock PyTorch against cputrain\n"
        path.write_text("\n".join((title, command, machine.table(rows), machine.facts_table(machine.description()))))
        print(f"written to {path}")


if __name__ == "__main__":
    main()
